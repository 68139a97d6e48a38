"""The interval between saves."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

import hpcstrat as hs
from hpcstrat.checkpoint import interval
from hpcstrat.checkpoint.interval import (
    SaveInterval,
    best_seconds,
    mean_seconds_between_losses,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    told = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(interval, "time", told)
    return now


def test_losses_shorten_the_time_between_losses() -> None:
    hours = 3600.0
    assert mean_seconds_between_losses(0, 0.0) == 6 * hours
    assert mean_seconds_between_losses(0, 2 * hours) == 8 * hours
    assert mean_seconds_between_losses(7, 2 * hours) == hours


def test_saves_cost_one_percent_at_most() -> None:
    assert best_seconds(0.1, 3600.0) == pytest.approx(math.sqrt(720))
    # Losses are so frequent that Young's interval would cost more than one percent.
    assert best_seconds(10.0, 3600.0) == 1000.0


def test_given_interval_counts_steps() -> None:
    every = SaveInterval(10, hs.Strategy().all_ranks)
    due = [step for step in range(3, 35) if _took(every, step)]
    assert due == [3, 13, 23, 33]
    # The program went back to an earlier step.
    assert _took(every, 32)
    assert [step for step in range(33, 55) if _took(every, step)] == [42, 52]
    every.restart(None)
    assert _took(every, 0)


def _took(every: SaveInterval, step: int) -> bool:
    due = every.is_due(step, 0.0, 0.0)
    if due:
        every.end(step, 0.0, 0.0, 0.0)
    return due


def test_automatic_interval_follows_costs(clock: list[float]) -> None:
    every = SaveInterval("auto", hs.Strategy().all_ranks)
    cost, each, taken = 0.2, 0.05, []
    steps = math.ceil(math.sqrt(2 * cost * 3600.0) / each)
    for step in range(1, 2 * steps):
        clock[0] += each
        if every.is_due(step, cost, 3600.0):
            taken.append(step)
            began = clock[0]
            clock[0] += cost
            every.end(step, began, cost, 3600.0)
            ended = clock[0]
    assert taken == [1, 1 + steps]
    assert every.steps == steps
    # Steps take twice the time: at the next save, the interval is half as long.
    every.end(1 + 2 * steps, ended + steps * 2 * each, cost, 3600.0)
    assert every.steps == math.ceil(math.sqrt(2 * cost * 3600.0) / (2 * each))


def test_wrong_intervals_are_refused() -> None:
    wrong: Any
    for wrong in (0, -3, "often", 2.5, None):
        with pytest.raises(ValueError, match="expected every to be a number of steps"):
            hs.CheckpointOptions(every=wrong)
    with pytest.raises(ValueError, match="expected memory to be a number of steps"):
        hs.CheckpointOptions(memory=-1)
