"""Reduce-scatters, gathers, all-to-alls and messages, compared with NumPy."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.algorithms import move_messages, move_plan
from hpcstrat.engine.calls.moves import Moves
from tests.mpi.ranks.outcomes import (
    assert_only_one_failed,
    assert_told,
    assert_usable,
    outcome,
)

pytestmark = pytest.mark.algorithm

LENGTHS = (0, 1, 5, 1000, 300_001)


@pytest.fixture
def moves(strategy: Any) -> Moves:
    """Return the calls that move arrays between a strategy's replicas."""
    made: Moves = strategy.collectives.moves
    return made


def parts_of(job: Any, length: int, dtype: Any, seed: int = 0) -> list[np.ndarray]:
    """Return the arrays of all ranks, equal on every rank."""
    rng = np.random.default_rng(seed + length)
    return [rng.integers(0, 50, length).astype(dtype) for _ in range(job.size)]


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "i8", "c16"])
def test_reduce_scatter_is_each_replicas_part_of_the_sum(
    moves: Moves, job: Any, dtype: str
) -> None:
    for length in LENGTHS:
        every = parts_of(job, length * job.size, dtype)
        total = np.add.reduce(every)
        rows = every[job.rank].reshape(job.size, length)
        result = np.empty(length, dtype)
        before = rows.copy()
        moves.collectives.parts.reduce_scatter(np.add, list(rows), result, "scatter")
        np.testing.assert_array_equal(result, total.reshape(rows.shape)[job.rank])
        np.testing.assert_array_equal(rows, before)
        moves.collectives.parts.reduce_scatter(
            np.add, list(rows), rows[job.rank], "in place"
        )
        np.testing.assert_array_equal(rows[job.rank], result)


def test_reductions_that_were_started_before_come_first(
    moves: Moves, strategy: Any, job: Any
) -> None:
    values = np.arange(300_000.0)

    def step() -> None:
        if job.rank:
            # Rank 0 is in the next call before the other ranks start this one.
            time.sleep(0.02)
        context = hs.get_replica_context()
        started = context.start_all_reduce("sum", values + job.rank)
        parts = [np.full(50_000, float(rank)) for rank in range(job.size)]
        result = np.empty(50_000)
        moves.collectives.parts.reduce_scatter(np.add, parts, result, "scatter")
        assert (result == job.rank * job.size).all()
        total = job.size * values + sum(range(job.size))
        np.testing.assert_array_equal(started.wait(), total)

    for _ in range(4):
        strategy.run(step)


def test_parts_of_a_reduce_scatter_may_be_of_any_sizes(moves: Moves, job: Any) -> None:
    sizes = [7 * rank for rank in range(job.size)]
    parts = [np.full(n, job.rank + 1.0) for n in sizes]
    result = np.empty(sizes[job.rank])
    moves.collectives.parts.reduce_scatter(
        np.add, parts, result, "scatter", divisor=job.size
    )
    assert (result == (job.size + 1) / 2).all()


def test_half_precision_is_added_in_float32(moves: Moves, job: Any) -> None:
    # In float16, 2048 + 1 is rounded to 2048.
    own = np.full(3, 2048 if job.rank == 0 else 1, np.float16)
    result = np.empty(1, np.float16)
    parts = [own[:1].copy() for _ in range(job.size)]
    moves.collectives.parts.reduce_scatter(np.add, parts, result, "scatter")
    assert result[0] == np.float16(np.float32(2048 + job.size - 1))


@pytest.mark.parametrize("function", [np.maximum, np.minimum, np.multiply])
def test_combination_is_the_ufuncs(moves: Moves, job: Any, function: np.ufunc) -> None:
    for length in LENGTHS:
        every = parts_of(job, length, "i8")
        own = every[job.rank].copy()
        moves.collectives.parts.combine(function, own, "combine")
        np.testing.assert_array_equal(own, function.reduce(every))


