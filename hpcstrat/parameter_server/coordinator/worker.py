"""The loop of a worker, a rank that runs the functions that the coordinator sends."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from hpcstrat.engine.context import pop, push
from hpcstrat.engine.tree import tree_map
from hpcstrat.errors import OutOfRangeError
from hpcstrat.parameter_server.handles import (
    error_bytes,
    error_of,
    pickled,
    unpickled,
)
from hpcstrat.parameter_server.server_variables import ServerVariable

NOTHING, INLINE, ON_WORKER, ERROR, CANCELLED = range(5)
# Results that are larger than this stay on the worker until they are fetched.
_INLINE_BYTES = 16 << 10
_MOST_UNREPORTED = 64
_REPORT_SECONDS = 0.001
_PLAIN = (type(None), int, float, bool, str)


class _Current:
    """Holds the index of this process's worker while a function runs, else None."""

    index: int | None = None


def experimental_get_current_worker_index() -> int:
    """Return the index of the worker that runs the calling function.

    Not collective.

    Returns
    -------
    int
        The index, from 0.

    Raises
    ------
    RuntimeError
        If it is called outside of a scheduled function, and outside of the function of
        a per-worker data set.
    """
    if _Current.index is None:
        raise RuntimeError(
            "expected the current worker's index inside of a scheduled function, found "
            "the call outside; schedule the function that calls it"
        )
    return _Current.index


@dataclass(frozen=True)
class _FailedValue:
    """The pickled error of a value that could not be made, stored in its place."""

    data: bytes


