"""MAX, MIN, ALL and ANY have the bits of one process on all ranks, in all ways."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.effort import seeds
from tests.mpi.ranks.outcomes import (
    assert_only_one_failed,
    assert_same_bits,
    assert_usable,
    exchanged,
    outcome,
)
from tests.mpi.ranks.sums import all_reduce, both_ways
from tests.unit.kernel_sums import ORDERED, drawn, extreme

# One and two ranks have algorithms of their own.
pytestmark = [pytest.mark.rule, pytest.mark.algorithm]


def _trees(shared: Any, size: int) -> list[list[Any]]:
    """Return each replica's arrays of random types and shapes."""
    kinds = []
    for _ in range(int(shared.integers(1, 5))):
        most = 70_000 if shared.random() < 0.2 else 200
        shape = [(), (int(shared.integers(most)),), (3, 0), (4, 5)]
        kinds.append(
            (ORDERED[shared.integers(len(ORDERED))], shape[shared.integers(4)])
        )
    draw = random.Random(int(shared.integers(1 << 30)))
    return [
        [
            drawn(draw, dtype, int(np.prod(shape))).reshape(shape)
            for dtype, shape in kinds
        ]
        for _ in range(size)
    ]


def _check(job: Any, found: Any, columns: Any, op: str) -> None:
    def compare() -> None:
        for one, terms in zip(found, columns, strict=True):
            # A single value is returned unchanged, a NaN's payload included.
            right = extreme(terms, op.upper()) if len(terms) > 1 else terms[0]
            assert (one.dtype, one.shape) == (right.dtype, right.shape)
            assert np.asarray(one).tobytes() == right.tobytes(), (op, right.dtype)

    exchanged(job, compare)
    assert_same_bits(job, *found)


@pytest.mark.parametrize("native", [True, False], ids=["kernel", "numpy"])
@pytest.mark.parametrize("seed", seeds(6))
def test_extremes_have_the_bits_of_one_process(
    make_strategy: Any, job: Any, seed: int, native: bool
) -> None:
    shared = np.random.default_rng(seed)
    with make_strategy(comm=job, settings=hs.Settings(native=native)) as strategy:
        for number in range(8):
            op = ["max", "min"][shared.integers(2)]
            trees = _trees(shared, job.size)
            own, columns = trees[job.rank], list(zip(*trees, strict=True))
            nest = {"first": own[0], "others": own[1:]}

            def start(op: Any = op, own: Any = own) -> Any:
                return hs.get_replica_context().start_all_reduce(op, own).wait()

            out = [np.empty_like(array) for array in own]
            pack = hs.CommunicationOptions(bytes_per_pack=4096)
            if number % 4 == 0:
                found = strategy.reduce(hs.ReduceOp.parse(op), own, out=out)
                assert found is out
            elif number % 4 == 1:
                found = strategy.local_value(strategy.run(start))
            elif number % 4 == 2:
                found = all_reduce(strategy, op, own, pack)
            else:
                tree = strategy.reduce(op, nest)
                found = [tree["first"], *tree["others"]]
            _check(job, found, columns, op)
            _check(job, strategy.reduce(op, own, out=own), columns, op)


@pytest.mark.once
@pytest.mark.parametrize("more", [0, 2])
def test_logical_replicas_have_the_bits_of_one_process(job: Any, more: int) -> None:
    shared, count = np.random.default_rng(5), job.size + more
    with hs.MultiWorkerMirroredStrategy(
        comm=job, logical_replicas=count, replicas_per_worker=2
    ) as strategy:
        for op in ("max", "min"):
            trees = _trees(shared, count)

            def step(op: Any = op, trees: Any = trees) -> Any:
                context = hs.get_replica_context()
                return context.all_reduce(op, trees[context.replica_id_in_sync_group])

            found = strategy.experimental_local_results(strategy.run(step))
            # Ranks may have different numbers of replicas, whose results are equal.
            columns = list(zip(*trees, strict=True))
            _check(job, found[0], columns, op)
            for one in found[1:]:
                assert [a.tobytes() for a in one] == [a.tobytes() for a in found[0]]
        flags = strategy.run(
            lambda: hs.get_replica_context().replica_id_in_sync_group == 0
        )
        assert strategy.reduce("any", flags)
        assert strategy.reduce("all", flags) == (count == 1)


