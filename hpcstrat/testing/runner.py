"""Runs a function or a program on several ranks, and reports how each rank ended."""

from __future__ import annotations

import os
import pickle
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcstrat.errors import HpcstratError
from hpcstrat.testing.job import Job
from hpcstrat.testing.launcher import clean_environment, launch_command

__all__ = [
    "Finished",
    "RankFailure",
    "RankTimeout",
    "finish",
    "launch",
    "read_failures",
    "run",
    "sections",
]


class RankFailure(HpcstratError):
    """A rank raised, or ended without a result.

    Parameters
    ----------
    message : str
        What was expected and found, and every traceback.
    failures : mapping of int to str
        Traceback of each rank that raised.
    returncode : int or None
        The launcher's exit code; None if it had to be ended.
    stdout, stderr : str
        Output of launcher and ranks.
    """

    def __init__(
        self,
        message: str,
        failures: Mapping[int, str] | None = None,
        returncode: int | None = None,
        *,
        stdout: str = "",
        stderr: str = "",
    ) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr


class RankTimeout(RankFailure):
    """The job did not end in time; the message shows where each rank was.

    Parameters
    ----------
    *args : object
        As for ``RankFailure``.
    stacks : mapping of int to str
        Python stacks of each rank that could answer.
    **kwargs : object
        As for ``RankFailure``.
    """

    def __init__(
        self, *args: Any, stacks: Mapping[int, str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.stacks = dict(stacks or {})


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a program that ``launch`` ran.

    Parameters
    ----------
    returncode : int
        The launcher's exit code, negative for a signal.
    stdout : str
        Output of the ranks, in any order.
    stderr : str
        Standard error of the ranks and the launcher.
    """

    returncode: int
    stdout: str
    stderr: str


def _is_installed(module: ModuleType) -> bool:
    """Return whether other processes find this module without our sys.path."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == "hpcstrat":
        return True
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = (Path(sysconfig.get_path(name)).resolve() for name in names)
    return any(Path(file).resolve().is_relative_to(folder) for folder in folders)


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return the call as bytes; a function of a test module travels with its code."""
    try:
        import cloudpickle
    except ImportError as exc:
        raise HpcstratError(
            "expected cloudpickle to send the function to the ranks, found it missing; "
            "pip install cloudpickle"
        ) from exc
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    # The name __main__ means another module in the ranks; cloudpickle knows that.
    by_value = (
        module is not None
        and module.__name__ != "__main__"
        and not _is_installed(module)
        and module.__name__ not in cloudpickle.list_registry_pickle_by_value()
    )
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        call = cloudpickle.dumps((function, args))
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    # The path comes first, as Python finds names in the call through it.
    return pickle.dumps((sys.path, call))


def _environment(changes: Mapping[str, str] | None) -> dict[str, str]:
    """Return the ranks' environment: no outer job, and this hpcstrat importable."""
    environment = clean_environment(changes)
    # A rank that crashes in C code shows where; `Job.show_stacks` needs it, too.
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    # Tests of failures would leave files.
    environment.setdefault("HPCSTRAT_HANG_FOLDER", "")
    checkout = Path(__file__).parents[2]
    if checkout not in map(Path, sysconfig.get_paths().values()):
        paths = [str(checkout), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def sections(title: str, texts: Mapping[int, str]) -> str:
    """Return the texts of ranks, each below a line that names the rank."""
    return "".join(
        f"\n--- rank {rank}: {title}\n{text.rstrip()}\n"
        for rank, text in sorted(texts.items())
    )


def _time_is_up(job: Job, n: int, timeout: float) -> RankTimeout:
    """Collect the stacks of a job that still runs."""
    # The processes, and their stacks, end with the job.
    job.show_stacks()
    stacks, stderr = job.stacks(), job.stderr
    ended = [rank for rank in range(n) if (job.folder / f"{rank}.result").exists()]
    failures = read_failures(job.folder)
    message = (
        f"expected {n} ranks to end within {timeout:g} s, found them running"
        + (f", {ended} of them past their function" if ended else "")
        + "; look for the collective that not all ranks entered"
        + sections("traceback", failures)
        + sections("stacks", stacks)
        + (f"\n--- standard error\n{stderr}" if stderr else "")
    )
    return RankTimeout(
        message, failures, stacks=stacks, stdout=job.stdout, stderr=stderr
    )


def read_failures(folder: Path) -> dict[int, str]:
    """Return the failures that ranks of a job wrote into its folder."""
    return {int(path.stem): path.read_text() for path in folder.glob("*.failure")}


def finish(
    command: Sequence[str],
    folder: Path,
    n: int,
    timeout: float,
    env: Mapping[str, str] | None,
) -> Finished:
    """Run a command until it ends or its time is up, and leave no process behind."""
    job = Job(command, folder, _environment(env))
    try:
        returncode = job.wait(timeout)
        if returncode is None:
            raise _time_is_up(job, n, timeout)
    finally:
        job.end()
    return Finished(returncode, job.stdout, job.stderr)


def launch(
    n: int,
    command: Sequence[str | os.PathLike[str]],
    *,
    timeout: float = 60,
    launcher: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    fault_tolerant: bool = False,
) -> Finished:
    """Run a program on n ranks of this machine, to look at its exit code and output.

    Not collective.

    Parameters
    ----------
    n : int
        Number of ranks; may exceed the number of cores.
    command : sequence of str
        Program and arguments, such as ``[sys.executable, "train.py"]``.
    timeout : float, optional
        Seconds after which the job is ended.
    launcher : path, optional
        The mpirun to use; default: the one beside the interpreter, else of the PATH.
    env : mapping of str to str, optional
        Environment variables to set for the job.
    fault_tolerant : bool, optional
        Let the job live on when a rank dies, see `launch_command`.

    Returns
    -------
    Finished
        Exit code and output. No process of the job is left.

    Raises
    ------
    RankTimeout
        If the job did not end in time; its Python processes' stacks are shown.
    """
    words = launch_command(n, launcher, fault_tolerant=fault_tolerant)
    words += [os.fspath(word) for word in command]
    with tempfile.TemporaryDirectory(prefix="hpcstrat-") as folder:
        return finish(words, Path(folder), n, timeout, env)


def run(
    n: int,
    fn: Callable[..., Any],
    /,
    *args: Any,
    timeout: float = 60,
    launcher: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call a function on n ranks of this machine and return the n results.

    Not collective.

    Parameters
    ----------
    n : int
        Number of ranks; may exceed the number of cores.
    fn : callable
        Called once on each rank; may be a local function or a lambda. It travels with
        its code, by cloudpickle, unless it belongs to an installed package.
    *args : object
        Its arguments; picklable.
    timeout : float, optional
        Seconds after which the job is ended.
    launcher : path, optional
        The mpirun to use; default: the one beside the interpreter, else of the PATH.
    env : mapping of str to str, optional
        Environment variables to set for the job.

    Returns
    -------
    list
        The results of the function, in the order of ranks. The output of the ranks is
        printed here.

    Raises
    ------
    RankFailure
        If a rank raised or ended without a result; holds the tracebacks.
    RankTimeout
        If the job did not end in time; holds the stacks.

    Examples
    --------
    >>> hs.testing.run(3, lambda: hs.MirroredStrategy().num_replicas_in_sync)
    ... # doctest: +SKIP
    [3, 3, 3]
    """
    with tempfile.TemporaryDirectory(prefix="hpcstrat-") as name:
        folder = Path(name)
        (folder / "call").write_bytes(_pickled(fn, args))
        child = [sys.executable, "-m", "hpcstrat.testing", name]
        words = [*launch_command(n, launcher), *child]
        finished = finish(words, folder, n, timeout, env)
        results = _results(folder, n, finished)
    # Through Python's streams, which pytest captures.
    sys.stdout.write(finished.stdout)
    sys.stderr.write(finished.stderr)
    return results


def _results(folder: Path, n: int, finished: Finished) -> list[Any]:
    """Return the ranks' results, or raise an error that says how they ended."""
    failures = read_failures(folder)
    files = [folder / f"{rank}.result" for rank in range(n)]
    lost = [rank for rank, file in enumerate(files) if not file.exists()]
    if not failures and not lost and finished.returncode == 0:
        return [pickle.loads(file.read_bytes()) for file in files]
    found = [f"rank {rank} raised" for rank in sorted(failures)]
    silent = [rank for rank in lost if rank not in failures]
    if silent and not failures:
        found += [f"rank {rank} ended without a result" for rank in silent]
    if not found:
        found = ["the job failed after the function returned on every rank"]
    raise RankFailure(
        f"expected {n} ranks to return, found that {', '.join(found)} (the launcher's "
        f"exit code is {finished.returncode}); read the ranks' reports"
        + sections("traceback", failures)
        + ("" if failures else f"\n--- standard error\n{finished.stderr}"),
        failures,
        finished.returncode,
        stdout=finished.stdout,
        stderr=finished.stderr,
    )
