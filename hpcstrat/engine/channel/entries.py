"""The decorator of entries: it reports errors in collective calls to the other ranks.

If an error ends a call on one rank, the other ranks still wait in this call, which MPI
would match with the failed rank's next call. If the failed rank has not posted a header
of the call yet, it reports the error in a header. If it has, it ends all calls of all
ranks, because it does not know how far the other ranks are. If two threads make calls
at the same time, the second call is refused, because the order of the two calls may
differ between ranks.
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
    """Make a method an entry: all ranks of the object's ``collectives`` call it."""
    what = method.__name__.strip("_")

    @functools.wraps(method)
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        channel = self.collectives.channel
        if channel is None:
            return method(self, *args, **kwargs)
        if channel.elsewhere is not None:
            channel.elsewhere()
        # No other thread can run between the test and the assignment of ``thread``.
        state, thread = channel.state, get_ident()
        outer = state.thread
        if outer not in (0, thread):
            _refuse(channel, outer, what)
        entered, state.thread = state.num_calls, thread
        if not outer:
            state.what = what
        try:
            if channel.failures.broken and not outer:
                # Try to resume before the method uses the rings. If that is not
                # possible, the method raises CollectiveError at its first call.
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
    failures.between_calls = False
    failures.aborts.tell(f"{text} on a rank")
    if interrupt is not None:
        raise interrupt
    raise CollectiveError(
        f"expected calls of one thread at a time, found that {text}; make them one "
        "after the other, in the same order on every rank"
    )
