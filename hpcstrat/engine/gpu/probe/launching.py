"""Starts the processes of a trial, which must not join the surrounding MPI job."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcstrat._launchers import SCHEDULERS, is_of_launcher
from hpcstrat.engine.gpu.probe.outcome import LauncherEnd

__all__ = ["find_launcher", "kept_settings", "launch", "scrubbed"]

# Without the schedulers' variables, mpirun starts processes on this host only, not on
# the whole allocation.
_SCHEDULER_PREFIXES = tuple(
    prefix for scheduler in SCHEDULERS.values() for prefix in scheduler.prefixes
)
# The user's settings for data transfers, which the ranks of a job inherit, too.
_SETTINGS = (
    *("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_mtl", "OMPI_MCA_coll", "OMPI_MCA_osc"),
    *("OMPI_MCA_opal_cuda", "OMPI_MCA_opal_common_ucx", "OMPI_MCA_mpi_common_cuda"),
    *("OMPI_MCA_accelerator", "OMPI_MCA_smsc", "UCX_", "MPICH_GPU", "MPICH_RDMA"),
    *("MPIR_CVAR_", "I_MPI_OFFLOAD", "I_MPI_FABRICS", "MV2_USE_CUDA", "MV2_CUDA"),
    *("FI_", "PSM2_CUDA", "PSM3_GPU", "LD_PRELOAD"),
)
# Variables that hpcstrat itself sets, see hpcstrat.engine.topology.starting.
_OURS = "MPIR_CVAR_CH4_PROGRESS_THROTTLE"
_PATHS = "LD_LIBRARY_PATH"
_OPEN_MPI, _HYDRA = "Open MPI", "Hydra"
_GRACE_SECONDS = 3.0


def scrubbed(
    environment: Mapping[str, str], *, allocation: bool = False
) -> dict[str, str]:
    """Return an environment without the job's variables, but with settings of MPI.

    If ``allocation``, the scheduler's variables are kept, because the scheduler's own
    launcher needs them.
    """
    dropped = () if allocation else _SCHEDULER_PREFIXES
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_SETTINGS)
        or not (is_of_launcher(name) or name.startswith(dropped))
    }


def kept_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the user's settings that affect messages with GPU memory.

    The result is the same in a rank and outside of a job.
    """
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith(_SETTINGS) and not name.startswith(_OURS)
    }
    # Ignore the folders of MPI's own libraries, which mpirun adds to the variable.
    own = {str(path) for path in _library_folders()}
    folders = environment.get(_PATHS, "").split(os.pathsep)
    others = [name for name in folders if name and os.path.realpath(name) not in own]
    if others:
        found[_PATHS] = os.pathsep.join(dict.fromkeys(others))
    return found


def _library_folders() -> list[Path]:
    """Return the folders of the MPI libraries that this process has loaded."""
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = {line.split(None, 5)[-1] for line in text.splitlines() if "/libmpi" in line}
    return [Path(os.path.realpath(path)).parent for path in sorted(paths)]


@functools.cache
def _version(path: str, environment: tuple[tuple[str, str], ...]) -> str:
    """Return the output of a launcher's ``--version`` option."""
    try:
        done = subprocess.run(
            [path, "--version"],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            env=dict(environment),
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path}: {error}"
    return done.stdout + done.stderr


def _family(text: str) -> str:
    """Return the family of a launcher or MPI library, from its version text."""
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        return _OPEN_MPI
    if any(word in text for word in ("HYDRA", "MPICH", "Intel", "MVAPICH")):
        return _HYDRA
    return ""


def find_launcher(
    library_version: str, environment: Mapping[str, str]
) -> tuple[list[str], str]:
    """Return the command that starts two ranks of an MPI library on this host.

    The caller appends the program to the command. If there is no launcher, the command
    is empty, and the second result is the reason.
    """
    folders = [p / "bin" for lib in _library_folders() for p in lib.parents]
    # Do not resolve sys.executable: it may be a link from a virtual environment, which
    # has an mpirun, to the system's Python.
    searched = [*map(str, folders), str(Path(sys.executable).parent), None]
    family, others = _family(library_version), []
    for folder in searched:
        for name in ("mpirun", "mpiexec"):
            path = shutil.which(name, path=folder or environment.get("PATH"))
            if path is None or path in others:
                continue
            found = _family(_version(path, tuple(sorted(environment.items()))))
            if found and found == family:
                return [path, *_options(family), "-n", "2"], ""
            others.append(path)
    name = library_version.strip("\0 ").split(",")[0].split("\n")[0]
    if others:
        return [], f"{', '.join(others)}: not the launcher of {name}"
    return [], f"no mpirun of {name} beside the library, Python, or on the PATH"


def _options(family: str) -> list[str]:
    if family != _OPEN_MPI:
        return []
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*as_root, "--oversubscribe", "--bind-to", "none"]


def launch(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    *,
    limit_seconds: float,
    num_ranks: int,
) -> LauncherEnd:
    """Run a command in its own process group, and kill the group afterwards.

    The command's output is written to a file in ``folder``.
    """
    path = Path(folder) / "output"
    # With a pipe, a process that outlives the launcher would keep the reader waiting.
    with path.open("wb") as output:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            return LauncherEnd(127, str(error), num_ranks)
    status: int | None = None
    try:
        status = process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        # On SIGTERM, a launcher ends the processes that it has started, too.
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    finally:
        _signal(process.pid, signal.SIGKILL)
        process.wait()
    return LauncherEnd(status, path.read_text(errors="replace"), num_ranks)


def _signal(group: int, number: int) -> None:
    """Send a signal to all processes of a group, if there are any left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
