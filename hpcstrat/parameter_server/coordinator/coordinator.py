"""The coordinator, which schedules functions on workers and receives their results."""

from __future__ import annotations

import threading
import time
from collections import deque
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
from hpcstrat.parameter_server.coordinator.scheduled_calls import (
    Functions,
    ScheduledCall,
    WorkerRecord,
    pickled_for_workers,
)
from hpcstrat.parameter_server.coordinator.strategy import ParameterServerStrategy
from hpcstrat.parameter_server.coordinator.worker import (
    ERROR,
    INLINE,
    NOTHING,
    ON_WORKER,
)
from hpcstrat.parameter_server.handles import error_of, unpickled
from hpcstrat.parameter_server.mailbox import one_thread_at_a_time

# `schedule` waits while this number of calls is queued.
_MOST_QUEUED = 256 << 10
# A worker's queue has calls for about this time. With a longer time, calls could wait
# for a slow worker while others are idle; with a shorter time, workers often idle.
_AHEAD_SECONDS = 0.002
_MOST_AHEAD = 64
_NOTHING = b""


class ClusterCoordinator:
    """Schedules functions on the workers of a cluster.

    A strategy has one coordinator: making a second one returns the first. Queued
    functions are sent to workers only during calls of the coordinator's methods. Inside
    a scheduled function, only the property `strategy` of a coordinator works. Several
    threads may use one coordinator.

    Parameters
    ----------
    strategy : ParameterServerStrategy
        An open strategy, of which this rank is the coordinator.

    Raises
    ------
    TypeError
        If ``strategy`` is not a ParameterServerStrategy, or each worker runs the
        program.
    """

    _strategy: ParameterServerStrategy
    lock: threading.RLock

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        known = isinstance(strategy, ParameterServerStrategy)
        if not known or strategy.roles.between_graph:
            raise TypeError(
                f"expected a ParameterServerStrategy, found {strategy!r:.80}; make one"
            )
        if strategy.coordinator is None:
            self = super().__new__(cls)
            self._strategy, self.lock = strategy, strategy.client.lock
            if strategy.cluster.coordinates:
                self._begin(strategy)
            strategy.coordinator = self
        found: ClusterCoordinator = strategy.coordinator
        return found

    def __reduce__(self) -> Any:
        return ClusterCoordinator, (self._strategy,)

    def _begin(self, strategy: ParameterServerStrategy) -> None:
        self._mailbox = strategy.client.mailbox
        self._mailbox.on_loss = self._lose
        ranks = strategy.roles.workers
        self._workers = [WorkerRecord(index, rank) for index, rank in enumerate(ranks)]
        self._by_rank = {worker.rank: worker for worker in self._workers}
        # Workers whose ranks were lost, and that may still get a spare rank.
        self._vacant: deque[WorkerRecord] = deque()
        self._queue: deque[ScheduledCall] = deque()
        self._functions = Functions()
        self._dropped: deque[tuple[int, int]] = deque()
        self._count = 0
        self._error: Exception | None = None
        self._unavailable: Exception | None = None
        self._warned_at = time.monotonic()
        if self._mailbox.lost:
            self._lose(set(self._mailbox.lost))

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy whose workers run the functions."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Any = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Queue a function for any worker, and return without waiting for it.

        Not collective; call it on the coordinator. Functions may run in any order. If a
        worker is lost, other workers run its unfinished functions again from the
        beginning. The call waits only while 262,144 functions are queued.

        Parameters
        ----------
        fn : callable
            Pickled once, with the values that it captures at that time. Variables,
            optimizers and the strategy are sent as handles.
        args : sequence, optional
            Positional arguments. A PerWorkerValues is replaced by the value of the
            worker that runs the function.
        kwargs : mapping, optional
            Keyword arguments.

        Returns
        -------
        RemoteValue
            The future result of the function.

        Raises
        ------
        TypeError
            If ``fn`` is not callable.
        ValueError
            For a RemoteValue as an argument.
        UnavailableError
            If a parameter server is lost; see `recover`.
        Exception
            The first error of an earlier function. It is raised once, after all running
            functions have ended. Functions that have not begun are cancelled, and
            ``fn`` is not scheduled.
        """
        self._require_open()
        if not callable(fn):
            raise TypeError(
                f"expected a function to schedule, found {fn!r:.80}; pass its "
                "arguments as args"
            )
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        if any(isinstance(leaf, RemoteValue) for leaf in flatten((args, kwargs))[0]):
            raise ValueError(
                "expected values as arguments of a scheduled function, found a "
                "RemoteValue; fetch it first"
            )
        with self.lock:
            self._pump()
        if len(self._queue) >= _MOST_QUEUED:
            self._wait(lambda: len(self._queue) < _MOST_QUEUED)
        self._raise_unavailable()
        self._raise_error()
        with self.lock:
            call = self._call(self._remote_value(), fn, args, kwargs)
            self._queue.append(call)
            self._deal()
        return call.remote

    def join(self) -> None:
        """Wait until all scheduled functions have ended.

        Not collective; call it on the coordinator.

        Raises
        ------
        UnavailableError
            If a parameter server is lost; see `recover`.
        Exception
            The first error of a function, as in `schedule`.
        """
        self._require_open()
        self._wait(self._is_idle)
        self._raise_unavailable()
        self._raise_error()

    def recover(self) -> None:
        """Continue with the remaining parameter servers, after an UnavailableError.

        Not collective; call it on the coordinator. Cancels functions that have not
        begun, and waits for running functions. Variables of lost servers are made
        again, with zeros, on spare ranks or on the remaining servers, and the state of
        optimizers is reset. Restore the last checkpoint of all variables and optimizers
        before the next function. Per-worker data sets continue at their positions.

        Raises
        ------
        UnavailableError
            If no server or no worker is left, or if another server is lost during the
            call. In the second case, call `recover` again.
        """
        self._require_open()
        with self.lock:
            self._cancel()
        self._mailbox.wait(self._has_settled, lambda: "workers to end their functions")
        with self.lock:
            self._unavailable = self._error = None
            self._require_worker()
            self._strategy.move_from_lost()
            # Forget pickled functions, which refer to the old servers of variables.
            self._functions.clear()
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
        """Return whether all scheduled functions have ended.

        Not collective; call it on the coordinator.

        Returns
        -------
        bool
            Also True if a function has failed; `join` raises its error.

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
        """Raise RuntimeError if scheduled functions have not ended.

        For the library's own modules.
        """
        self._pump()
        # Do not count calls that make a value which the worker keeps, such as an
        # iterator, because they write no variable.
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

        Not collective; call it on the coordinator.

        Parameters
        ----------
        val : tree
            A structure with RemoteValues. Its other leaves are returned unchanged.

        Returns
        -------
        tree
            The structure of ``val``; a PerWorkerValues is replaced by a tuple.

        Raises
        ------
        Exception
            See ``RemoteValue.fetch``.
        """

        return tree_map(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val
        )

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Make a data set on each worker.

        Not collective; call it on the coordinator. Waits until each worker has made its
        data set. Each worker reads all data: its input context has one pipeline.

        Parameters
        ----------
        dataset_fn : callable or Dataset
            A function that each worker calls to make an iterable, or a Dataset.

        Returns
        -------
        PerWorkerDataset
            Iterate over it to get arguments for functions.

        Raises
        ------
        ValueError
            If the function makes a variable.
        Exception
            Any other error of the function.
        """
        self._require_open()
        make = dataset_fn if callable(dataset_fn) else lambda: dataset_fn
        values = self._on_each_worker(make)
        for value in values:
            self.wait_for(value)
        for value in values:
            error = value._content
            if value._state == FAILED and not isinstance(error, UnavailableError):
                raise error
        return PerWorkerDataset(values)

    def iterate(self, dataset: PerWorkerDataset) -> PerWorkerIterator:
        """Return an iterator on each worker; for the library's own modules."""
        return PerWorkerIterator(self._on_each_worker(iter, dataset))

    @one_thread_at_a_time
    def _on_each_worker(self, fn: Any, *args: Any) -> list[RemoteValue]:
        """Call a function on each worker; each worker keeps its own result."""
        values = []
        for worker in self._workers:
            call = self._call(self._remote_value((fn, args)), fn, args, {})
            worker.kept[call.number] = call.remote
            values.append(call.remote)
            self._send(worker, [call])
        return values

    def _remote_value(self, recipe: Any = None) -> RemoteValue:
        """Return a new RemoteValue; if it has a recipe, a worker keeps the result."""
        self._count += 1
        return RemoteValue(self, self._count, recipe)

    def _call(
        self, remote: RemoteValue, fn: Any, args: Any, kwargs: Any
    ) -> ScheduledCall:
        functions = self._functions
        if functions.is_full_for(fn) and self._is_idle():
            oldest = functions.forget_oldest()
            for worker in self._workers:
                if oldest in worker.functions:
                    worker.functions.remove(oldest)
                    self._mailbox.send(worker.rank, ("forget", oldest))
        call = ScheduledCall(functions.number(fn), remote)
        if args or kwargs:
            call.payload = pickled_for_workers((args, kwargs), "the arguments of ", fn)
            call.args = args, kwargs
        return call

    def _send(self, worker: WorkerRecord, calls: list[ScheduledCall]) -> None:
        if worker.rank in self._mailbox.lost:
            self._run_again(worker, calls)
            return
        now = time.monotonic()
        wanted = {call.function for call in calls} - worker.functions
        worker.functions |= wanted
        payloads = self._functions.payloads
        functions = [(number, payloads[number]) for number in wanted]
        told = [(c.number, c.function, c.payload, c.keep) for c in calls]
        for call in calls:
            call.since = now
            worker.under_way[call.number] = call
        self._mailbox.send(worker.rank, ("calls", told, functions))

    def _pump(self) -> None:
        """Receive messages, and send functions to workers that have few left."""
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

    def _take(self, worker: WorkerRecord, mean: float, results: Iterable[Any]) -> None:
        ahead = _AHEAD_SECONDS / mean if mean > 0 else 0
        worker.depth = 1 + min(int(ahead), _MOST_AHEAD)
        for number, status, content in results:
            call = worker.under_way.pop(number, None)
            if call is None:
                continue
            if status in (NOTHING, INLINE):
                call.remote._settle(READY, content or _NOTHING)
            elif status == ON_WORKER:
                call.remote._settle(KEPT, worker.rank)
            elif status == ERROR:
                self._fail(call, error_of(content))
            else:
                call.remote._settle(FAILED, self._unavailable or _cancelled())

    def _fail(self, call: ScheduledCall, error: Exception) -> None:
        """Record the error of a function, and cancel functions that have not begun."""
        call.remote._settle(FAILED, error)
        # `schedule` and `join` raise only the first error. A later error is raised when
        # the value of its function is fetched.
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
        """Raise the first error of the scheduled functions, after all have ended.

        If functions still ran, they could write variables, or fail, while the program
        handles the error.
        """
        if self._error is None:
            return
        self._wait(self._is_idle)
        self._raise_unavailable()
        with self.lock:
            error, self._error = self._error, None
        if error is not None:
            # ``error`` is None if another thread has raised it.
            raise error

    def _is_idle(self) -> bool:
        return not self._queue and not any(w.under_way for w in self._workers)

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready`` is true, or a server is lost; warn of late workers.

        The lock is free between checks, so that other threads can use the coordinator.
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
        limit = self._mailbox.warn_seconds
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
        """Queue the functions of lost workers again, and record the loss of a server.

        This method may run during the wait of a large message, so it sends only small
        messages, which do not wait.
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

    def _run_again(self, worker: WorkerRecord, calls: list[ScheduledCall]) -> int:
        """Put a lost worker's functions at the head of the queue; return their number.

        Values that the worker keeps are not queued: a spare rank makes them again.
        """
        again = [call for call in calls if not call.keep]
        self._queue.extendleft(reversed(again))
        if worker not in self._vacant:
            self._fail_kept(worker)
        return len(again)

    def _fail_kept(self, worker: WorkerRecord) -> None:
        """Mark the values that a lost worker has not made as failed.

        Without this mark, a program would wait for these values forever.
        """
        for value in list(worker.kept.values()):
            if value._state == WAITING:
                value._settle(FAILED, _lost_error(worker))

    def _fill(self, worker: WorkerRecord) -> None:
        """Replace the rank of a lost worker by a spare rank, if there is one."""
        spare = self._strategy.cluster.replace(worker.rank)
        self._vacant.popleft()
        if spare is None:
            self._fail_kept(worker)
            return
        worker.rank, worker.depth = spare, 1
        worker.functions.clear()
        self._by_rank[spare] = worker
        # Make the kept values again in the order of their numbers, so that a data set
        # is made before its iterator.
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
        """Wait until a value's function has ended; for the library's own modules."""
        if value._state == WAITING:
            self._require_open()
            self._wait(lambda: value._state != WAITING)
            if value._state == WAITING:
                self._raise_unavailable()

    @one_thread_at_a_time
    def load(self, value: RemoteValue) -> Any:
        """Return the result of a function; fetch it from its worker if necessary.

        For the library's own modules.
        """
        if value._state == KEPT:
            self._require_open()
            data = self._mailbox.ask(value._content, ("fetch", value._number))
            self.drop(value._content, value._number)
            value._settle(READY, data)
        content = value._content
        if content == _NOTHING:
            return None
        return unpickled(content, lambda handle: self._strategy.resolve(*handle))

    def drop(self, worker: int, number: int) -> None:
        """Queue a request that a worker forget a value; the request is sent later.

        For the library's own modules.
        """
        # Send no message, because the garbage collector may call this at any time.
        self._dropped.append((worker, number))

    def _require_open(self) -> None:
        if self._strategy.closed:
            raise RuntimeError(
                f"expected {self._strategy!r} to be open, found it closed; make another"
            )
        if not self._strategy.cluster.coordinates:
            raise RuntimeError(
                "expected the ClusterCoordinator to be used by the coordinator's "
                "program, found that a scheduled function uses it; return what the "
                "program needs to schedule more"
            )

    def __repr__(self) -> str:
        return f"ClusterCoordinator({len(self._strategy.roles.workers)} workers)"


def _cancelled() -> CancelledError:
    return CancelledError(
        "expected the function to run, found that one before it had failed; schedule "
        "it again"
    )


def _lost_error(worker: WorkerRecord) -> UnavailableError:
    return UnavailableError(
        f"expected worker {worker.index} to keep a value, found that it was lost; make "
        "the value again"
    )
