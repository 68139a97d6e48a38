"""The time for which a rank polls before it sleeps."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from hpcstrat.engine.channel import waiting
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.call_state import CallState
from hpcstrat.engine.channel.waiting import Spin, Waiter

MOST, LEAST = waiting._MOST_SPIN_SECONDS, waiting._LEAST_SPIN_SECONDS


def test_spins_grow_shorter_where_they_do_not_help() -> None:
    spin = Spin()
    assert spin.seconds == MOST
    for _ in range(20):
        before = spin.seconds
        spin.learn(0.01)
        assert spin.seconds == max(before / 2, LEAST)
    assert spin.seconds == LEAST


def test_spins_grow_longer_where_they_would_have_helped() -> None:
    spin = Spin()
    spin.seconds = LEAST
    for _ in range(10):
        spin.learn(0.9 * MOST)
    assert spin.seconds == MOST


class _Awaited:
    """Other ranks that arrive after some time; each poll advances the clock."""

    nbytes = 0

    def __init__(self, clock: list[float], comes: float) -> None:
        self.clock, self.comes, self.looks = clock, clock[0] + comes, 0

    def agreed(self) -> bool:
        self.looks += 1
        self.clock[0] += 1e-6
        return self.clock[0] >= self.comes

    def missing(self) -> list[int]:
        return [] if self.agreed() else [1]


class _Nobody:
    wakes = False

    def dead(self) -> list[int]:
        """Return that no rank is dead."""
        return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]

    def sleep(seconds: float) -> None:
        # A sleep lasts somewhat longer than requested.
        now[0] += seconds + 5e-5

    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(waiting.time, "sleep", sleep)
    return now


class _Records(_Awaited):
    """Records of other ranks, whose arrival ends a sleep."""

    wakes = True

    def __init__(self, clock: list[float], comes: float) -> None:
        super().__init__(clock, comes)
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        """Sleep until the ranks arrive."""
        self.sleeps.append(seconds)
        self.clock[0] = max(self.clock[0], self.comes)

    def dead(self) -> list[int]:
        """Return that no rank is dead."""
        return []


def _waiter(steps: Any = None, *, shares_cores: bool = False) -> Waiter:
    topology: Any = SimpleNamespace(
        survives=False,
        job_ranks=[0, 1],
        num_workers=1,
        shares_cores=shares_cores,
    )
    steps = steps or _Nobody()
    return Waiter(
        topology,
        lambda: None,
        steps,
        state=CallState(),
    )


def test_a_rank_that_waits_long_soon_leaves_its_core_to_others(
    clock: list[float],
) -> None:
    waiter, looks = _waiter(), []
    for _ in range(12):
        awaited = _Awaited(clock, 0.01)
        assert waiter.wait(awaited, None)  # type: ignore[arg-type]
        looks.append(awaited.looks)
    assert looks[0] > 900
    assert looks[-1] < looks[0] / 5
    assert all(later <= former for former, later in itertools.pairwise(looks))


def test_a_rank_whose_waits_are_short_does_not_nap(clock: list[float]) -> None:
    waiter = _waiter()
    waiter._spin.seconds = LEAST
    for _ in range(8):
        assert waiter.wait(_Awaited(clock, 5e-4), None)  # type: ignore[arg-type]
    awaited, start = _Awaited(clock, 5e-4), clock[0]
    assert waiter.wait(awaited, None)  # type: ignore[arg-type]
    # The wait ended within 2 us, so that no sleep has lengthened it.
    assert clock[0] - start < 5.02e-4


@pytest.mark.parametrize(("comes", "num_sleeps"), [(3e-5, 0), (3e-4, 1)])
def test_a_rank_that_shares_its_core_offers_it_before_it_sleeps(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, comes: float, num_sleeps: int
) -> None:
    offers: list[int] = []
    monkeypatch.setattr(waiting.os, "sched_yield", lambda: offers.append(1))
    records = _Records(clock, comes)
    waiter = _waiter(records, shares_cores=True)
    assert waiter.wait(records, None)  # type: ignore[arg-type]
    assert len(records.sleeps) == num_sleeps
    assert len(offers) > 20
    # The kernel does the same before it returns.
    state: Any = waiter._state
    assert state.yields
    assert state.looks > 20


def test_no_nap_holds_up_values_on_a_wire(clock: list[float]) -> None:
    waiter, call = _waiter(), Call("a sum", 0, nbytes=256 << 10)
    waiter._spin.seconds, waiter._on_wire = LEAST, True
    # The data take so long at 1 Gbit/s, and even a short sleep would end late.
    awaited, start = _Awaited(clock, 2.09e-3), clock[0]
    assert waiter.wait(awaited, call)
    assert clock[0] - start < 2.1e-3
    assert waiter._spin.seconds == LEAST


def test_a_nap_makes_a_wait_little_longer(clock: list[float]) -> None:
    for seconds in (0.01, 0.02):
        waiter, start = _waiter(), clock[0]
        assert waiter.wait(_Awaited(clock, seconds), None)  # type: ignore[arg-type]
        assert clock[0] - start < 1.05 * seconds
