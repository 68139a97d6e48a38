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
    """Error: a rank raised an exception, or ended without a result.

    Parameters
    ----------
    message : str
        Expected and found state, and the traceback of each rank.
    failures : mapping of int to str
        Traceback of each rank that raised.
    returncode : int or None
        The launcher's exit code; None if the launcher had to be killed.
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
    """Error: a job did not end in time; the message has the stacks of each rank.

    Parameters
    ----------
    *args : object
        Arguments of ``RankFailure``.
    stacks : mapping of int to str
        Python stacks of each rank that responded.
    **kwargs : object
        Arguments of ``RankFailure``.
    """

    def __init__(
        self, *args: Any, stacks: Mapping[int, str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.stacks = dict(stacks or {})


@dataclass(frozen=True, slots=True)
class Finished:
    """The exit code and output of a program that ``launch`` ran.

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
    """Return whether a module can be imported without this process's sys.path."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == "hpcstrat":
        return True
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = (Path(sysconfig.get_path(name)).resolve() for name in names)
    return any(Path(file).resolve().is_relative_to(folder) for folder in folders)


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return a pickled call; a function of a test module is pickled with its code."""
    try:
        import cloudpickle
    except ImportError as exc:
        raise HpcstratError(
            "expected cloudpickle to send the function to the ranks, found it missing; "
            "pip install cloudpickle"
        ) from exc
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    # __main__ is another module on the ranks; cloudpickle handles that case itself.
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
    # sys.path comes first, because unpickling the call imports modules with it.
    return pickle.dumps((sys.path, call))


def _environment(changes: Mapping[str, str] | None) -> dict[str, str]:
    """Return the ranks' environment, without the variables of an enclosing MPI job."""
    environment = clean_environment(changes)
    # With this variable, a rank that crashes in C code prints its stack, and so does a
    # process that `Job.show_stacks` aborts.
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    # Write no reports of hangs, because tests that provoke hangs would leave files.
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
    """Return the error for a job that still runs at its time limit, with its stacks."""
    # Read the stacks now, because the caller then ends the processes.
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
    """Return the tracebacks that failed ranks wrote into a job's folder, by rank."""
    return {int(path.stem): path.read_text() for path in folder.glob("*.failure")}


def finish(
    command: Sequence[str],
    folder: Path,
    n: int,
    timeout: float,
    env: Mapping[str, str] | None,
) -> Finished:
    """Run a command until its end or its time limit, and leave no process behind."""
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
    """Run a program on n ranks of this machine; return its exit code and output.

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
        The mpirun to use; default: beside the interpreter, or else on the PATH.
    env : mapping of str to str, optional
        Environment variables to set for the job.
    fault_tolerant : bool, optional
        Whether the job continues when a rank dies, see `launch_command`.

    Returns
    -------
    Finished
        Exit code and output. No process of the job is left.

    Raises
    ------
    RankTimeout
        If the job did not end in time; the message has its Python processes' stacks.
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
        Function to call once on each rank; may be a local function or a lambda. It is
        sent with its code, by cloudpickle, unless it belongs to an installed package.
    *args : object
        Arguments of the function; must be picklable.
    timeout : float, optional
        Seconds after which the job is ended.
    launcher : path, optional
        The mpirun to use; default: beside the interpreter, or else on the PATH.
    env : mapping of str to str, optional
        Environment variables to set for the job.

    Returns
    -------
    list
        The results, in the order of ranks. This process prints the ranks' output.

    Raises
    ------
    RankFailure
        If a rank raised or ended without a result; the error has the tracebacks.
    RankTimeout
        If the job did not end in time; the error has the stacks.

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
    # Write to Python's streams, because pytest captures them.
    sys.stdout.write(finished.stdout)
    sys.stderr.write(finished.stderr)
    return results


def _results(folder: Path, n: int, finished: Finished) -> list[Any]:
    """Return the ranks' results, or raise an error that says how the ranks ended."""
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
