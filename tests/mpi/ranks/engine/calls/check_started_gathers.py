"""Gathers that are started now and awaited later, compared with NumPy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import assert_only_one_failed, assert_usable, outcome

pytestmark = pytest.mark.algorithm

# Lengths of short and of long streams: in headers between workers, and in several
# pieces or messages.
LENGTHS = (0, 1, 7, 1000, 200_001)
DTYPES = ("?", "i2", "f4", "c16", "U3", "M8[s]", ">f8")


def value_of(rank: int, seed: int, shape: tuple[int, ...], dtype: str) -> Any:
    """Return a rank's array, which every rank can compute."""
    rng = np.random.default_rng((rank, seed))
    return rng.integers(0, 100, shape).astype(dtype)


def start(value: Any, axis: int) -> Any:
    return hs.get_replica_context().start_all_gather(value, axis)


def test_started_gathers_return_the_concatenation(strategy: Any, job: Any) -> None:
    cases = []
    for number, length in enumerate(LENGTHS):
        dtype = DTYPES[number % len(DTYPES)]
        cases.append(((length,), 0, dtype))
        cases.append(((2, length, 3), 1, DTYPES[-1 - number]))

    def step() -> list[Any]:
        # The first arrays are views that are not contiguous.
        own = [
            value_of(job.rank, seed, shape[::-1], dtype).T
            for seed, (shape, _, dtype) in enumerate(cases)
        ]
        nest = {"a": own[0], "b": [own[2], own[4]]}
        handles = [start(a, axis) for a, (_, axis, _) in zip(own, cases, strict=True)]
        total = hs.get_replica_context().start_all_reduce("sum", np.ones(3))
        nested = start(nest, 0)
        found = nested.wait()
        assert total.wait().tolist() == [job.size] * 3
        assert all(handle.test() for handle in handles)
        for result, number in ((found["a"], 0), (found["b"][1], 4)):
            np.testing.assert_array_equal(result, handles[number].wait())
        return [handle.wait() for handle in handles]

    for _ in range(3):
        found = strategy.local_value(strategy.run(step))
        for seed, (result, (shape, axis, dtype)) in enumerate(
            zip(found, cases, strict=True)
        ):
            wanted = np.concatenate(
                [value_of(r, seed, shape[::-1], dtype).T for r in range(job.size)], axis
            )
            assert result.dtype.newbyteorder("=") == wanted.dtype.newbyteorder("=")
            np.testing.assert_array_equal(result, wanted)
            assert result.flags.writeable
            assert result.flags.c_contiguous


@pytest.mark.parametrize("length", [3, 200_000])
def test_shapes_that_differ_are_an_error_with_both_shapes_and_lines(
    strategy: Any, job: Any, length: int
) -> None:
    def step() -> Any:
        own = np.ones((length + (job.rank == job.size - 1), 2), np.float32)
        handle = start(own, 0)
        return outcome(handle.wait)

    error = strategy.local_value(strategy.run(step))
    assert (type(error) is hs.CollectiveError) == (job.size > 1), repr(error)
    if job.size > 1:
        text = str(error)
        assert f"start_all_gather(axis=0) of float32[{length}, 2]" in text
        assert f"float32[{length + 1}, 2]" in text
        # The lines in which the ranks were when they learned of the difference.
        assert len(re.findall(r"\(\w+\.py:\d+\)", text)) >= 2
        assert text.endswith("(all_gather accepts different lengths)")
    assert_usable(strategy, job)


MISTAKES: list[tuple[Any, Any, Any]] = [
    (np.float64(3), 0, ValueError),
    (np.ones(2), 1, ValueError),
    (np.ones(2), "0", TypeError),
    (hs.IndexedSlices(np.ones((1, 2)), np.array([0]), (2, 2)), 0, NotImplementedError),
]


@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_a_mistake_on_one_rank_fails_on_all(
    strategy: Any, job: Any, mistake: int
) -> None:
    bad, axis, kind = MISTAKES[mistake]
    faulty = mistake % job.size
    own = (bad, axis) if job.rank == faulty else (np.ones(2), 0)
    error = strategy.local_value(
        strategy.run(lambda: outcome(lambda: start(*own).wait()))
    )
    assert_only_one_failed(error, kind, faulty, job)
    assert_usable(strategy, job)


def test_a_started_gather_meets_no_other_call(strategy: Any, job: Any) -> None:
    def step() -> Any:
        context = hs.get_replica_context()
        if job.rank == 0:
            return outcome(start(np.ones(2), 0).wait)
        return outcome(context.all_gather, np.ones(2), 0)

    error = strategy.local_value(strategy.run(step))
    assert (type(error) is hs.CollectiveError) == (job.size > 1), repr(error)
    assert "different lengths" not in str(error)
    assert_usable(strategy, job)


@pytest.mark.parametrize("each", [1, None], ids=["lonely", "one_worker"])
def test_logical_replicas_gather_equal_shapes(job: Any, each: Any) -> None:
    count = 2 * job.size + 1
    with hs.MultiWorkerMirroredStrategy(
        logical_replicas=count, replicas_per_worker=each
    ) as strategy:

        def step(differs: int) -> Any:
            context = hs.get_replica_context()
            number = context.replica_id_in_sync_group
            handle = start(np.full((2, 1 + (number == differs)), number), 1)
            return handle.wait()

        found = strategy.experimental_local_results(strategy.run(step, (-1,)))
        for result in found:
            np.testing.assert_array_equal(result, [list(range(count))] * 2)
        # Replicas 0 and 1 are on one rank; the last rank is another one, if there are
        # several.
        for differs in (0, count - 1):
            error = outcome(strategy.run, step, (differs,))
            assert isinstance(error, hs.CollectiveError), repr(error)
            for shape in ("int64[2, 1]", "int64[2, 2]"):
                assert shape in str(error)
            assert "all_gather accepts different lengths" in str(error)