def test_only_the_root_of_a_reduction_has_its_result(moves: Moves, job: Any) -> None:
    for length in LENGTHS:
        root = length % job.size
        every = parts_of(job, length, "f8")
        own = every[job.rank].copy()
        moves.collectives.parts.reduce_to(np.add, own, root, "reduce")
        expected = np.add.reduce(every) if job.rank == root else every[job.rank]
        np.testing.assert_array_equal(own, expected)


def test_gathers_broadcasts_and_scatters_fill_the_given_memory(
    moves: Moves, job: Any
) -> None:
    for length in LENGTHS:
        root, every = length % job.size, parts_of(job, length, "i4")
        whole = np.zeros((job.size, length), np.int32)
        moves.all_gather_into(every[job.rank], list(whole), "gather")
        np.testing.assert_array_equal(whole, every)
        # FSDP2 gathers like this: the input is this rank's part of the output.
        whole[...] = -1
        whole[job.rank] = every[job.rank]
        moves.all_gather_into(whole[job.rank], list(whole), "gather")
        np.testing.assert_array_equal(whole, every)
        apart = [np.zeros(length, np.int32) for _ in range(job.size)]
        moves.all_gather_into(every[job.rank], apart, "gather")
        np.testing.assert_array_equal(apart, every)
        rows = [np.zeros(length, np.int32) for _ in range(job.size)]
        into = rows if job.rank == root else None
        moves.gather_into(every[job.rank], into, root, "gather to one")
        np.testing.assert_array_equal(rows, every if into else np.zeros_like(every))
        own = every[job.rank].copy()
        moves.broadcast_into(own, root, "broadcast")
        np.testing.assert_array_equal(own, every[root])
        moves.scatter_into(every if job.rank == root else None, own, root, "scatter")
        np.testing.assert_array_equal(own, every[job.rank])


def test_all_to_all_takes_any_sizes(moves: Moves, job: Any) -> None:
    me, size = job.rank, job.size
    sends = [np.full(1 + me + 2 * r, 10 * me + r, np.int16) for r in range(size)]
    receives = [np.zeros(1 + r + 2 * me, np.int16) for r in range(size)]
    moves.all_to_all(sends, receives, "all_to_all")
    for rank, part in enumerate(receives):
        assert (part == 10 * rank + me).all()


def test_sizes_decide_what_is_sent_and_not_shapes(moves: Moves, job: Any) -> None:
    for shape in ((6,), (2, 3), (3, 2), (6,), (0,), (0, 2), (2, 0)):
        parts = [np.full(shape, 10.0 * job.rank + r) for r in range(job.size)]
        into = [np.empty(shape) for _ in range(job.size)]
        moves.all_to_all(parts, into, "all_to_all")
        for rank, array in enumerate(into):
            assert (array == 10 * rank + job.rank).all()
        moves.all_gather_into(parts[job.rank], into, "all_gather")
        for rank, array in enumerate(into):
            assert (array == 11 * rank).all()


def test_sizes_of_an_all_to_all_that_differ_are_an_error_everywhere(
    strategy: Any, moves: Moves, job: Any
) -> None:
    sends = [np.zeros(2, np.int16)] * job.size
    receives = [np.zeros(2 + (job.rank == 0), np.int16) for _ in range(job.size)]
    words = r"replica 0( \(\S+\))?, which expects 3"
    with pytest.raises(hs.CollectiveError, match=words):
        moves.all_to_all(sends, receives, "all_to_all")
    assert_usable(strategy, job)


def test_different_shapes_are_named_on_every_replica(
    strategy: Any, moves: Moves, job: Any
) -> None:
    if job.size == 1:
        return
    with pytest.raises(hs.CollectiveError, match=r"float64\[1\].*float64\[2\]"):
        moves.collectives.parts.combine(
            np.maximum, np.zeros(1 + (job.rank > 0)), "combine"
        )
    assert_usable(strategy, job)


