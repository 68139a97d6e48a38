"""Equal inputs of the first steps on all ranks are warned about, once; others never."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.safety.divergence import equal_inputs

# Workers of one rank compare nothing; uneven workers compare the ranks of the first.
pytestmark = pytest.mark.rule

_ROWS, _COLUMNS = 8, 4
# Above _MOST_BYTES, here 64 KiB, only some rows are hashed.
_MANY = 300


def drawn(*seed: int) -> Any:
    return np.random.default_rng(seed).random((_ROWS, _COLUMNS))


# The arguments of `run` on a rank in a step, and whether they are a mistake.
PROGRAMS: dict[str, tuple[Callable[[int, int], Any], bool]] = {
    "a batch": (lambda rank, step: (drawn(step),), True),
    "a batch and labels": (lambda rank, step: (drawn(step), np.arange(_ROWS)), True),
    "a batch with a grid": (
        lambda rank, step: ({"x": drawn(step), "g": drawn()},),
        True,
    ),
    "a batch with a number": (lambda rank, step: (drawn(step), 0.1), True),
    "integers": (lambda rank, step: (drawn(step).view(np.int64),), True),
    "strided": (lambda rank, step: (drawn(step)[:, ::2],), True),
    "large batches": (lambda rank, step: (np.tile(drawn(step), (_MANY, 1)),), True),
    "own batches": (lambda rank, step: (drawn(rank, step),), False),
    "own labels": (lambda rank, step: (drawn(step), np.arange(_ROWS) + rank), False),
    "own in the last step": (
        lambda rank, step: (drawn(step, rank * (step == 2)),),
        False,
    ),
    "the rank as a number": (lambda rank, step: (drawn(step), rank), False),
    "constants": (lambda rank, step: (np.full((_ROWS, _COLUMNS), step),), False),
    "configuration": (lambda rank, step: (drawn(), step), False),
    "one row": (lambda rank, step: (drawn(step).reshape(1, -1),), False),
    "a key": (lambda rank, step: (np.array([0, step], np.uint32),), False),
    "numbers": (lambda rank, step: (step, 0.5, "text", None), False),
    "distributed": (
        lambda rank, step: (hs.PerReplica(drawn(step)), drawn(step)),
        False,
    ),
    "mirrored": (lambda rank, step: (hs.Mirrored(drawn(step)),), False),
    "objects": (lambda rank, step: (drawn(step).astype(object), drawn(step)), False),
}


@pytest.fixture
def made(make_strategy: Any, job: Any) -> Iterator[Any]:
    """Yield a strategy of its own connection, which has compared no inputs yet."""
    strategy = make_strategy(comm=job)
    yield strategy
    strategy.close()


def warnings(caplog: Any) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "hpcstrat.inputs" and record.levelno >= logging.WARNING
    ]


def with_variable(strategy: Any) -> None:
    with strategy.scope():
        strategy.weights = hs.Variable(np.zeros(_COLUMNS), name="weights")


def context() -> Any:
    return hs.get_replica_context()


def summed(*args: Any) -> Any:
    return context().all_reduce("sum", np.float64(1))


def is_warned(strategy: Any) -> bool:
    """Return whether replica 0 can see the inputs of another rank."""
    return bool(strategy.replica_id == 0 and strategy.topology.worker_comm.size > 1)


# These differ from other programs in the array only.
_FULL = "a batch", "integers", "strided", "own labels", "one row", "numbers", "objects"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in _FULL else ())
        for name in PROGRAMS
    ],
)
def test_equal_batches_of_three_steps_are_warned_about_once(
    made: Any, job: Any, caplog: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equal_inputs, "_MOST_BYTES", 64 << 10)
    arguments, is_mistake = PROGRAMS[name]
    with_variable(made)
    for step in range(6):
        made.run(summed, args=arguments(job.rank, step))
        if step < 2:
            assert not warnings(caplog)
    found = warnings(caplog)
    assert len(found) == (is_mistake and is_warned(made))
    if found:
        assert "arguments of run were bitwise equal on all 2 ranks" in found[0]
        assert "strategy.rows" in found[0]


def test_a_program_that_chooses_its_rows_is_not_warned(made: Any, caplog: Any) -> None:
    def own_row(batch: Any) -> Any:
        return batch[context().replica_id_in_sync_group % _ROWS]

    with_variable(made)
    for step in range(5):
        made.run(own_row, args=(drawn(step),))
    assert not warnings(caplog)


def test_a_program_that_asks_for_its_rows_is_not_warned(made: Any, caplog: Any) -> None:
    with_variable(made)
    for step in range(5):
        made.run(lambda batch: batch[made.rows(len(batch))], args=(drawn(step),))
    assert not warnings(caplog)


def test_parameters_in_plain_arrays_are_no_batches(made: Any, caplog: Any) -> None:
    for step in range(5):
        made.run(summed, args=(drawn(step),))
    assert not warnings(caplog)


def test_ranks_with_other_numbers_of_arrays_neither_wait_nor_warn(
    made: Any, job: Any, caplog: Any
) -> None:
    with_variable(made)
    for step in range(120):
        # Only rank 0 passes arrays, so that the other ranks write no record.
        args = (drawn(step),) if job.rank == 0 else (None,)
        made.run(lambda batch: None, args=args)
    made.barrier()
    assert not warnings(caplog)
    assert made.run_inputs is None


def test_steps_without_a_call_are_compared_at_the_end(
    make_strategy: Any, job: Any, caplog: Any
) -> None:
    with make_strategy(comm=job) as strategy:
        with_variable(strategy)
        for step in range(3):
            strategy.run(lambda batch: None, args=(drawn(step),))
        expected = is_warned(strategy)
    assert len(warnings(caplog)) == expected
