"""The names in a folder of checkpoints: what is there, and what dead jobs left."""

from __future__ import annotations

import os
import platform
import secrets
from contextlib import suppress
from typing import Any

from hpcstrat.checkpoint.file_names import flush_folder
from hpcstrat.cluster_resolver import launch_from_environment

__all__ = [
    "identity_of",
    "prepare",
    "remove_abandoned",
    "require_one_writer",
    "temporary_name",
]

# PF_EXITING of Linux, from include/linux/sched.h.
_EXITING = 0x4


def temporary_name(name: str) -> str:
    """Return a name under which a checkpoint is written.

    Not collective.

    Parameters
    ----------
    name : str
        That of the checkpoint.

    Returns
    -------
    str
        Says whose it is; used once.
    """
    job = os.environ.get("SLURM_JOB_ID", "0")
    owner = f"{platform.node()}-{os.getpid()}"
    return f".{name}.{job}.{owner}.{secrets.token_hex(4)}"


def prepare(directory: str) -> None:
    """Make a folder, where it is missing, and remove what dead jobs left in it.

    Not collective: one rank calls it.

    Parameters
    ----------
    directory : str
        The folder.

    Raises
    ------
    OSError
        If it cannot be made.
    """
    if not os.path.isdir(directory):
        os.makedirs(directory, exist_ok=True)
        flush_folder(os.path.dirname(directory))
    remove_abandoned(directory)


def remove_abandoned(directory: str) -> None:
    """Remove temporary files of processes of this host that have ended.

    Not collective: one rank calls it.

    Parameters
    ----------
    directory : str
        Need not exist.
    """
    host = platform.node()
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        if not name.startswith(".ckpt-"):
            continue
        owner = name.rpartition(".")[0].partition(".h5.")[2].partition(".")[2]
        node, _, pid = owner.rpartition("-")
        if node == host and pid.isdigit() and not _lives(pid):
            # Another job removes it, or may not be disturbed.
            with suppress(OSError):
                os.unlink(os.path.join(directory, name))


def _lives(pid: str) -> bool:
    """Whether a process may still write; proc_pid_stat(5) has the fields."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            state, *others = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    # To give back memory and blocks of files, a killed process takes some time.
    return state not in "ZX" and not int(others[5]) & _EXITING


def identity_of(path: str) -> tuple[int, int, int] | None:
    """Return what tells a file from another of the same name.

    Not collective.

    Parameters
    ----------
    path : str
        Its name.

    Returns
    -------
    tuple of int or None
        None where there is none.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def require_one_writer(strategy: Any) -> None:
    """Refuse a strategy with which all ranks of a job would write the same files.

    Not collective.

    Parameters
    ----------
    strategy : Strategy
        Whose replicas save.

    Raises
    ------
    RuntimeError
        For a strategy of one replica in a job of several ranks.
    """
    size = launch_from_environment().size
    if size > 1 and not strategy.distributes:
        raise RuntimeError(
            f"expected a strategy over the {size} ranks of this job, found "
            f"{strategy!r}, with which all ranks would write the same files; use "
            "MultiWorkerMirroredStrategy, or pass independent=True and a folder for "
            "each rank"
        )