def test_functions_that_a_type_does_not_have_are_refused(
    strategy: Any, moves: Moves, job: Any
) -> None:
    def combined(kind: str) -> list[Any]:
        array = np.ones(4, kind)
        parts = [array] * job.size
        function, what = np.bitwise_and, "and"
        return [
            outcome(moves.collectives.parts.combine, function, array.copy(), what),
            outcome(moves.collectives.parts.reduce_to, function, array.copy(), 0, what),
            outcome(
                moves.collectives.parts.reduce_scatter,
                function,
                parts,
                array.copy(),
                what,
            ),
        ]

    for error in combined("f4"):
        assert_told(error, TypeError, True, "bitwise_and", "float32")
    assert_usable(strategy, job)
    for error in combined("i4" if job.rank else "f4"):
        assert_told(error, TypeError, job.rank == 0)
    assert_usable(strategy, job)


def test_arrays_that_do_not_fit_on_one_replica_fail_on_all(
    strategy: Any, moves: Moves, job: Any
) -> None:
    result = np.zeros(1 + (job.rank == 0))
    parts = [np.zeros(1) for _ in range(job.size)]
    error = outcome(
        moves.collectives.parts.reduce_scatter, np.add, parts, result, "scatter"
    )
    assert isinstance(error, ValueError)
    assert_usable(strategy, job)


class NoRoom:
    """NumPy, without memory for new arrays."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, shape: Any, dtype: Any = float) -> Any:
        if shape == 0:
            return np.empty(0, dtype)
        raise MemoryError("no room for the messages")


@pytest.mark.parametrize(
    "name", ["all_gather", "broadcast", "gather", "scatter", "all_to_all", "exchange"]
)
def test_a_rank_without_memory_for_messages_between_workers_fails_before_them(
    moves: Moves, job: Any, monkeypatch: Any, name: str
) -> None:
    topology = None if job.size == 1 else moves.collectives.channel.topology
    if topology is None or topology.num_workers == 1:
        return
    root, size, rank = 0, job.size, job.rank
    after, before = (rank + 1) % size, (rank - 1) % size
    every = [np.full(100_000, float(number)) for number in range(size)]
    own, into = every[rank], [np.empty(100_000) for _ in range(size)]
    # Each call, and the ranks whose values arrive in the first arrays of ``into``.
    calls: dict[str, tuple[Any, Any]] = {
        "all_gather": (lambda: moves.all_gather_into(own, into, name), range(size)),
        "gather": (lambda: moves.gather_into(own, into, root, name), range(size)),
        "scatter": (lambda: moves.scatter_into(every, into[0], root, name), [rank]),
        "all_to_all": (
            lambda: moves.all_to_all([own] * size, into, name),
            range(size),
        ),
        "exchange": (
            lambda: moves.exchange({after: own}, {before: into[0]}, name),
            [before],
        ),
        "broadcast": (
            lambda: moves.broadcast_into(every[0] if not rank else into[0], root, name),
            [root],
        ),
    }
    (call, values), receives = calls[name], name != "gather" or rank == root
    # Without the kernel, a root must put the parts of a scatter side by side, and each
    # rank those of an all-to-all, if there are several. A gather needs memory if its
    # results are not adjacent and MPI passes on what it has received. All other
    # messages arrive in the results.
    faulty = root if name == "scatter" else size - 1
    several = topology.num_workers < size
    python = several or moves.collectives.channel.wire.kernel is None
    copied = python and size > 2 and name in ("scatter", "all_to_all")
    allocates = copied or (several and name == "all_gather")

    def check() -> None:
        call()
        if receives and (rank != root or name != "broadcast"):
            for array, value in zip(into, values, strict=False):
                np.testing.assert_array_equal(array, value)

    for _ in range(2):
        check()
        with monkeypatch.context() as patch:
            if rank == faulty:
                patch.setattr(move_plan, "np", NoRoom())
                patch.setattr(move_messages, "np", NoRoom())
            error = outcome(call)
        if allocates:
            assert_only_one_failed(error, MemoryError, faulty, job)
        else:
            assert error is None, repr(error)
    check()
