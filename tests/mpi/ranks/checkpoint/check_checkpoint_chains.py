"""Checkpoints of N replicas, restored and saved by M, and restored by K.

The tests check that no value is lost. Jobs of other sizes are strategies over the first
ranks of this job.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import hpcstrat as hs
from tests.mpi.ranks.effort import SHORT
from tests.mpi.ranks.saved import fill, make_variable

pytestmark = pytest.mark.once


INTEGERS = ("int8", "uint8", "int32", "int64", "uint64")
FLOATS = ("float32", "float64", "complex128")
# A variable is drawn as its kind, type and shape.
SHAPES = st.sampled_from([(), (1,), (7,), (0, 3), (2, 5), (3, 1, 4)])
ONES = st.tuples(
    st.sampled_from(("mirrored", "only_first_replica", "none")),
    st.sampled_from((*INTEGERS, *FLOATS, "bool", "float16")),
    SHAPES,
)
SUMS = st.tuples(st.just("sum"), st.sampled_from((*INTEGERS, *FLOATS)), SHAPES)
MEANS = st.tuples(st.just("mean"), st.sampled_from(FLOATS[:2]), SHAPES)
ALWAYS = (("none", "float64", (3,)), ("sum", "int64", (2,)), ("mean", "float64", ()))
EXAMPLES = settings(
    max_examples=6 if SHORT else 12,
    deadline=None,
    derandomize=True,
    # Hypothesis must not shrink examples, because each rank would shrink in its own
    # way.
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
# The sizes of three jobs in a row. Sizes above the size of this job wrap around.
SIZES = st.tuples(*[st.integers(1, 4)] * 3)


def _sizes(sizes: tuple[int, ...], job: Any) -> list[int]:
    return [(size - 1) % job.size + 1 for size in sizes]


def _parts(what: tuple[str, str, Any], count: int, seed: int) -> Any:
    """Return a value for each replica; the sum of the values does not overflow."""
    kind, name, shape = what
    draw, dtype = np.random.default_rng(seed), np.dtype(name)
    rows = 1 if kind in ("mirrored",) else count
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        low, high = info.min // 4, info.max // 4
        found = draw.integers(low, high, (rows, *shape), dtype, endpoint=True)
    elif dtype.kind == "b":
        found = draw.integers(0, 2, (rows, *shape)).astype(bool)
    else:
        found = draw.standard_normal((rows, *shape)) * 10.0 ** draw.integers(-3, 4)
        found = (found * (1 + 2j) if dtype.kind == "c" else found).astype(dtype)
    return np.broadcast_to(found, (count, *shape))


def _restored(kind: str, rows: Any, total: Any, count: int, policy: str) -> Any:
    """Return the value that each of ``count`` replicas must restore."""
    if kind == "none":
        saved = len(rows)
        if saved == count:
            return rows
        return np.stack(
            [rows[r % saved if policy == "cycle" else 0] for r in range(count)]
        )
    if kind != "sum":
        return np.stack([total] * count)
    if total.dtype.kind in "iu":
        # Compute in Python integers, because NumPy's narrow integers could overflow.
        whole = total.astype(object)
        shares = [whole // count + (r < whole % count) for r in range(count)]
        return np.stack([np.asarray(s, object).astype(total.dtype) for s in shares])
    return np.stack([(total / count).astype(total.dtype)] * count)


def _logical(kind: str, rows: Any) -> Any:
    """Return the value of a variable, computed by NumPy in one process."""
    if kind in ("mirrored", "only_first_replica"):
        return rows[0]
    if kind == "mean":
        return rows.mean(axis=0)
    return rows.sum(axis=0, dtype=rows.dtype)


def _same(one: Any, other: Any, about: object) -> None:
    assert one.dtype == other.dtype, about
    assert one.shape == other.shape, about
    assert one.tobytes() == other.tobytes(), about


@given(
    sizes=SIZES,
    wanted=st.lists(st.one_of(ONES, SUMS, MEANS), min_size=1, max_size=6),
    policy=st.sampled_from(["first", "cycle"]),
    seed=st.integers(0, 99),
)
@EXAMPLES
def test_values_survive_chains_of_other_numbers_of_replicas(
    sizes: tuple[int, ...],
    wanted: list[Any],
    policy: str,
    seed: int,
    strategies: dict[int, Any],
    folder: Path,
    job: Any,
) -> None:
    counts, place = _sizes(sizes, job), folder / "chain"
    wanted = [*wanted, *ALWAYS]
    rows = [_parts(what, counts[0], seed + k) for k, what in enumerate(wanted)]
    for hop, count in enumerate(counts):
        totals, wrong = None, []
        if (strategy := strategies.get(count)) is not None:
            totals, wrong = _visit(strategy, place, hop, wanted, rows, policy)
        # All ranks fail together, so that Hypothesis repeats the example on all ranks.
        assert not any(job.allgather(wrong)), (counts, hop)
        # Replica 0 knows the totals, because it is in every strategy.
        totals = job.bcast(totals)
        if hop + 1 < len(counts):
            for k, what in enumerate(wanted):
                rows[k] = _next(what, rows[k], totals[k], counts[hop + 1], policy)
    job.Barrier()
    if job.rank == 0:
        shutil.rmtree(place)
    job.Barrier()


def _visit(
    strategy: Any, place: Path, hop: int, wanted: list[Any], rows: Any, policy: str
) -> tuple[list[Any], list[Any]]:
    """Fill or restore variables, and save; return their values and the differences."""
    wrong = []
    with strategy.scope():
        made = [
            make_variable(kind, np.ones(shape, name), f"v{k}")
            for k, (kind, name, shape) in enumerate(wanted)
        ]
    manager = hs.CheckpointManager(place, v=made)
    if hop:
        assert manager.restore(per_replica=policy) == hop - 1
    for one, parts, what in zip(made, rows, wanted, strict=True):
        if hop == 0:
            fill(one, parts[strategy.replica_id])
        own = parts[strategy.replica_id]
        if one.component.tobytes() != own.tobytes():
            wrong.append((what, one.component, own))
    manager.save(hop, overwrite=True)
    with strategy.scope():
        totals = [
            None if what[0] == "none" else np.asarray(one.numpy())
            for one, what in zip(made, wanted, strict=True)
        ]
    return totals, wrong


def _next(what: Any, rows: Any, total: Any, count: int, policy: str) -> Any:
    """Check the value of a variable, and return the values to restore next."""
    kind, name, _ = what
    if kind != "none":
        logical = _logical(kind, rows)
        if kind in ("sum", "mean") and np.dtype(name).kind not in "iu":
            scale = np.abs(rows).sum(axis=0).max(initial=0) + 1
            tolerance = 16 * np.finfo(name).eps * scale
            np.testing.assert_allclose(total, logical, rtol=0, atol=tolerance)
        else:
            _same(total, np.asarray(logical), what)
    return _restored(kind, rows, total, count, policy)


@given(sizes=SIZES, seed=st.integers(0, 99))
@EXAMPLES
def test_integer_totals_survive_chains_exactly(
    sizes: tuple[int, ...],
    seed: int,
    strategies: dict[int, Any],
    folder: Path,
    job: Any,
) -> None:
    counts, draw = _sizes(sizes, job), np.random.default_rng(seed)
    first = draw.integers(-(2**60), 2**60, (counts[0], 9))
    wanted = first.sum(axis=0)
    for hop, count in enumerate(counts):
        if (strategy := strategies.get(count)) is not None:
            with strategy.scope():
                x = make_variable("sum", np.zeros(9, np.int64))
            manager = hs.CheckpointManager(folder, x=x)
            if hop:
                manager.restore()
            else:
                fill(x, first[strategy.replica_id])
            # A value added between two saves counts once, whichever replica adds it.
            if strategy.replica_id == count - 1:
                x.component[...] += hop
            manager.save(hop, overwrite=True)
            with strategy.scope():
                np.testing.assert_array_equal(x.numpy(), wanted + hop * (hop + 1) // 2)
        job.Barrier()


@given(
    sizes=SIZES,
    num_rows=st.integers(5, 40),
    batch=st.integers(4, 9),
    shuffle=st.booleans(),
    steps=st.tuples(*[st.integers(0, 3)] * 2),
)
@EXAMPLES
def test_rows_of_a_data_set_are_seen_once_over_chains(
    sizes: tuple[int, ...],
    num_rows: int,
    batch: int,
    shuffle: bool,
    steps: tuple[int, ...],
    strategies: dict[int, Any],
    folder: Path,
    job: Any,
) -> None:
    counts = _sizes(sizes, job)
    epochs: list[list[int]] = [[], []]
    for hop, count in enumerate(counts):
        seen: list[tuple[int, list[int]]] = []
        if (strategy := strategies.get(count)) is not None:
            dataset = hs.Dataset(np.arange(num_rows), batch, shuffle=shuffle, seed=9)
            data = strategy.experimental_distribute_dataset(dataset)
            with strategy.scope():
                x = hs.Variable(1.0)
            manager = hs.CheckpointManager(folder, x=x, data=data)
            if hop:
                manager.restore()
            # The last job reads to the end of the second epoch.
            left = steps[hop] if hop < len(steps) else num_rows
            while left and data.epoch < len(epochs):
                epoch = data.epoch
                for rows in itertools.islice(data, left):
                    seen.append((epoch, strategy.gather(rows, axis=0).tolist()))
                    left -= 1
            manager.save(hop, overwrite=True)
        # Replica 0 knows all rows, because it is in every strategy.
        for epoch, ids in job.bcast(seen):
            epochs[epoch] += ids
    for ids in epochs:
        assert sorted(ids) == list(range(num_rows)), counts


@pytest.mark.parametrize(
    "hops", [(1, 2, 4), (4, 2, 1), (3, 4, 3), (4, 1, 4), (2, 2, 3), (2, 4, 2)]
)
def test_streams_of_random_numbers_go_on_or_are_new(
    hops: tuple[int, ...], strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    counts = _sizes(hops, job)
    expected: list[bytes] = []
    everything: list[bytes] = []
    shared = b""
    for hop, count in enumerate(counts):
        drawn: tuple[bytes, ...] | None = None
        if (strategy := strategies.get(count)) is not None:
            noise = strategy.random("noise", seed=3)
            with strategy.scope():
                x = hs.Variable(1.0)
            manager = hs.CheckpointManager(folder, x=x, noise=noise)
            if hop:
                manager.restore()
            first = noise.generator.random(4).tobytes()
            common = noise.shared.random(4).tobytes()
            manager.save(hop, overwrite=True)
            # The numbers that this job would draw next are the first of the next job.
            following = noise.generator.random(4).tobytes()
            drawn = (first, following, common, noise.shared.random(4).tobytes())
        found = [one for one in job.allgather(drawn) if one is not None]
        assert len(found) == count
        firsts = [one[0] for one in found]
        assert firsts[: len(expected)] == expected[:count]
        assert {one[2] for one in found} == {shared or found[0][2]}
        # No stream equals another stream, or a stream that was drawn before.
        everything += firsts
        assert len(set(everything)) == len(everything)
        expected, shared = [one[1] for one in found], found[0][3]
