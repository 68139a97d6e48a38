"""Helpers that return and compare the errors of calls on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import hpcstrat as hs
from tests.mpi.ranks.sums import both_ways


def assert_same_bits(job: Any, *arrays: Any) -> None:
    """Assert that the bytes of arrays are equal on all ranks."""
    own = b"".join(np.asarray(array).tobytes() for array in arrays)
    assert set(job.allgather(own)) == {own}


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the exception that a call raises, or None."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


def assert_only_one_failed(error: Any, kind: Any, faulty: int, job: Any) -> None:
    """Assert ``kind`` on the faulty rank, and on other ranks an error that names it."""
    if job.rank == faulty:
        assert isinstance(error, kind), repr(error)
        assert not isinstance(error, hs.CollectiveError), repr(error)
    else:
        assert isinstance(error, hs.ReplicaError), repr(error)
        assert error.ranks == (faulty,)
        assert f"rank {faulty} failed" in str(error)


def assert_usable(strategy: Any, job: Any) -> None:
    """Assert that the next reductions return the right sum."""
    for total in both_ways(strategy, "sum", np.int64(job.rank + 1)):
        assert total == job.size * (job.size + 1) // 2


def assert_told(error: Any, kind: Any, guilty: bool, *words: str) -> None:
    """Assert an error of a kind on the guilty rank, and ReplicaError elsewhere."""
    if not guilty:
        assert isinstance(error, hs.ReplicaError), repr(error)
        return
    assert isinstance(error, kind), repr(error)
    assert not isinstance(error, hs.CollectiveError), repr(error)
    for word in words:
        assert word in str(error)


def exchanged(job: Any, check: Callable[[], None]) -> None:
    """Run a check; if it fails on one rank, raise on every rank."""
    problem = outcome(check)
    problems = [p for p in job.allgather(problem and repr(problem)) if p]
    assert not problems, problems[0]


class BadBatch(ValueError):
    """An error of a program that is a ValueError."""


class Planned(Exception):
    """An error of a program that shares no base class with other errors."""


class WithRow(Exception):
    """An error whose constructor needs more than a text."""

    def __init__(self, row: int, place: str) -> None:
        super().__init__(f"row {row} at {place}")
        self.row = row


# Constructors of errors, and the class that the other ranks' errors must have, too.
ERRORS: list[tuple[Callable[[], Exception], Any]] = [
    (lambda: ValueError("v"), ValueError),
    (lambda: KeyError("k"), KeyError),
    (lambda: OSError(5, "disk"), OSError),
    (lambda: ConnectionResetError(104, "reset"), OSError),
    (lambda: ZeroDivisionError("z"), ZeroDivisionError),
    (lambda: FloatingPointError("nan"), FloatingPointError),
    (lambda: RuntimeError("r"), RuntimeError),
    (MemoryError, MemoryError),
    (lambda: np.linalg.LinAlgError("singular"), np.linalg.LinAlgError),
    (lambda: np.exceptions.AxisError("axis"), ValueError),
    (lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "u"), ValueError),
    (lambda: BadBatch("b"), BadBatch),
    (lambda: Planned("p"), Planned),
    (lambda: WithRow(3, "here"), hs.ReplicaError),
    (lambda: StopIteration(3), hs.ReplicaError),
    (lambda: ExceptionGroup("g", [ValueError("v")]), hs.ReplicaError),
]
