"""The coordinator: schedules functions on workers, and gets what they return."""

from __future__ import annotations

import threading
import time
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.tree import flatten, tree_map
from hpcstrat.engine.typing import Tree
from hpcstrat.errors import CancelledError, UnavailableError
from hpcstrat.parameter_server.coordinator.remote_values import (
    FAILED,
    KEPT,
    READY,
    WAITING,
    PerWorkerDataset,
    PerWorkerIterator,
    RemoteValue,
)
from hpcstrat.parameter_server.coordinator.strategy import ParameterServerStrategy
from hpcstrat.parameter_server.coordinator.worker import (
    ERROR,
    INLINE,
    NOTHING,
    ON_WORKER,
)
from hpcstrat.parameter_server.handles import error_of, pickled, unpickled
from hpcstrat.parameter_server.mailbox import one_thread_at_a_time

# So many calls may be queued before `schedule` waits.
_MOST_QUEUED = 256 << 10
_MOST_FUNCTIONS = 1024
# So much work is sent to a worker ahead of the function that it runs: it never waits
# for the coordinator, and slow functions do not queue up on one worker.
_AHEAD_SECONDS = 0.002
_MOST_AHEAD = 64
_NOTHING = b""


class _ScheduledCall:
    """A function that is queued, or under way on a worker."""

    __slots__ = (
        "args",
        "function",
        "keep",
        "number",
        "payload",
        "remote",
        "since",
    )

    def __init__(self, number: int, function: int, remote: RemoteValue) -> None:
        self.number = number
        self.function = function
        self.remote = remote
        self.payload: bytes | None = None
        # Values on workers that the payload names must not be dropped before.
        self.args: Any = None
        self.keep = False
        self.since = 0.0


class _WorkerRecord:
    """The coordinator's knowledge of a worker."""

    __slots__ = ("depth", "functions", "index", "kept", "rank", "under_way")

    def __init__(self, index: int, rank: int) -> None:
        self.index, self.rank = index, rank
        self.depth = 1
        self.functions: set[int] = set()
        self.under_way: dict[int, _ScheduledCall] = {}
        # By number: values that the worker makes once, and that functions take as
        # arguments.
        self.kept: weakref.WeakValueDictionary[int, RemoteValue] = (
            weakref.WeakValueDictionary()
        )


