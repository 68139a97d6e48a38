"""The decorator of methods that make collective calls, which tells others of errors.

If an error ends a call on one rank, the other ranks still wait in it, and the rank's
next call would be matched with it by mistake. So the rank tells them: if it has posted
no header of the call, its next header says so; otherwise all calls end, because it does
not know how far the others are. If two threads make calls at the same time, their order
may differ from that on other ranks, so the second is refused.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, NoReturn, TypeVar

from hpcstrat.errors import CollectiveError

__all__ = ["collective"]

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
        state, thread = channel.state, get_ident()
        outer = state.thread
        if outer not in (0, thread):
            _refuse(channel, outer, what)
        entered, state.thread = state.num_calls, thread
        if not outer:
            state.what = what
        try:
            if channel.failures.broken and not outer:
                # Before any data are laid out; otherwise the method raises.
                channel.failures.resume(what)
                entered = state.num_calls
            return method(self, *args, **kwargs)
        except BaseException as error:
            named = inspect.signature(method).bind_partial(self, *args, **kwargs)
            channel.failures.leave(named.arguments.get("what", what), error, entered)
            raise
        finally:
            state.thread = outer

    return entry  # type: ignore[return-value]


def _refuse(channel: Any, other: int, what: str) -> NoReturn:
    """End all calls where another thread is in one, by an error that names both."""
    failures, state = channel.failures, channel.state
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.current_thread().name
    text = (
        f"thread {own!r} called {what} while thread {names.get(other, other)!r} was in "
        f"{state.what}"
    )
    failures.broken = failures.broken or text
    # MPI serves one thread at a time; a wait of the other thread ends now.
    interrupt: BaseException | None = None
    while state.thread == other:
        try:
            time.sleep(_NAP_SECONDS)
        except BaseException as error:
            # Not before the other ranks are told.
            interrupt = error
    failures.between_calls = False
    failures.aborts.tell(f"{text} on a rank")
    if interrupt is not None:
        raise interrupt
    raise CollectiveError(
        f"expected calls of one thread at a time, found that {text}; make them one "
        "after the other, in the same order on every rank"
    )
