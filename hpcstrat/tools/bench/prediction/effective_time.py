"""The effective time of a run: the share of its time that makes steps which are kept.

A run saves its state after a number of steps. At a loss, it starts again from the last
save. Losses are independent of each other and of what the run does, so that the time
between them is exponential; they also come during saves and starts. The model is that
of Daly (https://doi.org/10.1016/j.future.2004.11.016, equation 20), with measured times
instead of constant ones: each attempt draws its steps, its save and its start anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["EffectiveTime", "LossyRun", "MeasuredTimes"]


@dataclass(frozen=True)
class MeasuredTimes:
    """A distribution of seconds: each value has been measured with this weight."""

    values: Any
    weights: Any

    @classmethod
    def of(cls, seconds: Sequence[float]) -> MeasuredTimes:
        """Return the distribution of measured seconds; ValueError if it has none."""
        values = np.sort(np.asarray(seconds, float))
        if not values.size or not (values >= 0).all() or np.isinf(values).any():
            raise ValueError(f"expected measured seconds, found {seconds}")
        return cls(values, np.full(len(values), 1 / len(values)))

    def mean_of(self, numbers: Any) -> float:
        """Return the mean of numbers, one for each value."""
        return float(self.weights @ numbers)

    @property
    def mean(self) -> float:
        """The mean in seconds."""
        return self.mean_of(self.values)

    @property
    def deviation(self) -> float:
        """The standard deviation in seconds."""
        return math.sqrt(self.mean_of((self.values - self.mean) ** 2))

    @property
    def median(self) -> float:
        """The median in seconds."""
        return float(np.median(self.values))

    def slowest_of(self, count: float) -> MeasuredTimes:
        """Return the distribution of the largest of ``count`` independent times."""
        ends = np.cumsum(self.weights).clip(0, 1) ** count
        return MeasuredTimes(self.values, np.diff(ends / ends[-1], prepend=0.0))

    def changed_by(self, seconds: float) -> MeasuredTimes:
        """Return the distribution of these times plus ``seconds``, but at least 0."""
        return MeasuredTimes((self.values + seconds).clip(0), self.weights)


@dataclass(frozen=True, slots=True)
class EffectiveTime:
    """A share of the time, from 0 to 1, and its standard deviation between runs."""

    mean: float
    deviation: float
    losses: float


@dataclass(frozen=True)
class LossyRun:
    """A run with its steps, saves, starts and losses.

    ``starts`` are the seconds from a loss to the first new step. ``loss_seconds`` is
    the mean time between losses of the whole job, infinite without losses.
    """

    steps: MeasuredTimes
    saves: MeasuredTimes
    starts: MeasuredTimes
    loss_seconds: float
    steps_per_save: int

    def seconds_per_save(self) -> tuple[float, float]:
        """Return mean and standard deviation of the time from one save to the next.

        Losses, repeated steps and starts are included. Both are infinite if the run
        hardly ever reaches the next save.
        """
        count = self.steps_per_save
        if math.isinf(self.loss_seconds):
            variance = count * self.steps.deviation**2 + self.saves.deviation**2
            return count * self.steps.mean + self.saves.mean, math.sqrt(variance)
        start = self._until_done([(self.starts, 1)], 0.0, 0.0)
        parts = [(self.steps, count), (self.saves, 1)]
        mean, square = self._until_done(parts, *start)
        if math.isinf(mean):
            return math.inf, math.inf
        return mean, math.sqrt(max(0.0, square - mean**2))

    def _until_done(
        self, parts: Sequence[tuple[MeasuredTimes, int]], mean: float, square: float
    ) -> tuple[float, float]:
        """Return mean and mean square of the time until an attempt sees no loss.

        An attempt takes the sum of so many draws of each part. ``mean`` and ``square``
        are those of the time between a loss and the next attempt.
        """
        rate = 1 / self.loss_seconds
        # With the length A of an attempt: u = -log(E exp(-rate A)), and
        # v = rate E(A exp(-rate A)) / E exp(-rate A).
        u = v = 0.0
        for times, count in parts:
            kept = np.exp(-rate * times.values)
            loss = times.mean_of(-np.expm1(-rate * times.values))
            if loss >= 1:
                return math.inf, math.inf
            u -= count * math.log1p(-loss)
            v += count * times.mean_of(rate * times.values * kept) / (1 - loss)
        success, failure = math.exp(-u), -math.expm1(-u)
        if success < 1e-150:
            return math.inf, math.inf
        # ``ended`` and ``ended_square`` are of the time to the end of an attempt, or to
        # its loss; ``lost`` is the mean of the time to a loss, as 0 without one.
        ended, late = failure / rate, failure - success * v
        lost, ended_square = late / rate, 2 * late / rate**2
        whole = (ended + failure * mean) / success
        again = 2 * lost * (mean + whole) + failure * (square + 2 * mean * whole)
        return whole, (ended_square + again) / success

    def effective_time(self, run_seconds: float) -> EffectiveTime:
        """Return the effective time of runs whose steps alone take ``run_seconds``.

        The deviation is that of the run's time, as the sum of independent intervals.
        """
        mean, deviation = self.seconds_per_save()
        useful = self.steps_per_save * self.steps.mean
        if math.isinf(mean) or not useful:
            return EffectiveTime(0.0, 0.0, math.inf)
        share, count = useful / mean, max(1.0, run_seconds / useful)
        spread = share * deviation / mean / math.sqrt(count)
        return EffectiveTime(share, spread, count * mean / self.loss_seconds)