class ClusterCoordinator:
    """Schedules functions on the workers of a cluster.

    There is one for a strategy: making another returns the first. Functions are sent
    whenever one of its methods is called, some ahead for each worker. In a scheduled
    function it gives its strategy, and can do nothing else. Several threads may use it.

    Parameters
    ----------
    strategy : ParameterServerStrategy
        Open; this rank is its coordinator.

    Raises
    ------
    TypeError
        For another strategy.
    """

    _strategy: ParameterServerStrategy
    lock: threading.RLock

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        """Return the strategy's coordinator."""
        known = isinstance(strategy, ParameterServerStrategy)
        if not known or strategy.roles.between_graph:
            raise TypeError(
                f"expected a ParameterServerStrategy, found {strategy!r:.80}; make one"
            )
        if strategy.coordinator is None:
            self = super().__new__(cls)
            self._strategy, self.lock = strategy, strategy.client.lock
            if strategy._cluster.coordinates:
                self._begin(strategy)
            strategy.coordinator = self
        found: ClusterCoordinator = strategy.coordinator
        return found

    def __reduce__(self) -> Any:
        return ClusterCoordinator, (self._strategy,)

    def _begin(self, strategy: ParameterServerStrategy) -> None:
        self._mailbox = strategy.client.mailbox
        self._mailbox.on_loss = self._lose
        self._workers = [
            _WorkerRecord(index, rank)
            for index, rank in enumerate(strategy.roles.workers)
        ]
        self._by_rank = {worker.rank: worker for worker in self._workers}
        # Workers whose ranks were lost, until a spare rank takes the place, or none
        # can.
        self._vacant: deque[_WorkerRecord] = deque()
        self._queue: deque[_ScheduledCall] = deque()
        # Keyed by `_identity`: the number of a function, and the function itself, so
        # that its identity stays taken.
        self._functions: OrderedDict[Any, tuple[int, Any]] = OrderedDict()
        self._payloads: dict[int, bytes] = {}
        self._dropped: deque[tuple[int, int]] = deque()
        self._count = 0
        self._error: Exception | None = None
        self._unavailable: Exception | None = None
        self._warned_at = time.monotonic()
        if self._mailbox.lost:
            self._lose(set(self._mailbox.lost))

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy whose workers these are."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Any = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Let any worker call a function; return at once.

        Not collective; on the coordinator. Functions may run in any order. One that a
        lost worker had may run again elsewhere, as a whole. Waits only where 262,144
        functions are queued.

        Parameters
        ----------
        fn : callable
            Pickled once, with all that it captures as it is then; variables,
            optimizers and the strategy go as handles.
        args : sequence, optional
            Positional arguments; of a PerWorkerValues its worker's value.
        kwargs : mapping, optional
            Keyword arguments.

        Returns
        -------
        RemoteValue
            What the function will have returned.

        Raises
        ------
        TypeError
            If ``fn`` cannot be called.
        ValueError
            For a RemoteValue as an argument.
        UnavailableError
            If a parameter server is lost; `recover` says how to go on.
        Exception
            The first error of an earlier function, once, when no function is under way
            any more; those that were not begun are cancelled, and ``fn`` is not
            scheduled.
        """
        self._require_open()
        if not callable(fn):
            raise TypeError(
                f"expected a function to schedule, found {fn!r:.80}; pass its "
                "arguments as args"
            )
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        self._check(args, kwargs)
        with self.lock:
            self._pump()
        if len(self._queue) >= _MOST_QUEUED:
            self._wait(lambda: len(self._queue) < _MOST_QUEUED)
        self._raise_unavailable()
        self._raise_error()
        with self.lock:
            call = self._made(fn, args, kwargs)
            self._queue.append(call)
            self._deal()
        return call.remote

    def join(self) -> None:
        """Wait until all scheduled functions have ended.

        Not collective; on the coordinator.

        Raises
        ------
        UnavailableError
            If a parameter server is lost; `recover` says how to go on.
        Exception
            The first error of a function, once, when no function is under way any more;
            those that were not begun are cancelled.
        """
        self._require_open()
        self._wait(self._is_idle)
        self._raise_unavailable()
        self._raise_error()

    def recover(self) -> None:
        """Go on with the parameter servers that are left, after an UnavailableError.

        Not collective; on the coordinator. Waits until the functions under way have
        ended, and leaves out all others. What lost servers held moves to spare ranks,
        which take their places, or to the servers that are left, as zeros, and
        optimizers begin anew: restore the last checkpoint of all variables and
        optimizers before the next function. Per-worker data sets go on where they are.

        Raises
        ------
        UnavailableError
            If no server or no worker is left, or another is lost meanwhile; then call
            it again.
        """
        self._require_open()
        with self.lock:
            self._cancel()
        self._mailbox.wait(self._has_settled, lambda: "workers to end their functions")
        with self.lock:
            self._unavailable = self._error = None
            self._require_worker()
            self._strategy.move_from_lost()
            # Pickled functions name the old places of variables.
            self._functions.clear()
            self._payloads.clear()
            for worker in self._workers:
                worker.functions.clear()
                self._mailbox.send(worker.rank, ("renew",))
        self._raise_unavailable()

    @one_thread_at_a_time
    def _has_settled(self) -> bool:
        self._pump()
        self._warn()
        return self._is_idle()

    @one_thread_at_a_time
    def done(self) -> bool:
        """Whether all scheduled functions have ended.

        Not collective; on the coordinator.

        Returns
        -------
        bool
            True also where one has failed; `join` says so.

        Raises
        ------
        RuntimeError
            After the strategy was closed.
        """
        self._require_open()
        self._pump()
        return self._is_idle()

    @one_thread_at_a_time
    def require_idle(self, what: str) -> None:
        """Refuse a call while scheduled functions have not ended.

        RuntimeError if there are any. For the library's own modules.
        """
        self._pump()
        # Kept calls, such as the iterator of a data set, write no variable.
        count = len(self._queue) + sum(
            not call.keep
            for worker in self._workers
            for call in worker.under_way.values()
        )
        if count:
            raise RuntimeError(
                f"expected no scheduled function that may write variables during a "
                f"{what}, found {count} that have not ended; call the coordinator's "
                "join() first"
            )

    def fetch(self, val: Tree) -> Tree:
        """Replace each RemoteValue of a structure by its result.

        Not collective; on the coordinator.

        Parameters
        ----------
        val : tree
            Other leaves stay as they are.

        Returns
        -------
        tree
            Of a PerWorkerValues a tuple.

        Raises
        ------
        Exception
            See ``RemoteValue.fetch``.
        """

        def fetched(leaf: Any) -> Any:
            return leaf.fetch() if isinstance(leaf, RemoteValue) else leaf

        return tree_map(fetched, val)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Make a data set on each worker.

        Not collective; on the coordinator. Waits until all workers have made it. Each
        sees the whole data set: the input context says one pipeline of one.

        Parameters
        ----------
        dataset_fn : callable or Dataset
            Returns an iterable; runs on each worker.

        Returns
        -------
        PerWorkerDataset
            Iterate over it to get what functions take.

        Raises
        ------
        ValueError
            If the function makes a variable.
        Exception
            What else it has raised.
        """
        self._require_open()
        make = dataset_fn if callable(dataset_fn) else _Returns(dataset_fn)
        values = self._on_each_worker(make)
        for value in values:
            self.wait_for(value)
        for value in values:
            if value._state == FAILED and not self._is_lost(value):
                raise value._content
        return PerWorkerDataset(values)

    def iterate(self, dataset: PerWorkerDataset) -> PerWorkerIterator:
        """Return an iterator on each worker; for the library's own modules."""
        return PerWorkerIterator(self._on_each_worker(iter, dataset))

    def _is_lost(self, value: RemoteValue) -> bool:
        return isinstance(value._content, UnavailableError)

    @one_thread_at_a_time
    def _on_each_worker(self, fn: Any, *args: Any) -> list[RemoteValue]:
        """Call a function on each worker, which keeps the result."""
        values = []
        for worker in self._workers:
            call = self._made(fn, args, {}, keep=True)
            worker.kept[call.number] = call.remote
            values.append(call.remote)
            self._send(worker, [call])
        return values

    def _check(self, args: Any, kwargs: Any) -> None:
        if not args and not kwargs:
            return
        leaves = flatten((args, kwargs))[0]
        if any(isinstance(leaf, RemoteValue) for leaf in leaves):
            raise ValueError(
                "expected values as arguments of a scheduled function, found a "
                "RemoteValue; fetch it first"
            )

    def _made(
        self, fn: Any, args: Any, kwargs: Any, *, keep: bool = False
    ) -> _ScheduledCall:
        """Return a call; with ``keep`` its value stays on the worker."""
        number = self._count = self._count + 1
        remote = RemoteValue(self, number, (fn, args) if keep else None)
        return self._call(remote, fn, args, kwargs)

    def _call(
        self, remote: RemoteValue, fn: Any, args: Any, kwargs: Any
    ) -> _ScheduledCall:
        call = _ScheduledCall(remote._number, self._function(fn), remote)
        call.keep = remote._recipe is not None
        if args or kwargs:
            call.payload = _travelling((args, kwargs), "the arguments of ", fn)
            call.args = args, kwargs
        return call

    def _function(self, fn: Any) -> int:
        """Return a function's number; it is pickled when it comes first."""
        key = _identity(fn)
        known = self._functions.get(key)
        if known is None:
            number = self._count = self._count + 1
            self._payloads[number] = _travelling(fn, "", fn)
            known = self._functions[key] = number, fn
            if len(self._functions) > _MOST_FUNCTIONS and self._is_idle():
                self._forget_function()
        return known[0]

    def _forget_function(self) -> None:
        """Forget the function that was scheduled first."""
        number = self._functions.popitem(last=False)[1][0]
        del self._payloads[number]
        for worker in self._workers:
            if number in worker.functions:
                worker.functions.remove(number)
                self._mailbox.send(worker.rank, ("forget", number))

    def _send(self, worker: _WorkerRecord, calls: list[_ScheduledCall]) -> None:
        if worker.rank in self._mailbox.lost:
            # The worker was lost since it was chosen.
            self._run_again(worker, calls)
            return
        now = time.monotonic()
        wanted = {call.function for call in calls} - worker.functions
        worker.functions |= wanted
        functions = [(number, self._payloads[number]) for number in wanted]
        told = [(c.number, c.function, c.payload, c.keep) for c in calls]
        for call in calls:
            call.since = now
            worker.under_way[call.number] = call
        self._mailbox.send(worker.rank, ("calls", told, functions))

    def _pump(self) -> None:
        """Receive messages, and send functions to workers that need some."""
        while (found := self._mailbox.poll()) is not None:
            rank, (_, mean, results, lost) = found
            self._mailbox.hear(lost)
            if (worker := self._by_rank.get(rank)) is not None:
                self._take(worker, mean, results)
        while self._vacant:
            self._fill(self._vacant[0])
        if self._queue:
            self._deal()
        while self._dropped:
            rank, number = self._dropped.popleft()
            self._mailbox.send(rank, ("drop", number))
        self._strategy.forget_now()

    def _deal(self) -> None:
        lost = self._mailbox.lost
        ready = [
            w
            for w in self._workers
            if len(w.under_way) <= w.depth // 2 and w.rank not in lost
        ]
        ready.sort(key=lambda worker: len(worker.under_way))
        for position, worker in enumerate(ready):
            share = -(-len(self._queue) // (len(ready) - position))
            count = min(share, worker.depth - len(worker.under_way))
            if count > 0:
                self._send(worker, [self._queue.popleft() for _ in range(count)])

    def _take(self, worker: _WorkerRecord, mean: float, results: Iterable[Any]) -> None:
        ahead = _AHEAD_SECONDS / mean if mean > 0 else 0
        worker.depth = 1 + min(int(ahead), _MOST_AHEAD)
        for number, status, content in results:
            call = worker.under_way.pop(number, None)
            if call is None:
                continue
            if status == NOTHING:
                call.remote._settle(READY, _NOTHING)
            elif status == INLINE:
                call.remote._settle(READY, content)
            elif status == ON_WORKER:
                call.remote._settle(KEPT, worker.rank)
            elif status == ERROR:
                self._fail(call, error_of(content))
            else:
                call.remote._settle(FAILED, self._unavailable or _cancelled())

    def _fail(self, call: _ScheduledCall, error: Exception) -> None:
        """Note a function's error, and cancel functions that have not begun."""
        call.remote._settle(FAILED, error)
        # Errors after the first are raised by their own values only.
        if call.keep or self._error is not None:
            return
        self._error = error
        self._cancel()

    def _cancel(self) -> None:
        """Cancel functions that no worker has begun."""
        error = self._unavailable or _cancelled()
        for call in self._queue:
            call.remote._settle(FAILED, error)
        self._queue.clear()
        for worker in self._workers:
            if worker.under_way:
                self._mailbox.send(worker.rank, ("cancel",))

    def _raise_unavailable(self) -> None:
        if self._unavailable is not None:
            raise self._unavailable

    def _raise_error(self) -> None:
        """Raise the first error of the functions, when all have ended.

        So no earlier function writes or fails while the program handles the error.
        """
        if self._error is None:
            return
        self._wait(self._is_idle)
        self._raise_unavailable()
        with self.lock:
            error, self._error = self._error, None
        if error is not None:
            # No other thread has raised it.
            raise error

    def _is_idle(self) -> bool:
        return not self._queue and not any(w.under_way for w in self._workers)

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait, and say now and then for which worker; not where a server is lost.

        Other threads go on: functions may wait for what they do.
        """
        self._warned_at = time.monotonic()

        def look() -> bool:
            with self.lock:
                self._require_open()
                self._pump()
                self._warn()
                return self._unavailable is not None or ready()

        self._mailbox.wait(look, lambda: "workers to end their functions")

    def _warn(self) -> None:
        limit = self._strategy.warn_seconds
        now = time.monotonic()
        if now < self._warned_at + limit:
            return
        self._warned_at = now
        for worker in self._workers:
            first = next(iter(worker.under_way.values()), None)
            if first is not None and now > first.since + limit:
                get_logger().warning(
                    "worker %d (rank %d) has not ended a function for %.0f s; the "
                    "coordinator waits for it",
                    worker.index,
                    worker.rank,
                    now - first.since,
                )

    def _lose(self, lost: set[int]) -> None:
        """Queue the functions of lost workers again; the loss of a server is an error.

        It may be called while a message is sent, so it sends only the smallest ones.
        """
        for rank in lost:
            worker = self._by_rank.pop(rank, None)
            if worker is not None:
                calls = list(worker.under_way.values())
                worker.under_way.clear()
                self._vacant.append(worker)
                get_logger().warning(
                    "worker %d (rank %d) was lost; %d functions run again elsewhere",
                    worker.index,
                    rank,
                    self._run_again(worker, calls),
                )
            elif rank in self._strategy.roles.spares:
                get_logger().warning("rank %d, which was spare, was lost", rank)
            elif rank in self._strategy.roles.servers:
                self._unavailable = UnavailableError(
                    f"expected all parameter servers, found that rank {rank} was lost; "
                    "call the coordinator's recover(), and restore the last checkpoint"
                )
                get_logger().warning("rank %d, a parameter server, was lost", rank)
        try:
            self._require_worker()
        except UnavailableError as error:
            self._unavailable = error
        if self._unavailable is not None or self._error is not None:
            self._cancel()

    def _run_again(self, worker: _WorkerRecord, calls: list[_ScheduledCall]) -> int:
        """Queue a lost worker's functions first in line; return how many.

        What it was to keep is made again by a spare rank that takes its place.
        """
        again = [call for call in calls if not call.keep]
        self._queue.extendleft(reversed(again))
        if worker not in self._vacant:
            self._fail_kept(worker)
        return len(again)

    def _fail_kept(self, worker: _WorkerRecord) -> None:
        """End the wait for values that a lost worker was to make."""
        for value in list(worker.kept.values()):
            if value._state == WAITING:
                value._settle(FAILED, _lost_error(worker))

    def _fill(self, worker: _WorkerRecord) -> None:
        """Give the place of a lost worker to a spare rank, if there is one."""
        spare = self._strategy.replace(worker.rank)
        self._vacant.popleft()
        if spare is None:
            self._fail_kept(worker)
            return
        worker.rank, worker.depth = spare, 1
        worker.functions.clear()
        self._by_rank[spare] = worker
        # In this order, as iterators need their data sets.
        for _, value in sorted(worker.kept.items()):
            fn, args = value._recipe
            value._settle(WAITING, None)
            self._send(worker, [self._call(value, fn, args, {})])

    def _require_worker(self) -> None:
        lost, roles = self._mailbox.lost, self._strategy.roles
        if lost.issuperset((*(w.rank for w in self._workers), *roles.spares)):
            raise UnavailableError(
                "expected a worker, found that all were lost; start the job again"
            )

    def wait_for(self, value: RemoteValue) -> None:
        """Wait until a function has ended; for the library's own modules."""
        if value._state == WAITING:
            self._require_open()
            self._wait(lambda: value._state != WAITING)
            if value._state == WAITING:
                self._raise_unavailable()

    @one_thread_at_a_time
    def load(self, value: RemoteValue) -> Any:
        """Return a result, which is asked for where its worker has it.

        For the library's own modules.
        """
        if value._state == KEPT:
            self._require_open()
            data = self._mailbox.ask(value._content, ("fetch", value._number))
            self.drop(value._content, value._number)
            value._settle(READY, data)
        content = value._content
        return None if content == _NOTHING else self._unpickled(content)

    def drop(self, worker: int, number: int) -> None:
        """Let a worker forget a value, with the next message.

        For the library's own modules.
        """
        # Called by the garbage collector: no message now.
        self._dropped.append((worker, number))

    def _unpickled(self, data: bytes) -> Any:
        return unpickled(data, lambda handle: self._strategy.resolve(*handle))

    def _require_open(self) -> None:
        if self._strategy.closed:
            raise RuntimeError(
                f"expected {self._strategy!r} to be open, found it closed; make another"
            )
        if not self._strategy._cluster.coordinates:
            raise RuntimeError(
                "expected the ClusterCoordinator to be used by the coordinator's "
                "program, found that a scheduled function uses it; return what the "
                "program needs to schedule more"
            )

    def __repr__(self) -> str:
        return f"ClusterCoordinator({len(self._strategy.roles.workers)} workers)"


class _Returns:
    """A function that returns a data set."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value


def _travelling(value: Any, what: str, fn: Any) -> bytes:
    """Pickle an object for workers; an error names it, and the function."""
    try:
        return pickled(value)
    except Exception as error:
        error.add_note(
            f"raised while {what}{fn!r:.80} was pickled for the workers, with all that "
            "it refers to; leave out what cannot be sent, and make it on the workers"
        )
        raise


def _identity(fn: Any) -> Any:
    """Return a key that no other function has while this one lives.

    Not the function itself: objects that can be called may compare equal, and do
    different things. A bound method is made anew by each access.
    """
    if isinstance(fn, types.MethodType):
        return id(fn.__self__), id(fn.__func__)
    if isinstance(fn, (types.BuiltinMethodType, types.MethodWrapperType)):
        # They compare the identities of object and function.
        return fn
    return id(fn)


def _cancelled() -> CancelledError:
    return CancelledError(
        "expected the function to run, found that one before it had failed; schedule "
        "it again"
    )


def _lost_error(worker: _WorkerRecord) -> UnavailableError:
    return UnavailableError(
        f"expected worker {worker.index} to keep a value, found that it was lost; make "
        "the value again"
    )
