"""The outcome of a call that fails, on each rank, and the strategy's use after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import hpcstrat as hs
from tests.mpi.ranks.sums import both_ways


def assert_same_bits(job: Any, *arrays: Any) -> None:
    """Compare the bytes of arrays over all ranks."""
    own = b"".join(np.asarray(array).tobytes() for array in arrays)
    assert set(job.allgather(own)) == {own}


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the exception of a call, or None."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


def assert_only_one_failed(error: Any, kind: Any, faulty: int, job: Any) -> None:
    """Demand ``kind`` on the faulty rank, and on the others that they name it."""
    if job.rank == faulty:
        assert isinstance(error, kind), repr(error)
        assert not isinstance(error, hs.CollectiveError), repr(error)
    else:
        assert isinstance(error, hs.ReplicaError), repr(error)
        assert error.ranks == (faulty,)
        assert f"rank {faulty} failed" in str(error)


def assert_usable(strategy: Any, job: Any) -> None:
    """Demand the right sum of the next reductions."""
    for total in both_ways(strategy, "sum", np.int64(job.rank + 1)):
        assert total == job.size * (job.size + 1) // 2


def assert_told(error: Any, kind: Any, guilty: bool, *words: str) -> None:
    """Demand an error of a kind where the fault is, and ReplicaError elsewhere."""
    if not guilty:
        assert isinstance(error, hs.ReplicaError), repr(error)
        return
    assert isinstance(error, kind), repr(error)
    assert not isinstance(error, hs.CollectiveError), repr(error)
    for word in words:
        assert word in str(error)


def exchanged(job: Any, check: Callable[[], None]) -> None:
    """Run a check; raise on every rank when it fails on one."""
    problem = outcome(check)
    problems = [p for p in job.allgather(problem and repr(problem)) if p]
    assert not problems, problems[0]


class BadBatch(ValueError):
    """An error of a program."""


class Planned(Exception):
    """An error of a program, of no common class."""


class WithRow(Exception):
    """An error that no text makes."""

    def __init__(self, row: int, place: str) -> None:
        super().__init__(f"row {row} at {place}")
        self.row = row


# Errors, and the class that the errors of the other ranks must have, too.
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
