"""The interval between saves: a given number of steps, or one of measured costs."""

from __future__ import annotations

import math
import time
from typing import Any, Literal, TypeAlias

from hpcstrat.engine.typing import Replicas

__all__ = [
    "Interval",
    "SaveInterval",
    "best_seconds",
    "checked_interval",
    "mean_seconds_between_losses",
]

Interval: TypeAlias = int | Literal["auto"]
"""A number of steps, or ``"auto"``."""

_MOST_SHARE = 0.01
_LEAST_STEP_SECONDS = 1e-6
_HOURS_WITHOUT_LOSS = 6 * 3600.0


def checked_interval(name: str, value: Any) -> Interval:
    """Return an interval; raise ValueError if it is not valid."""
    if value == "auto":
        return "auto"
    if type(value) is int and value > 0:
        return value
    raise ValueError(
        f"expected {name} to be a number of steps from 1 on, or 'auto', found "
        f"{value!r}; pass such as 100"
    )


def mean_seconds_between_losses(num_losses: int, seconds: float) -> float:
    """Return the estimated time between losses in a run of ``seconds`` so far.

    Without any loss, the estimate is 6 hours and more.
    """
    return (_HOURS_WITHOUT_LOSS + max(seconds, 0.0)) / (1 + max(num_losses, 0))


def best_seconds(cost_seconds: float, loss_seconds: float) -> float:
    """Return the best time between saves of this cost, at this time between losses.

    The first term is that of Young, doi.org/10.1145/361147.361115. The second limits
    the cost of saves to one percent of the time.
    """
    young = math.sqrt(2 * cost_seconds * loss_seconds)
    return max(young, cost_seconds / _MOST_SHARE)


class SaveInterval:
    """Decides, equally on all ranks, at which steps to save."""

    def __init__(self, wanted: Interval, ranks: Replicas) -> None:
        self._ranks = ranks
        self._automatic = wanted == "auto"
        # None until the time of a step was measured.
        self.steps: int | None = None if wanted == "auto" else wanted
        self._last: int | None = None
        self._ended = 0.0

    def is_due(self, step: int, cost: float, loss_seconds: float) -> bool:
        """Return whether a save is due; the same on all ranks.

        Collective over ``ranks`` in the first call after the first save with
        ``"auto"``, which chooses the interval. ``cost`` is in seconds.
        """
        last = self._last
        if last is None or step < last:
            return True
        if self.steps is None and step > last:
            self._choose(step, time.perf_counter(), cost, loss_seconds)
        return self.steps is not None and step - last >= self.steps

    def restart(self, step: int | None) -> None:
        """Count from a saved or restored step, or let the next call be due (None)."""
        self._last, self._ended = step, time.perf_counter()

    def end(self, step: int, began: float, cost: float, loss_seconds: float) -> None:
        """Note a save that began at this time.perf_counter(), and choose the interval.

        Collective over ``ranks`` with ``"auto"``.
        """
        if self._automatic and self._last is not None and step > self._last:
            self._choose(step, began, cost, loss_seconds)
        self.restart(step)

    def _choose(self, step: int, now: float, cost: float, loss_seconds: float) -> None:
        assert self._last is not None
        each = max((now - self._ended) / (step - self._last), _LEAST_STEP_SECONDS)
        wanted = max(1, math.ceil(best_seconds(cost, loss_seconds) / each))
        what = "choice of the interval between saves"
        self.steps = int(self._ranks.collectives.broadcast_object(wanted, 0, what))
