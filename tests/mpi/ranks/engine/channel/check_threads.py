"""Calls from two threads of a rank: right one after the other, refused at once."""

from __future__ import annotations

import contextvars
import threading
import time
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import outcome

pytestmark = pytest.mark.calls


_SECONDS = 30


def _in_thread(
    name: str, function: Any, *args: Any
) -> tuple[threading.Thread, list[Any]]:
    """Start a thread in this context; return it, and a list that gets its error."""
    found: list[Any] = []
    context = contextvars.copy_context()

    def work() -> None:
        found.append(context.run(outcome, function, *args))

    thread = threading.Thread(target=work, name=name)
    thread.start()
    return thread, found


def test_calls_of_threads_one_after_the_other_are_right(
    make_strategy: Any, job: Any
) -> None:
    with make_strategy(comm=job) as strategy:
        totals: list[Any] = []

        def reduce(step: int) -> None:
            totals.append(strategy.reduce("sum", np.full(3, step + job.rank)))

        for step in range(6):
            if step % 2:
                reduce(step)
                continue
            thread, found = _in_thread(f"worker {step}", reduce, step)
            thread.join()
            assert found == [None]
        for step, total in enumerate(totals):
            right = sum(step + rank for rank in range(job.size))
            np.testing.assert_array_equal(total, np.full(3, right))


@pytest.mark.parametrize("times_before", [0, 2], ids=["first", "repeated"])
def test_calls_of_two_threads_at_once_are_an_error_that_names_both(
    make_strategy: Any, job: Any, times_before: int
) -> None:
    if job.size == 1:
        return
    strategy = make_strategy(comm=job)
    # A call that repeats an earlier one uses a faster code path.
    for _ in range(times_before):
        strategy.reduce("sum", np.ones(3))
    channel = strategy.collectives.channel
    errors: list[Any] = []
    if job.rank == 0:
        # The other ranks have not arrived, so the thread waits in its call.
        thread, errors = _in_thread("second", strategy.reduce, "sum", np.ones(3))
        end = time.monotonic() + _SECONDS
        while not channel.state.thread and time.monotonic() < end:
            time.sleep(0.001)
        errors.append(outcome(strategy.gather, np.ones(3), 0))
        thread.join()
    job.Barrier()
    # If the thread's call was posted already, its sum is right.
    first = outcome(strategy.reduce, "sum", np.ones(3))
    errors += [first] if job.rank == 0 or first is not None else []
    errors += [outcome(strategy.reduce, "sum", np.ones(3)) for _ in range(2)]
    for error in errors:
        assert isinstance(error, hs.CollectiveError), error
        for word in ("'second'", "'MainThread'", "reduce", "gather"):
            assert word in str(error), (word, error)
        assert job.rank == 0 or "on rank 0" in str(error), error
    strategy.abandon()
