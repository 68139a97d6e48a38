"""An uncaught exception on one rank ends the job, from ``import hpcstrat`` on.

Where several ranks raise the same error, or one that another rank has caused, one shows
its traceback, the others a line each.
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

from hpcstrat.engine.call_sites import is_of_program
from hpcstrat.engine.logs import place
from hpcstrat.errors import ReplicaError
from hpcstrat.safety.hang_file import add_event
from hpcstrat.safety.presence import FAILED, own_registry

__all__ = ["abort", "at_abort", "install", "running_mpi"]

# Times that a rank gives others to print first.
_STAGGER_SECONDS = 0.03
_SECONDARY_SECONDS = 0.5
_FORWARD_SECONDS = 0.1
_ABORT_SECONDS = 10
_ENDING_SECONDS = 2.0
_MOST_CHARACTERS = 600

_before_abort: list[Callable[[], None]] = []


class _Hooks:
    """The hooks that were set before ours, which still run."""

    process = 0
    before: list[Any] = []  # noqa: RUF012 - one for the process
    # How many hooks call each other now: a program's may call ours, which it replaced.
    depth = 0


def install() -> None:
    """Let an uncaught exception of this process end the job, once MPI runs.

    It runs before a hook that the program has set since the last call.
    """
    if sys.excepthook is not _end_job:
        _Hooks.process = os.getpid()
        _Hooks.before.append(sys.excepthook)
        sys.excepthook = _end_job


def at_abort(function: Callable[[], None]) -> None:
    """Call a function, which must not raise, before this process ends the job."""
    if function not in _before_abort:
        _before_abort.append(function)


def running_mpi() -> Any:
    """Return ``mpi4py.MPI`` where MPI runs, else None; never loads it."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi


def _show(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show an error by the hook that was set before ours."""
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
    """Print the error as before, then end all ranks."""
    mpi = running_mpi()
    ours = os.getpid() == _Hooks.process
    if _Hooks.depth or mpi is None or not ours or mpi.COMM_WORLD.size == 1:
        # MPI does not run, or this is a forked child: no other rank waits for it.
        if ours and not _Hooks.depth:
            _note(kind, error)
        _show(kind, error, trace)
        return
    _note(kind, error, mpi=True)
    # The same error often ends all ranks: the first rank prints it and ends the job
    # before the others mix in their lines. Errors that another rank caused are printed
    # last.
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
            f"hpcstrat: {place()} ends the job: {why}",
            130 if issubclass(kind, KeyboardInterrupt) else 1,
        )


def _is_first(kind: type[BaseException], error: BaseException) -> bool:
    board = own_registry()
    # The expected value is the same on all ranks; the found ones may differ.
    words = _words(error).partition(", found ")[0]
    return board is None or board.claims(f"{kind.__qualname__}: {words}")


def _words(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:
        # The class may be a program's own and faulty.
        return ""
    return text if len(text) < _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


def _site(trace: TracebackType | None) -> str:
    """Return the last place in the program that an error has passed."""
    site = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if is_of_program(name):
            site = f" at {os.path.basename(name)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return site


def _note(kind: type[BaseException], error: BaseException, **more: Any) -> None:
    """Tell the ranks of this host, which may wait in MPI, why this one ends."""
    board = own_registry()
    if board is not None:
        reason = f"{kind.__name__}: {_words(error)}"
        board.show(stage=FAILED, reason=reason, **more)


def abort(message: str, code: int) -> None:
    """End all ranks of the job; does not return."""
    for function in _before_abort:
        function()
    sys.stdout.flush()
    # torch.distributed collects the output here, and would show it afterwards.
    collected = getattr(sys.stderr, "getvalue", str)()
    os.write(2, f"{collected}{message}\n".encode(errors="replace"))
    sys.stderr.flush()
    # The launcher must have passed on the lines before it ends all ranks.
    time.sleep(_FORWARD_SECONDS)
    if threading.current_thread() is threading.main_thread():
        # A launcher that lets others live may not answer a second rank's call.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_ABORT_SECONDS)
    mpi = running_mpi()
    if mpi is not None:
        _abort_quietly(mpi, code)
        mpi.COMM_WORLD.Abort(code)
    # MPICH's MPI_Abort returns.
    os._exit(code)


def _abort_quietly(mpi: Any, code: int) -> None:
    """End the job as Open MPI's MPI_Abort does, without its ten lines of advice."""
    if "PMIX_NAMESPACE" not in os.environ:
        return
    try:
        end = ctypes.CDLL(mpi.__file__).PMIx_Abort
    except (AttributeError, OSError):
        return
    if end(ctypes.c_int(code), b"", None, ctypes.c_size_t(0)) == 0:
        # Gives the launcher time to end this process.
        time.sleep(_ENDING_SECONDS)
