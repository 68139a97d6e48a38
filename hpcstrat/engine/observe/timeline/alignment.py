"""Conversion of clock times of several hosts to one reference clock.

A host requests the time of the reference clock, and reads its own clock before and
after the request. The reference clock's host replied between the two readings, so that
the error is at most half of the round-trip time. The shortest of many round trips is
used: F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3 (1989)
146-158, doi:10.1007/BF01784024. Between two measurements, the offset is interpolated
linearly.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Alignment", "Sample", "best_sample"]


@dataclass(frozen=True, slots=True, order=True)
class Sample:
    """One measurement of a clock's offset to the reference clock."""

    local_ns: int
    offset_ns: int
    # ``local_ns`` is the middle of the round trip. The reference time is ``local_ns``
    # plus ``offset_ns``, with an error of at most half of ``round_trip_ns``.
    round_trip_ns: int


def best_sample(trips: Iterable[tuple[int, int, int]]) -> Sample:
    """Return the measurement from the shortest of one or more round trips.

    A trip has three times in nanoseconds: this clock before the request, the reference
    clock's reply, and this clock after the reply.
    """
    before, answer, after = min(trips, key=lambda trip: trip[2] - trip[0])
    middle = (before + after) // 2
    return Sample(middle, answer - middle, after - before)


class Alignment:
    """Converts one clock's times to reference times; no samples mean no offset."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        kept: dict[int, Sample] = {}
        for sample in sorted(samples, key=lambda s: (s.local_ns, -s.round_trip_ns)):
            kept[sample.local_ns] = sample
        self.samples = list(kept.values())
        self._times = [sample.local_ns for sample in self.samples]

    @property
    def drift(self) -> float:
        """Fraction of its own time by which this clock lags behind the reference."""
        if len(self.samples) < 2:
            return 0.0
        first, last = self.samples[0], self.samples[-1]
        return (last.offset_ns - first.offset_ns) / (last.local_ns - first.local_ns)

    def offset_ns(self, local_ns: int) -> int:
        """Return the nanoseconds to add to a time of this clock to get reference time.

        The offset is interpolated between two samples. Outside of the samples, it is
        extrapolated with the drift between the first and the last sample, because
        errors of two samples affect the drift least over the longest interval.
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
        """Convert a time of this clock to the reference clock."""
        return local_ns + self.offset_ns(local_ns)
