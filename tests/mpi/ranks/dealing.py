"""Helpers that list the rows of a dataset that each replica receives."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.mpi.ranks.outcomes import outcome


def rows_of(batch: Any) -> list[int]:
    """Return the row numbers of a batch, and check its columns."""
    numbers = batch["x"][:, 0]
    np.testing.assert_array_equal(batch["x"][:, 1], -numbers)
    np.testing.assert_array_equal(batch["y"][0], numbers * 0.5)
    return [int(number) for number in numbers]


def epoch_rows(strategy: Any, batches: Any, comm: Any) -> list[list[list[int]]]:
    """Return the rows of each replica, for each step of an epoch."""
    own = [rows_of(strategy.local_value(batch)) for batch in batches]
    parts = comm.allgather(own)
    assert len({len(part) for part in parts}) == 1
    return [list(step) for step in zip(*parts, strict=True)]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [row for step in steps for part in step for row in part]


def step_of(strategy: Any, iterator: Any) -> tuple[str, list[int]]:
    """Return the outcome of a step on this rank, and its rows."""
    error = outcome(lambda: step_of_rows.append(rows(strategy, next(iterator))))
    if error is None:
        return "rows", step_of_rows.pop()
    if type(error) is StopIteration and not error.args:
        return "end", []
    return f"error {error!r}", []


step_of_rows: list[list[int]] = []


def rows(strategy: Any, batch: Any) -> list[int]:
    return [int(row) for row in np.atleast_1d(strategy.local_value(batch))]


def all_steps(strategy: Any, job: Any, iterator: Any, most: int) -> list[list[Any]]:
    """Read a dataset to its end; return each step's rows or errors, for each rank."""
    steps = []
    for _ in range(most):
        parts = job.allgather(step_of(strategy, iterator))
        # All ranks fail or none, so that a program can skip the batch.
        assert len({kind.partition(" ")[0] for kind, _ in parts}) == 1, parts
        if parts[0][0] == "end":
            return steps
        failed = parts[0][0] != "rows"
        steps.append([kind if failed else own for kind, own in parts])
    raise AssertionError(steps)


def good(steps: list[list[Any]]) -> list[list[list[int]]]:
    return [step for step in steps if not isinstance(step[0], str)]


def joined(parts: list[list[int]]) -> list[int]:
    return [row for part in parts for row in part]