class Worker:
    """Runs the coordinator's functions until the coordinator ends."""

    def __init__(self, strategy: Any, coordinator: int, index: int) -> None:
        self._strategy = strategy
        self._client = strategy.client
        self._client.flushes = False
        self._mailbox = self._client.mailbox
        self._coordinator = coordinator
        self._index = index
        self._queue: deque[Any] = deque()
        self._functions: dict[int, Any] = {}
        self._kept: dict[int, Any] = {}
        self._results: list[tuple[int, int, Any]] = []
        # Ended functions that are not reported yet. Each entry has: by server, the
        # number of updates it must make before the report; the call's number; its
        # result; and whether this worker keeps the result.
        self._unmade: deque[tuple[dict[int, int], int, Any, bool]] = deque()
        self._ran, self._seconds, self._reported_at = 0, 0.0, 0.0
        self._ended: bool | None = None

    def serve(self) -> bool:
        """Run functions until the coordinator ends.

        Return whether the coordinator closed the strategy before it ended.
        """
        token = push(self._strategy.cross_context)
        try:
            while self._ended is None:
                self._take_messages()
                if self._queue and self._ended is None:
                    self._run_next()
        finally:
            pop(token)
        return self._ended

    def _take_messages(self) -> None:
        """Receive messages; wait for a message if no function is queued."""
        self._end_made()
        if not self._queue:
            self._report()
            found = self._mailbox.wait(self._look, lambda: "a function, or updates")
            if found is not True:
                self._take(found[1])
        while (found := self._mailbox.poll()) is not None:
            self._take(found[1])

    def _look(self) -> Any:
        """Return the next message, or True if the oldest function can be reported."""
        found = self._mailbox.poll()
        if found is None and self._unmade:
            return self._client.is_made(self._unmade[0][0])
        return found

    def _end_made(self, most: int = _MOST_UNREPORTED) -> None:
        """Queue the results of ended functions, up to one with pending updates.

        If ``most`` or more functions are left, wait for the updates of the oldest.
        """
        while self._unmade:
            wanted, number, value, keep = self._unmade[0]
            if not self._client.is_made(wanted):
                if len(self._unmade) < most:
                    return
                self._client.wait_for(wanted)
            self._unmade.popleft()
            try:
                self._client.check(wanted)
            except Exception as error:
                self._fail(number, error, keep)
            else:
                self._results.append((number, *self._result(number, value, keep)))

    def _fail(self, number: int, error: BaseException, keep: bool) -> None:
        data = error_bytes(error)
        self._results.append((number, ERROR, data))
        if keep:
            # A function that gets this value as an argument raises this error.
            self._kept[number] = _FailedValue(data)
        else:
            self._cancel()

    def _take(self, message: Any) -> None:
        kind, *rest = message
        if kind == "calls":
            calls, functions = rest
            for number, data in functions:
                self._functions[number] = data
            self._queue.extend(calls)
        elif kind == "cancel":
            self._cancel()
        elif kind == "ask":
            question, (_, number) = rest
            answer = self._fetched(number)
            self._mailbox.reply(self._coordinator, question, *answer)
        elif kind == "drop":
            self._kept.pop(rest[0], None)
        elif kind == "forget":
            self._functions.pop(rest[0], None)
        elif kind == "roles":
            self._strategy.cluster.take(rest[0])
        elif kind == "renew":
            self._functions.clear()
            self._strategy.renew()
        else:
            self._mailbox.lost.update(rest[1])
            self._ended = bool(rest[0])

    def _fetched(self, number: int) -> tuple[bool, Any]:
        try:
            return True, pickled(self._kept[number])
        except Exception as error:
            return False, error_bytes(
                TypeError(
                    "expected a result that can be pickled, found "
                    f"{type(error).__name__}: {error}; return arrays or numbers"
                )
            )

    def _cancel(self) -> None:
        """Drop functions that have not begun, unless this worker keeps their result."""
        for call in list(self._queue):
            if not call[3]:
                self._queue.remove(call)
                self._results.append((call[0], CANCELLED, None))

    def _run_next(self) -> None:
        number, function, payload, keep = self._queue.popleft()
        start = time.perf_counter()
        _Current.index = self._index
        try:
            value = self._call(function, payload)
            if keep:
                # Keep the value itself, because later functions may use it.
                self._kept[number] = value
            elif type(value) not in _PLAIN:
                value = _at_rest(value)
            wanted = self._client.pending()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            # First report the earlier functions, so that errors of their updates are
            # not reported for this function.
            self._end_made(most=0)
            with contextlib.suppress(Exception):
                self._client.flush()
            self._fail(number, error, keep)
        else:
            # Report the result after the updates; meanwhile run the next function.
            self._unmade.append((wanted, number, value, keep))
        finally:
            _Current.index = None
        now = time.perf_counter()
        self._ran += 1
        self._seconds += now - start
        many = len(self._results) >= _MOST_UNREPORTED
        if many or now > self._reported_at + _REPORT_SECONDS:
            self._report()

    def _call(self, number: int, payload: bytes | None) -> Any:
        resolve = self._resolve
        args, kwargs = unpickled(payload, resolve) if payload else ((), {})
        function = self._functions[number]
        if isinstance(function, bytes):
            function = self._functions[number] = unpickled(function, resolve)
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            raise OutOfRangeError(
                "expected another element, found the end of the iterator; repeat the "
                "data set, or schedule fewer functions"
            ) from error

    def _result(self, number: int, value: Any, keep: bool) -> tuple[int, Any]:
        if keep:
            return ON_WORKER, None
        if value is None:
            return NOTHING, None
        try:
            data = pickled(value)
        except Exception:
            # If the result cannot be pickled, raise an error only when it is fetched.
            data = b""
        if data and len(data) <= _INLINE_BYTES:
            return INLINE, data
        self._kept[number] = value
        return ON_WORKER, None

    def _resolve(self, handle: Any) -> Any:
        kind, number, parts = handle
        if kind == "per_worker":
            value = self._kept[parts[self._index]]
            if isinstance(value, _FailedValue):
                raise error_of(value.data)
            return value
        return self._strategy.resolve(kind, number, parts)

    def _report(self) -> None:
        """Send the results and the mean time of ended functions to the coordinator."""
        if self._results:
            results, self._results = self._results, []
            mean = self._seconds / self._ran if self._ran else 0.0
            # Include lost ranks, because the coordinator may not have noticed a loss.
            lost = tuple(self._mailbox.lost)
            self._mailbox.send(self._coordinator, ("done", mean, results, lost))
            self._ran, self._seconds = 0, 0.0
        self._reported_at = time.perf_counter()


def _at_rest(value: Any) -> Any:
    """Replace variables in a result (`assign` returns a variable) by their values."""
    return tree_map(
        lambda x: x.read_value() if isinstance(x, ServerVariable) else x, value
    )
