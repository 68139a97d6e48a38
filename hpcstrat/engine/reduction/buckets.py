"""Reductions in buckets, which are started while a program still computes.

A backward pass has the gradients of the last layers first. Between workers their sums
may travel while it goes on, in buckets: large enough to be worth a call, small enough
for the first one to be full soon. Ranks may have the arrays in other orders, and some
not at all: buckets are started in the order of a plan that is the same on all ranks,
and what is not complete in the end, then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hpcstrat.engine.channel.pending_calls import PendingCall

__all__ = ["Buckets", "plan_buckets"]

Bucket = tuple[int, ...]


def plan_buckets(
    order: Sequence[int], nbytes: Sequence[int], bucket_bytes: int
) -> list[Bucket]:
    """Divide arrays into buckets of at least so many bytes, but for the last one.

    ``order`` are their indices, in the order in which they will be ready.
    """
    buckets, bucket, size = [], list[int](), 0
    for index in order:
        bucket.append(index)
        size += nbytes[index]
        if size >= bucket_bytes:
            buckets.append(tuple(bucket))
            bucket, size = [], 0
    return [*buckets, tuple(bucket)] if bucket else buckets


class Buckets:
    """The buckets of one pass over a program's arrays.

    ``plan`` is the same on all ranks; ``start`` starts the reduction of one, as a part.
    As a whole it is collective over ``topology.replica_comm``; the other ranks learn of
    a pass that an error has ended by the next call.
    """

    def __init__(
        self, plan: Sequence[Bucket], start: Callable[[Bucket], PendingCall]
    ) -> None:
        self._plan = plan
        self._start = start
        self._missing = [set(bucket) for bucket in plan]
        self._numbers = {i: n for n, bucket in enumerate(plan) for i in bucket}
        self._started: list[PendingCall] = []
        # The number of those that have ended.
        self._num_ended = 0

    def __contains__(self, index: int) -> bool:
        """Whether an array is in any bucket."""
        return index in self._numbers

    def ready(self, index: int) -> None:
        """Take note that an array may be reduced, and take further what is under way.

        An array that is in no bucket does the latter only.
        """
        if (number := self._numbers.get(index)) is not None:
            self._missing[number].discard(index)
            for missing in self._missing[len(self._started) :]:
                if missing:
                    break
                self._start_next()
        self.drive()

    def drive(self) -> None:
        """Take further what is under way; raise why one of the buckets has failed."""
        while self._num_ended < len(self._started):
            if not self._started[self._num_ended].test():
                break
            self._started[self._num_ended].wait()
            self._num_ended += 1

    def was_started(self, index: int) -> bool:
        """Whether the bucket of an array has been started; then wait for its end."""
        number = self._numbers.get(index, len(self._plan))
        if number < len(self._started):
            self._started[number].wait()
        return number < len(self._started)

    def start_rest(self) -> None:
        """Start what has not been complete."""
        while len(self._started) < len(self._plan):
            self._start_next()

    def ended(self) -> Iterator[Bucket]:
        """Wait for the buckets, one after the other, and give each that has ended."""
        for bucket, started in zip(self._plan, self._started, strict=True):
            started.wait()
            # The next one is announced before anything is done with this one.
            self.drive()
            yield bucket

    def _start_next(self) -> None:
        self._started.append(self._start(self._plan[len(self._started)]))
