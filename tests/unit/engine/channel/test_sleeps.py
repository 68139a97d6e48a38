"""A rank that sleeps until all records have arrived is woken by the last record."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcstrat.engine import native
from hpcstrat.engine.channel import waiting
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.call_state import CallState
from hpcstrat.engine.channel.waiting import Waiter
from tests.unit.kernel_sums import Worker

# A sleep that nobody ends takes much longer than a thread may take here.
LONG_SECONDS, MOST_SECONDS = 120.0, 60.0


def kernels(num_ranks: int) -> list[Any]:
    """Return the kernels of a worker's ranks."""
    module = native.load()
    if module is None:
        pytest.skip("the package was built without its kernel")
    return list(Worker(module, num_ranks).kernels)


def started(action: Callable[..., Any], *args: Any) -> threading.Thread:
    """Start a thread."""
    thread = threading.Thread(target=action, args=args, daemon=True)
    thread.start()
    return thread


def asleep(action: Callable[..., Any], *args: Any) -> threading.Thread:
    """Start a thread that sleeps, and wait until it probably does."""
    thread = started(action, *args)
    time.sleep(0.05)
    assert thread.is_alive()
    return thread


def join(*threads: threading.Thread) -> None:
    """Wait for threads, which must end before a sleep that nobody ends."""
    end = time.monotonic() + MOST_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        assert not thread.is_alive()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_last_record_wakes_all_ranks_that_sleep(num_ranks: int) -> None:
    *early, last = kernels(num_ranks)
    for tick in range(5):
        sleepers = []
        for one in early:
            one.post(tick, 7, 0)
            sleepers.append(asleep(one.sleep, LONG_SECONDS))
        last.post(tick, 7, 0)
        join(*sleepers)
        assert all(one.agreed() for one in (*early, last))


def test_no_rank_sleeps_if_all_records_have_arrived() -> None:
    first, second = kernels(2)
    first.post(0, 7, 0)
    second.post(0, 8, 0)
    # The records differ, but the waits for them are over.
    join(*(started(one.sleep, LONG_SECONDS) for one in (first, second)))
    assert not first.agreed()


def test_no_wakeup_is_lost() -> None:
    first, second = kernels(2)

    def run(own: Any) -> None:
        for tick in range(3000):
            own.post(tick, 7, 0)
            while not own.agreed():
                own.sleep(LONG_SECONDS)

    join(started(run, first), started(run, second))


def test_a_sleep_ends_after_its_time() -> None:
    first, _ = kernels(2)
    first.post(0, 7, 0)
    for seconds in (0.0, 1e-4, -1.0):
        first.sleep(seconds)
    assert not first.agreed()


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_sum_wakes_the_rank_that_sleeps_in_it(size: int) -> None:
    worker = Worker(native.load() or pytest.skip("there is no kernel"), 2)
    arrays = [[np.full(size, number, np.float32)] for number in (1, 2)]
    first, second = worker.sums(arrays, 65536, "SUM", False)
    early, late = worker.kernels
    early.attention = late.attention = False

    def run(one: Any, own: Any, kernel: Any) -> None:
        found = one.reduce(own, None)
        while isinstance(found, int):
            kernel.sleep(LONG_SECONDS)
            found = one.take_results() if one.go_on(0) == 0 else 1
        assert found[0][0] == 3

    thread = asleep(run, first, arrays[0], early)
    other = started(run, second, arrays[1], late)
    join(thread, other)


class _Steps:
    """The records of a kernel, as the waiter knows them."""

    wakes, nbytes = True, 0

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.sleep = kernel, kernel.sleep

    def agreed(self) -> bool:
        """Return whether all records are equal."""
        return bool(self.kernel.agreed())

    def missing(self) -> list[int]:
        """Return rank 1 until all records are equal."""
        return [] if self.agreed() else [1]

    def dead(self) -> list[int]:
        """Return that no rank is dead."""
        return []


@pytest.mark.parametrize("shares_cores", [False, True])
def test_a_wait_for_records_ends_with_the_last_record(
    monkeypatch: pytest.MonkeyPatch, shares_cores: bool
) -> None:
    monkeypatch.setattr(waiting, "_SHORTEST_NAP_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(waiting, "_LONGEST_NAP_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(waiting, "_FIRST_NAP_SECONDS", LONG_SECONDS)
    first, second = kernels(2)
    steps: Any = _Steps(first)
    topology: Any = SimpleNamespace(
        survives=False, job_ranks=[0, 1], num_workers=1, shares_cores=shares_cores
    )
    waiter = Waiter(
        topology,
        lambda: None,
        steps,
        state=CallState(),
    )
    first.post(0, 7, 0)
    thread = asleep(waiter.wait, steps, Call("a sum", 0))
    second.post(0, 7, 0)
    join(thread)
