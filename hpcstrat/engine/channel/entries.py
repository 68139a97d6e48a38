"""Entries, which report errors in collective calls to the other ranks.

If an error ends a call on one rank, the other ranks still wait in this call, which MPI
would match with the failed rank's next call. If the failed rank has not posted a header
of the call yet, it reports the error in a header. If it has, it ends all calls of all
ranks, because it does not know how far the other ranks are. If two threads make calls
at the same time, the second call is refused, because the order of the two calls may
differ between ranks.

A signal handler or a finalizer may run in the middle of a call, and make a call itself.
This inner call is refused on its rank, before it changes anything, so that the outer
call continues. The library also calls functions of the program inside of a call, which
may make calls, such as methods of a program's own strategy. To tell these from the
others, `interrupted_call` examines the stack, if this thread is in a call already.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import functools
import gc
import inspect
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar

from hpcstrat.engine.observe.timeline import active
from hpcstrat.errors import CollectiveError

__all__ = [
    "collective",
    "enter",
    "interrupted_call",
    "is_inner",
    "refuse_inner",
]

_NAP_SECONDS = 1e-3
_CHANNEL = os.path.dirname(__file__)
_ENGINE = os.path.dirname(_CHANNEL)
_PACKAGE = os.path.dirname(_ENGINE) + os.sep
# Modules that never call functions of the program, nor functions that make calls.
_EXCHANGING = (_CHANNEL + os.sep, os.path.join(_ENGINE, "algorithms", ""))
_INNER = "_hpcstrat_inner"

_open_channels = active.channels

_Method = TypeVar("_Method", bound=Callable[..., Any])


def collective(method: _Method) -> _Method:
    """Make a method an entry: all ranks of the object's ``collectives`` call it."""
    what = method.__name__.strip("_")

    @functools.wraps(method)
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        return enter(self.collectives.channel, what, method, self, *args, **kwargs)

    return entry  # type: ignore[return-value]


def enter(
    channel: Any, what: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call a function as an entry: all ranks of ``channel`` call it.

    Errors name the call by the function's argument ``what``, if it has one.
    """
    if channel is None or channel.closed:
        return function(*args, **kwargs)
    if channel.elsewhere is not None:
        channel.elsewhere()
    # No other thread can run between the test and the assignment of ``thread``.
    state, thread = channel.state, get_ident()
    outer = state.thread
    if outer not in (0, thread):
        _refuse(channel, outer, what)
    if outer or channel.pending or len(_open_channels) > 1:
        refuse_inner(what)
    entered, state.thread = state.num_calls, thread
    if not outer:
        state.what = what
    try:
        if channel.failures.broken and not outer:
            # Try to resume before the function uses the rings. If that is not
            # possible, the function raises CollectiveError at its first call.
            channel.failures.resume(what)
            entered = state.num_calls
        return function(*args, **kwargs)
    except BaseException as error:
        name = _name(what, function, args, kwargs)
        channel.failures.leave(name, error, entered)
        raise
    finally:
        state.thread = outer


def _name(what: str, function: Callable[..., Any], args: Any, named: Any) -> Any:
    """Return the argument ``what`` of a call, or ``what`` if it has none."""
    try:
        given = inspect.signature(function).bind_partial(*args, **named).arguments
    except (TypeError, ValueError):
        # The arguments do not fit, or the function is not written in Python.
        return what
    return given.get("what", what)


def refuse_inner(what: str) -> None:
    """Raise CollectiveError if ``what`` is called by a function that interrupts a call.

    The other ranks do not learn of the error.
    """
    outer = interrupted_call(2)
    if outer:
        error = CollectiveError(
            "expected calls one after the other, found that a signal handler, a "
            f"finalizer or a callback called {what} in the middle of {outer}; set a "
            "flag there, and make the call after the step, or save by a "
            "PreemptionCheckpointHandler"
        )
        setattr(error, _INNER, True)
        raise error


def is_inner(error: BaseException) -> bool:
    """Return whether an error is one of `refuse_inner`, which only this rank knows."""
    return getattr(error, _INNER, False)


def interrupted_call(depth: int = 1) -> str:
    """Return the name of the call that a function interrupts, or "" if there is none.

    The function is ``depth`` levels above the caller.
    """
    thread = get_ident()
    for channel in list(_open_channels):
        state = channel.state
        # The program may wait for a started call outside of any other call.
        inside = thread in (state.thread, channel.pending.thread)
        if inside and _interrupts(sys._getframe(depth + 1)):
            return state.what if state.thread else "a started call"
    return ""


def _interrupts(frame: FrameType | None) -> bool:
    """Return whether a function, or one that has called it, interrupts a call."""
    while frame is not None and frame.f_code is not enter.__code__:
        path = frame.f_code.co_filename
        if path.startswith(_EXCHANGING) and path != __file__:
            return True
        if not path.startswith(_PACKAGE) and _is_unasked(frame):
            return True
        frame = frame.f_back
    return frame is None


def _is_unasked(frame: FrameType) -> bool:
    """Return whether Python itself has called a function: a handler or a finalizer."""
    code, values = frame.f_code, frame.f_locals
    if code.co_name == "__del__" or code.co_filename == weakref.__file__:
        return True
    count = code.co_argcount + code.co_kwonlyargcount
    arguments = [values.get(name) for name in code.co_varnames[:count]]
    if code.co_flags & inspect.CO_VARARGS:
        arguments += values.get(code.co_varnames[count], ())
    # Signal handlers and trace functions get the frame that they interrupt, and the
    # callbacks of weak references get the dead reference.
    if any(
        one is frame.f_back or (isinstance(one, weakref.ref) and one() is None)
        for one in arguments
    ):
        return True
    # A handler may have overwritten the frame, but not the number of the signal; the
    # collector's callbacks get a text. Other functions need not be looked for.
    if not any(isinstance(one, int | str) for one in arguments):
        return False
    # `signal.getsignal` would convert all results to enumerations, in 0.1 ms or more.
    handlers = {_signal.getsignal(number) for number in range(1, signal.NSIG)}
    functions = [*filter(callable, handlers), *gc.callbacks]
    return any(_code_of(function) is code for function in functions)


def _code_of(function: Any) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(function, "__code__", None)


def _refuse(channel: Any, other: int, what: str) -> NoReturn:
    """End all calls, and raise an error that names this thread and the other thread."""
    failures, state = channel.failures, channel.state
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.current_thread().name
    text = (
        f"thread {own!r} called {what} while thread {names.get(other, other)!r} was in "
        f"{state.what}"
    )
    failures.broken = failures.broken or text
    # Wait until ``broken`` ends the other thread's call: only one thread may use MPI.
    interrupt: BaseException | None = None
    while state.thread == other:
        try:
            time.sleep(_NAP_SECONDS)
        except BaseException as error:
            # Raise the interrupt later, after the other ranks have been notified.
            interrupt = error
    failures.aborts.tell(f"{text} on rank {failures.rank}")
    if interrupt is not None:
        raise interrupt
    raise CollectiveError(
        f"expected calls of one thread at a time, found that {text}; make them one "
        "after the other, in the same order on every rank"
    )
