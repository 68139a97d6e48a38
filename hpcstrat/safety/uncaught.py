"""An exception hook that ends the whole job if one rank has an uncaught exception.

If several ranks raise the same error, or errors that another rank has caused, one rank
prints its traceback, and each of the other ranks prints a line.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from hpcstrat._launchers import own_environment
from hpcstrat.engine.call_sites import is_of_program
from hpcstrat.engine.logs import rank_on_host
from hpcstrat.errors import ReplicaError
from hpcstrat.safety.hang_file import add_event
from hpcstrat.safety.presence import FAILED, own_registry

__all__ = ["abort", "at_abort", "at_end", "install", "print_last_lines", "running_mpi"]

# Delays of this rank's output, so that other ranks print first.
_STAGGER_SECONDS = 0.03
_SECONDARY_SECONDS = 0.5
_FORWARD_SECONDS = 0.1
_ABORT_SECONDS = 10
_ENDING_SECONDS = 2.0
_MOST_CHARACTERS = 600

_before_abort: list[Callable[[], None]] = []
_last: list[Callable[[], None]] = []


class _Hooks:
    """The exception hooks that our hook has replaced, and calls."""

    process = 0
    before: list[Any] = []  # noqa: RUF012 - one for the process
    # Number of hooks that run now: a hook may itself call our hook.
    depth = 0


def install() -> None:
    """Install the hook: an uncaught exception ends the job, once MPI runs.

    If the program has set another hook since the last call, our hook calls that hook.
    """
    if sys.excepthook is not _end_job:
        _Hooks.process = os.getpid()
        _Hooks.before.append(sys.excepthook)
        sys.excepthook = _end_job


def at_abort(function: Callable[[], None]) -> None:
    """Register a function to call before `abort`; the function must not raise."""
    if function not in _before_abort:
        _before_abort.append(function)


def at_end(function: Callable[[], None]) -> None:
    """Register a function that prints a last line when an error ends this process.

    Also installs the hook, which a job of one rank has not installed yet. The function
    must neither raise nor wait.
    """
    install()
    _last.append(function)


def print_last_lines() -> None:
    """Print the lines of `at_end`; call this just before this process ends."""
    for function in _last:
        function()


def running_mpi() -> Any:
    """Return ``mpi4py.MPI`` if MPI runs, or else None; never import mpi4py."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi


def _show(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error by the hook that our hook has replaced."""
    _Hooks.depth += 1
    try:
        earlier = len(_Hooks.before) - _Hooks.depth
        hook = _Hooks.before[earlier] if earlier >= 0 else sys.__excepthook__
        hook(kind, error, trace)
    finally:
        _Hooks.depth -= 1


def _end_job(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the error, and then end all ranks of the job; this is our hook."""
    mpi = running_mpi()
    ours = os.getpid() == _Hooks.process
    if _Hooks.depth or mpi is None or not ours or mpi.COMM_WORLD.size == 1:
        # MPI does not run, or this is a forked child process: no rank waits for it.
        if ours and not _Hooks.depth:
            _note(kind, error)
        _show(kind, error, trace)
        if ours and not _Hooks.depth:
            print_last_lines()
        return
    _note(kind, error, mpi=True)
    # Often all ranks raise the same error. Delay the higher ranks, so that rank 0
    # prints the error and ends the job before they print. An error that another rank
    # has caused is printed last.
    time.sleep(min(mpi.COMM_WORLD.rank * _STAGGER_SECONDS, _SECONDARY_SECONDS))
    caused = isinstance(error, ReplicaError) and error.__cause__ is None
    if caused:
        time.sleep(_SECONDARY_SECONDS)
    first = not caused and _is_first(kind, error)
    why = f"uncaught {kind.__name__} (see above)"
    if not first:
        why = f"{'' if caused else 'the same '}{kind.__name__}{_site(trace)}"
        why += f": {_words(error)}" if caused else ""
    try:
        if first or _Hooks.before[-1] is not sys.__excepthook__:
            _show(kind, error, trace)
        add_event(
            "error",
            kind=kind.__name__,
            text=_words(error),
            site=_site(trace).removeprefix(" at "),
            caused=caused,
            traceback="".join(traceback.format_exception(error)) if first else "",
        )
    finally:
        abort(
            f"hpcstrat: {rank_on_host()} ends the job: {why}",
            130 if issubclass(kind, KeyboardInterrupt) else 1,
        )


def _is_first(kind: type[BaseException], error: BaseException) -> bool:
    board = own_registry()
    # Compare the text up to "found", because the found values may differ between ranks.
    words = _words(error).partition(", found ")[0]
    return board is None or board.claims(f"{kind.__qualname__}: {words}")


def _words(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:
        # The exception class may be defined in the program, with a faulty ``__str__``.
        return ""
    return text if len(text) < _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


def _site(trace: TracebackType | None) -> str:
    """Return the innermost line of user code in a traceback: `` at train.py:52``."""
    site = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if is_of_program(name):
            site = f" at {os.path.basename(name)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return site


def _note(kind: type[BaseException], error: BaseException, **more: Any) -> None:
    """Publish in shared memory why this rank ends, for ranks that wait in MPI."""
    board = own_registry()
    if board is not None:
        reason = f"{kind.__name__}: {_words(error)}"
        board.show(stage=FAILED, reason=reason, **more)


def abort(message: str, code: int) -> None:
    """End all ranks of the job; does not return."""
    for function in _before_abort:
        function()
    sys.stdout.flush()
    # The hook of torch.distributed replaces sys.stderr by a buffer: print its content.
    collected = getattr(sys.stderr, "getvalue", str)()
    os.write(2, f"{collected}{message}\n".encode(errors="replace"))
    sys.stderr.flush()
    # Give other ranks time to print the same error, and the launcher time to forward
    # these lines before it ends all ranks.
    time.sleep(_FORWARD_SECONDS)
    print_last_lines()
    time.sleep(_FORWARD_SECONDS)
    if threading.current_thread() is threading.main_thread():
        # MPI_Abort may hang if another rank has called it and the launcher does not end
        # the job: let a signal end this process after some seconds.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_ABORT_SECONDS)
    mpi = running_mpi()
    if mpi is not None:
        _abort_quietly(mpi, code)
        mpi.COMM_WORLD.Abort(code)
    # MPI_Abort of MPICH may return: end this process.
    os._exit(code)


def _abort_quietly(mpi: Any, code: int) -> None:
    """End a job of Open MPI as MPI_Abort does, but without ten lines of output."""
    if "PMIX_NAMESPACE" not in own_environment():
        return
    try:
        end = ctypes.CDLL(mpi.__file__).PMIx_Abort
    except (AttributeError, OSError):
        return
    if end(ctypes.c_int(code), b"", None, ctypes.c_size_t(0)) == 0:
        # Give the launcher time to end this process.
        time.sleep(_ENDING_SECONDS)
