"""The one way into the library's collective calls, and the ways out of it by an error.

A rank that leaves a call by an error, whatever it is, leaves the other ranks there, and
would take part in it with its next one. So it tells them: in the header for which they
wait, where it has come to no header of the call itself; else by ending all calls, since
nobody knows how far the others are. Calls of two threads at the same time, which have
no order in common with those of other ranks, are refused here, too.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, NoReturn, TypeVar

from hpcstrat.errors import CollectiveError, HpcstratError, OutOfRangeError

__all__ = ["collective", "leave"]

_NAP_SECONDS = 1e-3

_Method = TypeVar("_Method", bound=Callable[..., Any])


def collective(method: _Method) -> _Method:
    """Make a method an entry: its object has ``collectives``, whose ranks all call."""
    what = method.__name__.strip("_")

    @functools.wraps(method)
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        channel = self.collectives.channel
        if channel is None:
            return method(self, *args, **kwargs)
        if channel.elsewhere is not None:
            channel.elsewhere()
        # No other thread runs between the look and the assignment.
        thread, outer = get_ident(), channel.running
        if outer is not None and outer[0] != thread:
            _refuse(channel, outer, what)
        entered, channel.running = channel.num_calls, outer or (thread, what)
        try:
            if channel.broken and outer is None:
                # Before any data are laid out; otherwise the method raises.
                channel.resume(what)
                entered = channel.num_calls
            return method(self, *args, **kwargs)
        except BaseException as error:
            named = inspect.signature(method).bind_partial(self, *args, **kwargs)
            leave(channel, named.arguments.get("what", what), error, entered)
            raise
        finally:
            channel.running = outer

    return entry  # type: ignore[return-value]


def leave(channel: Any, what: str, error: BaseException, entered: int) -> None:
    """Let the other ranks know of an error that leaves an entry on this one.

    ``entered`` is the channel's ``num_calls`` when it came in.
    """
    if channel.broken or channel.closed:
        return
    failure = channel.sections.failure
    if failure is not None:
        # Until the section ends, every call raises what ends it.
        if isinstance(error, Exception) and error is not failure.error:
            raise failure.error
        return
    if channel.told_at == channel.num_calls > entered:
        return
    if isinstance(error, (StopIteration, OutOfRangeError)):
        # The end of the data, at which all ranks are.
        return
    if isinstance(error, Exception) and channel.num_calls == entered:
        channel.fail(what, error)
    elif not isinstance(error, HpcstratError):
        # Errors of our own classes are raised on every rank. Data of calls that go on
        # may lie elsewhere on each from here on.
        point = None if channel.pending else entered
        channel.break_off(f"{what} was left", error, point)


def _refuse(channel: Any, running: tuple[int, str], what: str) -> NoReturn:
    """End all calls where another thread is in one, by an error that names both."""
    other, its_call = running
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.current_thread().name
    text = (
        f"thread {own!r} called {what} while thread {names.get(other, other)!r} was in "
        f"{its_call}"
    )
    channel.broken = channel.broken or text
    # MPI serves one thread at a time; a wait of the other one ends now.
    interrupt: BaseException | None = None
    while channel.running is running:
        try:
            time.sleep(_NAP_SECONDS)
        except BaseException as error:
            # Not before the other ranks are told.
            interrupt = error
    channel.between_calls = False
    channel.aborts.tell(f"{text} on a rank")
    if interrupt is not None:
        raise interrupt
    raise CollectiveError(
        f"expected calls of one thread at a time, found that {text}; make them one "
        "after the other, in the same order on every rank"
    )
