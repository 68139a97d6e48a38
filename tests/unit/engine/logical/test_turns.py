"""Logical replicas of a rank run in turn, in a fixed order, never concurrently."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from hpcstrat.engine.logical.turns import Turns
from hpcstrat.errors import CollectiveError, ReplicaError

NAMES = ["replica 0", "replica 1", "replica 2"]


@pytest.fixture
def told() -> list[Any]:
    return []


@pytest.fixture
def turns(told: list[Any]) -> Any:
    made = Turns(NAMES, lambda what, error: told.append((what, error)))
    yield made
    made.close()


def test_they_run_one_after_the_other_and_meet(turns: Any) -> None:
    log: list[Any] = []

    def replica(number: int) -> Any:
        log.append(("begin", number))
        found = turns.meet(number, "sum", lambda v: [sum(v)] * len(v), number + 1)
        log.append(("end", number))
        return found, turns.meet(number, "same", lambda v: v, number)

    for _ in range(2):
        log.clear()
        jobs = [lambda n=number: replica(n) for number in range(3)]
        assert turns.run(jobs) == [(6, 0), (6, 1), (6, 2)]
        steps = [("begin", n) for n in range(3)] + [("end", n) for n in range(3)]
        assert log == steps


def test_a_call_is_made_in_the_thread_of_the_run(turns: Any) -> None:
    found: list[Any] = []

    def act(values: list[Any]) -> list[Any]:
        found.append(threading.current_thread())
        return values

    turns.run([lambda n=n: turns.meet(n, "a call", act, n) for n in range(3)])
    assert found == [threading.current_thread()]


def test_other_calls_are_refused_and_told(turns: Any, told: list[Any]) -> None:
    def replica(number: int) -> None:
        turns.meet(number, "one" if number < 2 else "other", lambda v: v, None)

    with pytest.raises(CollectiveError, match="replica 2 other"):
        turns.run([lambda n=n: replica(n) for n in range(3)])
    assert [what for what, _ in told] == ["one"]
    assert turns.run([lambda: 1] * 3) == [1, 1, 1]


def test_the_first_error_is_raised_and_the_others_learn_of_it(
    turns: Any, told: list[Any]
) -> None:
    seen: list[Any] = []

    def replica(number: int) -> None:
        if number == 1:
            raise KeyError("here")
        try:
            turns.meet(number, "a call", lambda v: v, None)
        except ReplicaError as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match="here"):
        turns.run([lambda n=n: replica(n) for n in range(3)])
    assert len(seen) == 2
    assert "replica 1 had raised KeyError" in seen[0]
    assert [what for what, _ in told] == ["a call"]


def test_errors_of_the_call_are_raised_in_each_replica(turns: Any) -> None:
    caught: list[int] = []

    def act(_: list[Any]) -> list[Any]:
        raise ValueError("the call")

    def replica(number: int) -> int:
        try:
            turns.meet(number, "a call", act, None)
        except ValueError:
            caught.append(number)
        return number

    assert turns.run([lambda n=n: replica(n) for n in range(3)]) == [0, 1, 2]
    assert caught == [0, 1, 2]


def test_an_interrupt_ends_the_run_and_its_threads(turns: Any) -> None:
    before = threading.active_count()

    def replica(number: int) -> None:
        if number == 1:
            signal.raise_signal(signal.SIGINT)
            threading.Event().wait(0.2)
        turns.meet(number, "a call", lambda v: v, None)

    with pytest.raises(KeyboardInterrupt):
        turns.run([lambda n=n: replica(n) for n in range(3)])
    for thread in threading.enumerate():
        if thread.name.startswith("replica"):
            thread.join(5)
    assert threading.active_count() <= before
    assert turns.run([lambda: 7] * 3) == [7, 7, 7]


def test_calls_of_other_threads_are_refused(turns: Any) -> None:
    found: list[Any] = []

    def replica() -> None:
        def call() -> None:
            try:
                turns.meet(0, "a call", lambda v: v, None)
            except RuntimeError as error:
                found.append(str(error))

        helper = threading.Thread(target=call)
        helper.start()
        helper.join()

    turns.run([replica, lambda: None, lambda: None])
    assert "in the thread of replica 0" in found[0]
