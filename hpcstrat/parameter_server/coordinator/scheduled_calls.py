"""The coordinator's records of scheduled functions, of their calls, and of workers."""

from __future__ import annotations

import itertools
import types
import weakref
from collections import OrderedDict
from typing import Any

from hpcstrat.parameter_server.coordinator.remote_values import RemoteValue
from hpcstrat.parameter_server.handles import pickled

_MOST_FUNCTIONS = 1024


class ScheduledCall:
    """A call of a function that is queued on the coordinator, or sent to a worker."""

    __slots__ = ("args", "function", "keep", "number", "payload", "remote", "since")

    def __init__(self, function: int, remote: RemoteValue) -> None:
        self.number = remote._number
        self.function = function
        self.remote = remote
        self.payload: bytes | None = None
        # The arguments. This reference keeps their PerWorkerValues alive; otherwise
        # workers would drop the values before the call.
        self.args: Any = None
        # True if the worker keeps the result. A spare rank can make this result again.
        self.keep = remote._recipe is not None
        self.since = 0.0


class WorkerRecord:
    """A worker: its rank, its unfinished calls, and the functions and values it has."""

    __slots__ = ("depth", "functions", "index", "kept", "rank", "under_way")

    def __init__(self, index: int, rank: int) -> None:
        self.index, self.rank = index, rank
        # Maximum number of calls that the worker has at a time.
        self.depth = 1
        self.functions: set[int] = set()
        self.under_way: dict[int, ScheduledCall] = {}
        # By number: values that the worker makes once and keeps for later calls.
        self.kept: weakref.WeakValueDictionary[int, RemoteValue] = (
            weakref.WeakValueDictionary()
        )


class Functions:
    """The scheduled functions; each has a number and is pickled once."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        # By `_identity`: number and function. The reference to a function keeps it
        # alive, so that no new function gets the same `id`.
        self._known: OrderedDict[Any, tuple[int, Any]] = OrderedDict()
        self.payloads: dict[int, bytes] = {}

    def number(self, fn: Any) -> int:
        """Return a function's number; pickle the function if it is new."""
        key = _identity(fn)
        if key not in self._known:
            number = next(self._numbers)
            self.payloads[number] = pickled_for_workers(fn, "", fn)
            self._known[key] = number, fn
        return self._known[key][0]

    def is_full_for(self, fn: Any) -> bool:
        """Return whether the oldest function must be forgotten to add ``fn``."""
        return len(self._known) >= _MOST_FUNCTIONS and _identity(fn) not in self._known

    def forget_oldest(self) -> int:
        """Forget the function that was scheduled first; return its number."""
        number = self._known.popitem(last=False)[1][0]
        del self.payloads[number]
        return number

    def clear(self) -> None:
        """Forget all functions."""
        self._known.clear()
        self.payloads.clear()


def pickled_for_workers(value: Any, what: str, fn: Any) -> bytes:
    """Pickle a function or its arguments; an error gets a note that names it."""
    try:
        return pickled(value)
    except Exception as error:
        error.add_note(
            f"raised while {what}{fn!r:.80} was pickled for the workers, with all that "
            "it refers to; leave out what cannot be sent, and make it on the workers"
        )
        raise


def _identity(fn: Any) -> Any:
    """Return a key that no other function has while ``fn`` is alive.

    The key is not the function itself, because callable objects that compare equal may
    do different things. A bound method gets the ids of its object and its function,
    because each attribute access makes a new bound method.
    """
    if isinstance(fn, types.MethodType):
        return id(fn.__self__), id(fn.__func__)
    if isinstance(fn, (types.BuiltinMethodType, types.MethodWrapperType)):
        # Methods of these types compare the identities of their object and function.
        return fn
    return id(fn)
