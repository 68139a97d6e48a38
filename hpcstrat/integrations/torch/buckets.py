"""Reductions of buckets of arrays, which start while a program still computes.

A backward pass computes the gradients of the last layers first. Between workers, the
sums of these gradients can be sent while the pass continues. The sums are sent in
buckets: large enough to be worth a call, small enough that the first bucket is soon
full. Ranks may compute the arrays in different orders, or lack some. So buckets are
started in the order of a plan that is the same on all ranks, and incomplete buckets are
started at the end of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hpcstrat.engine.channel.pending_calls import PendingCall

__all__ = ["Buckets", "plan_buckets"]

Bucket = tuple[int, ...]


def plan_buckets(
    order: Sequence[int], nbytes: Sequence[int], bucket_bytes: int
) -> list[Bucket]:
    """Divide arrays into buckets of at least ``bucket_bytes``; the last may be smaller.

    ``order`` has the indices of the arrays, in the order in which they will be ready.
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
    """The buckets of one pass over a program's arrays, such as a backward pass.

    ``plan`` is the same on all ranks; ``start`` starts the reduction of one bucket,
    with ``in_pass=True``. The whole pass is collective over ``topology.replica_comm``.
    If an error ends the pass on one rank, the other ranks learn of it in the next call.
    """

    def __init__(
        self, plan: Sequence[Bucket], start: Callable[[Bucket], PendingCall]
    ) -> None:
        self._plan = plan
        self._start = start
        self._missing = [set(bucket) for bucket in plan]
        self._numbers = {i: n for n, bucket in enumerate(plan) for i in bucket}
        self._started: list[PendingCall] = []
        self._num_ended = 0

    def __contains__(self, index: int) -> bool:
        """Return whether an array is in any bucket."""
        return index in self._numbers

    def ready(self, index: int) -> None:
        """Mark an array as ready, start full buckets, and advance started buckets."""
        if (number := self._numbers.get(index)) is not None:
            self._missing[number].discard(index)
            for missing in self._missing[len(self._started) :]:
                if missing:
                    break
                self._start_next()
        self.drive()

    def drive(self) -> None:
        """Advance the started buckets without waiting; raise if one has failed."""
        while self._num_ended < len(self._started):
            if not self._started[self._num_ended].test():
                break
            self._started[self._num_ended].wait()
            self._num_ended += 1

    def was_started(self, index: int) -> bool:
        """Return whether an array's bucket was started, after waiting for its end."""
        number = self._numbers.get(index, len(self._plan))
        if number < len(self._started):
            self._started[number].wait()
        return number < len(self._started)

    def start_rest(self) -> None:
        """Start all buckets that have not been started, even if incomplete."""
        while len(self._started) < len(self._plan):
            self._start_next()

    def ended(self) -> Iterator[Bucket]:
        """Wait for the buckets, one after the other; yield each when it has ended."""
        for bucket, started in zip(self._plan, self._started, strict=True):
            started.wait()
            # Advance the next buckets before the caller works on this bucket.
            self.drive()
            yield bucket

    def _start_next(self) -> None:
        self._started.append(self._start(self._plan[len(self._started)]))
