"""Clocks of several hosts on one axis.

A host asks the reference for its time, and reads its own clock before and after: the
reference answered somewhere in between, so that half the round trip bounds the error.
The shortest of many round trips is taken: F. Cristian, "Probabilistic clock
synchronization", Distributed Computing 3 (1989) 146-158, doi:10.1007/BF01784024.
Between two such measurements the offset is taken to change linearly.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Alignment", "Sample", "best_sample"]


@dataclass(frozen=True, slots=True, order=True)
class Sample:
    """One measurement of a clock against the reference's."""

    local_ns: int
    offset_ns: int
    # The reference's time is the local time, in the middle of the trip, plus the
    # offset; it is off by at most half of the trip.
    round_trip_ns: int


def best_sample(trips: Iterable[tuple[int, int, int]]) -> Sample:
    """Return the measurement of the shortest round trip, of at least one.

    A trip has nanoseconds: this clock before, the reference's answer, this clock after.
    """
    before, answer, after = min(trips, key=lambda trip: trip[2] - trip[0])
    middle = (before + after) // 2
    return Sample(middle, answer - middle, after - before)


class Alignment:
    """Translates one clock's times to the reference's; without samples, times stay."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        kept: dict[int, Sample] = {}
        for sample in sorted(samples, key=lambda s: (s.local_ns, -s.round_trip_ns)):
            kept[sample.local_ns] = sample
        self.samples = list(kept.values())
        self._times = [sample.local_ns for sample in self.samples]

    @property
    def drift(self) -> float:
        """Fraction of its own time that this clock loses against the reference."""
        if len(self.samples) < 2:
            return 0.0
        first, last = self.samples[0], self.samples[-1]
        return (last.offset_ns - first.offset_ns) / (last.local_ns - first.local_ns)

    def offset_ns(self, local_ns: int) -> int:
        """Return the number to add to a time of this clock.

        It is interpolated between two samples; outside of all it follows the drift from
        the first to the last, which the errors of two samples change least.
        """
        if not self.samples:
            return 0
        index = bisect.bisect_right(self._times, local_ns)
        if index in (0, len(self.samples)):
            near = self.samples[0 if index == 0 else -1]
            return near.offset_ns + round(self.drift * (local_ns - near.local_ns))
        low, high = self.samples[index - 1], self.samples[index]
        slope = (high.offset_ns - low.offset_ns) / (high.local_ns - low.local_ns)
        return low.offset_ns + round(slope * (local_ns - low.local_ns))

    def reference_ns(self, local_ns: int) -> int:
        """Return the reference's time at a time of this clock."""
        return local_ns + self.offset_ns(local_ns)