def test_booleans_have_all_and_any(strategy: Any, job: Any) -> None:
    for length in (3, 9_000):
        own = np.arange(length) % (job.size + 1) == job.rank
        every = [np.arange(length) % (job.size + 1) == n for n in range(job.size)]
        for op, function in (("all", np.logical_and), ("ANY", np.logical_or)):
            for found in both_ways(strategy, op, own):
                assert found.dtype == bool
                np.testing.assert_array_equal(found, function.reduce(every))
        np.testing.assert_array_equal(strategy.reduce("max", own), np.any(every, 0))
    assert strategy.reduce("all", True) is not None
    assert strategy.reduce("any", job.rank == 0)
    assert strategy.reduce("all", job.rank == 0) == (job.size == 1)


def test_rows_may_differ_between_replicas_along_an_axis(
    strategy: Any, job: Any
) -> None:
    # Replica 0 has no rows, if there is another replica.
    rows = np.arange(job.size * 6.0).reshape(-1, 3)[: 2 * job.size]
    rank = job.rank if job.size > 1 else 1
    own = rows[: 2 * rank]
    last = rows[: 2 * max(1, job.size - 1)]
    for op, wanted in (("max", last.max(0)), ("min", last.min(0))):
        np.testing.assert_array_equal(strategy.reduce(op, own, axis=0), wanted)
        whole = strategy.reduce(op, own, axis=(0, 1))
        assert whole == getattr(wanted, op)()
    assert strategy.reduce("any", own[:0] > 0, axis=0).tolist() == [False] * 3
    assert strategy.reduce("max", own[:0], axis=0).tolist() == [-np.inf] * 3
    counts = np.zeros((0,), np.int16)
    assert strategy.reduce("min", counts, axis=0) == np.iinfo(np.int16).max


def test_values_without_an_order_are_refused_on_all_ranks(
    strategy: Any, job: Any
) -> None:
    slices = hs.IndexedSlices(np.ones((1, 2)), np.zeros(1, np.int64), (3, 2))
    for op, value, words in (
        ("max", np.ones(2, complex), r"MAX, found dtype complex128; .*absolute"),
        ("min", np.ones(2, np.longdouble), "at most 8 bytes for MIN"),
        ("all", np.ones(2), "booleans for ALL, found dtype float64"),
        ("sum", np.ones(2, bool), "found dtype bool; reduce it by ALL or ANY"),
        ("max", slices, "SUM or MEAN of IndexedSlices"),
        ("largest", np.ones(2), "SUM, MEAN, MAX, MIN, ALL, ANY, found 'largest'"),
    ):
        with pytest.raises(ValueError, match=words):
            strategy.reduce(op, value)
        assert_usable(strategy, job)
    faulty = job.size - 1
    value = np.ones(2, complex if job.rank == faulty else float)
    error = outcome(strategy.reduce, "max", value)
    assert_only_one_failed(error, ValueError, faulty, job)
    assert_usable(strategy, job)


def test_ranks_with_different_operations_are_told(strategy: Any, job: Any) -> None:
    if job.size == 1:
        return
    error = outcome(strategy.reduce, "min" if job.rank else "max", np.ones(3))
    assert isinstance(error, hs.CollectiveError)
    assert "MAX" in str(error)
    assert "MIN" in str(error)
    assert_usable(strategy, job)


def test_other_calls_take_the_operations(strategy: Any, job: Any) -> None:
    with strategy.scope():
        variable = hs.Variable(np.zeros(2), name="x")
        one, two = np.full(2, job.rank + 1.0), np.full(3, -job.rank)
        extended = strategy.extended
        found = strategy.local_value(extended.reduce_to("max", one, variable))
        np.testing.assert_array_equal(found, [job.size] * 2)
        pairs = [(one, variable), (two, "CPU:0")]
        first, second = map(
            strategy.local_value, extended.batch_reduce_to("min", pairs)
        )
        np.testing.assert_array_equal(first, [1, 1])
        np.testing.assert_array_equal(second, [1 - job.size] * 3)
    ops = hs.ReductionToOneDevice(accumulation_fn=sum)
    with strategy.scope():
        error = outcome(ops.reduce, "max", one, variable)
    assert isinstance(error, ValueError) == (job.size > 1)
    assert_usable(strategy, job)
