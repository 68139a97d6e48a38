"""Reading ahead: threads make elements before the program requests them.

Threads refer only to the queue of requests, not to the iterator, so that the iterator
can be deleted while threads run; they end when it is deleted, closed or at its end.
Elements are returned in order; an error is raised in place of the element that failed.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hpcstrat.data.batched import Batch, Batched
from hpcstrat.data.rows import Rows, Stage
from hpcstrat.data.streams import Stream
from hpcstrat.engine.typing import Tree

__all__ = ["ReadAhead", "read_ahead", "read_batches_ahead"]

_MOST_THREADS = 4


class _Ticket:
    """A request for one element, which a thread makes."""

    __slots__ = ("_done", "error", "make", "value")

    def __init__(self, make: Callable[[], Tree]) -> None:
        self.make: Any = make
        self.value: Tree = None
        self.error: BaseException | None = None
        # A lock costs less than an Event.
        self._done = threading.Lock()
        self._done.acquire()

    def work(self) -> None:
        """Make the element, or store the error; a reader thread calls this."""
        try:
            self.value = self.make()
        except BaseException as error:
            self.error = error
        self.make = None
        self._done.release()

    def wait(self) -> Tree:
        """Wait until a thread has made the element; return it, or raise its error."""
        self._done.acquire()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self.value


def _num_readers(depth: int) -> int:
    """Return the number of reader threads: one per core, from 2 to 4, up to ``depth``.

    One core gets two threads, because a thread that waits for the disk needs no core.
    """
    cores = len(os.sched_getaffinity(0))
    return min(depth, _MOST_THREADS, max(cores, 2))


def _serve(tickets: Any) -> None:
    """Make requested elements until the queue returns None; reader threads run this."""
    while True:
        ticket = tickets.get()
        if ticket is None:
            return
        ticket.work()
        # An idle thread must not keep the latest element in memory.
        del ticket


def _end(tickets: Any, count: int, is_closed: list[bool]) -> None:
    """Drop waiting requests, and let the threads end; called once, by any thread."""
    is_closed[0] = True
    try:
        while True:
            tickets.get_nowait()
    except queue.Empty:
        pass
    for _ in range(count):
        tickets.put(None)


class ReadAhead(Iterator[Tree]):
    """An iterator over the results of ``calls``, of which threads make ``depth`` ahead.

    The iterator ends after the last call, or when a call raises StopIteration.
    """

    def __init__(
        self, calls: Iterator[Callable[[], Tree]], depth: int, num_threads: int
    ) -> None:
        self._calls = calls
        self._depth = depth
        self._ready: deque[_Ticket] = deque()
        self._tickets: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_closed = [False]
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(self._tickets,),
                name=f"hpcstrat-reader-{index}",
                daemon=True,
            )
            for index in range(num_threads)
        ]
        self._finish = weakref.finalize(
            self, _end, self._tickets, num_threads, self._is_closed
        )
        for thread in self._threads:
            thread.start()
        self._ask()

    def _ask(self) -> None:
        while len(self._ready) < self._depth:
            call = next(self._calls, None)
            if call is None:
                return
            ticket = _Ticket(call)
            self._ready.append(ticket)
            self._tickets.put(ticket)

    def __next__(self) -> Tree:
        """Return the next result, or raise the error of its call."""
        if self._is_closed[0] or not self._ready:
            self.close()
            raise StopIteration
        ticket = self._ready.popleft()
        try:
            value = ticket.wait()
        except StopIteration:
            self.close()
            raise
        finally:
            if not self._is_closed[0]:
                self._ask()
        return value

    def close(self) -> None:
        """Let the threads finish their current calls, and wait until they end."""
        self._finish()
        self._ready.clear()
        for thread in self._threads:
            thread.join()


def read_ahead(parent: Stage, depth: int) -> Stage:
    """Return a stage whose next ``depth`` elements a thread makes ahead.

    A stage with random access is returned as it is, because iterators over data sets
    read its batches ahead.
    """
    if isinstance(parent, (Rows, Batched)) or not depth:
        return parent

    def start(epoch: int) -> Iterator[Tree]:
        elements = parent.iterate(epoch)
        # Use one thread, because an iterator is not safe for several threads.
        return ReadAhead(itertools.repeat(lambda: next(elements)), depth, 1)

    return Stream(
        "",
        start,
        parent.spec,
        parents=[parent],
        cardinality=parent.cardinality,
        size=parent.batch_size,
    )


def read_batches_ahead(
    stage: Batched,
    read: Callable[[Batch], Tree],
    depth: int,
    *,
    epoch: int,
    position: int = 0,
) -> ReadAhead:
    """Return an iterator over an epoch's batches, which threads read by ``read``."""

    def calls(start: int) -> Iterator[Callable[[], Tree]]:
        while start != stage.num_rows:
            batch = stage.batch_at(epoch, start)
            yield partial(read, batch)
            start = batch.stop

    return ReadAhead(calls(position), depth, _num_readers(depth))
