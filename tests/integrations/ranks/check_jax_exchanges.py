"""Exchanges of JAX trees on replicas, compared with NumPy, with and without jit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hpcstrat as hs
import hpcstrat.integrations.jax as hsj

DTYPES = (
    *("int8", "int32", "uint16", "uint32", "float16", "bfloat16", "float32"),
    "complex64",
)
# Ways to wrap a function: without compilation, and with jit.
inside = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["outside", "jit"])
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _tree(rank: int) -> dict[str, Any]:
    """Return a rank's tree of small integers, whose sums are exact."""
    random = np.random.default_rng(rank)
    leaves = {
        name: random.integers(0, 9, (3, 1 + index)).astype(jnp.dtype(name))
        for index, name in enumerate(DTYPES)
    }
    large = random.integers(-9, 9, (300, 70)).astype(np.float32)
    scalar, empty = np.float32(rank + 1), np.zeros((0, 3), np.float32)
    return {"leaves": leaves, "more": [large, (scalar, empty), None]}


def _expect(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        assert isinstance(one, jax.Array)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if one.dtype == jnp.bfloat16:
            # NumPy 2.5 finds no NaN in arrays of this type.
            one, other = one.astype(np.float32), other.astype(np.float32)  # noqa: PLW2901
        np.testing.assert_array_equal(np.asarray(one), other)


@inside
def test_sums_of_all_types_are_those_of_numpy(strategy: Any, wrap: Wrap) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    expected = jax.tree.map(
        lambda *leaves: sum(leaves[1:], leaves[0]), *map(_tree, range(size))
    )
    expected = jax.tree.map(lambda s, own: np.asarray(s, own.dtype), expected, _tree(0))
    function = wrap(lambda tree: hsj.all_reduce(tree, "sum", strategy))
    own = jax.tree.map(jnp.asarray, _tree(rank))
    for _ in range(2):
        _expect(function(own), expected)
    # The arguments are unchanged, although results may share memory inside of jit.
    _expect(own, _tree(rank))


AHEAD: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (lambda total, x: total(x), lambda s, size: s),
    "gradient": (
        lambda total, x: jax.grad(lambda x: jnp.sum(total(x) ** 2) / 2)(x),
        lambda s, size: s * size,
    ),
    "loop": (
        lambda total, x: jax.lax.fori_loop(0, 2, lambda _, a: total(a), x),
        lambda s, size: s * size,
    ),
    "branch": (
        lambda total, x: jax.lax.cond(x[0] < 99, total, lambda a: a, x),
        lambda s, size: s,
    ),
}


@pytest.mark.parametrize("name", list(AHEAD))
def test_functions_compiled_ahead_of_time_run_many_times(
    strategy: Any, name: str
) -> None:
    """JAX calls such functions in another way from the second call on."""
    function, expect = AHEAD[name]
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id

    def total(x: Any) -> Any:
        return hsj.all_reduce(x, "sum", strategy)

    jitted = jax.jit(lambda x: function(total, x), donate_argnums=0)
    compiled = jitted.lower(jnp.zeros(3)).compile()
    for call in range(3):
        values = [np.arange(3.0, dtype=np.float32) + r + call for r in range(size)]
        for run in (compiled, jitted):
            _expect(run(jnp.asarray(values[rank])), expect(sum(values), size))


@inside
def test_means_gathers_and_broadcasts_are_those_of_numpy(
    strategy: Any, wrap: Wrap
) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    trees = [
        {"f": np.full((2, 3), r + 1, np.float32), "i": np.full((1, 2), r, np.int32)}
        for r in range(size)
    ]
    flags = [np.arange(3) == r for r in range(size)]
    mean = wrap(lambda tree: hsj.all_reduce(tree, hs.ReduceOp.MEAN, strategy))
    _expect(
        mean(trees[rank]),
        {
            "f": np.full((2, 3), (size + 1) / 2, np.float32),
            "i": np.full((1, 2), (size - 1) / 2, np.float32),
        },
    )
    for axis in (0, 1):
        gather = wrap(lambda tree, axis=axis: hsj.all_gather(tree, axis, strategy))
        joined = jax.tree.map(lambda *parts, a=axis: np.concatenate(parts, a), *trees)
        _expect(gather(trees[rank]), joined)
    for root in {0, size - 1}:
        cast = wrap(lambda tree, root=root: hsj.broadcast(tree, root, strategy))
        _expect(cast((trees[rank], flags[rank])), (trees[root], flags[root]))


@inside
def test_extremes_and_their_gradients_are_those_of_numpy(
    strategy: Any, wrap: Wrap
) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    # All replicas have the third element in common.
    rows = np.array([[r, -r, 7, np.nan if r == 1 else r] for r in range(size)], "f4")
    for name, function in (("max", np.maximum), ("min", np.minimum)):
        extreme = wrap(lambda x, name=name: hsj.all_reduce(x, name, strategy))
        wanted = function.reduce(rows)
        tree = {"f": rows[rank], "b": rows[rank].astype(jnp.bfloat16)}
        _expect(extreme(tree), {"f": wanted, "b": wanted.astype(jnp.bfloat16)})
        # The loss of all replicas is the sum of their losses, with factors 1, 2, ...
        gradient = wrap(jax.grad(lambda x, f=extreme: (rank + 1) * f(x).sum()))
        same = (rows == wanted) | (np.isnan(rows) & np.isnan(wanted))
        total = size * (size + 1) / 2
        share = (total * same / same.sum(0))[rank].astype(np.float32)
        np.testing.assert_allclose(gradient(jnp.asarray(rows[rank])), share, rtol=1e-6)
    flags = jnp.arange(size) == rank
    every = wrap(lambda x: [hsj.all_reduce(x, op, strategy) for op in ("all", "any")])
    _expect(every(flags), [np.full(size, size == 1), np.ones(size, bool)])


def test_independent_calls_have_one_order(strategy: Any) -> None:
    """XLA may run calls at the same time; other lengths would show a wrong order."""
    size = strategy.num_replicas_in_sync

    @jax.jit
    def several(arrays: Any) -> Any:
        return [hsj.all_reduce(array, "sum", strategy) for array in arrays]

    single = jax.jit(lambda array: hsj.all_reduce(array @ array, "sum", strategy))
    for length in (1, 4):
        arrays = [jnp.ones((length + index, 50 * index + 1)) for index in range(4)]
        square = jnp.full((100 + length, 100 + length), 0.5)
        # Make the next calls without waiting for these, outside of jit, too.
        first, found = single(square), several(arrays)
        last = hsj.all_reduce(jnp.ones(length), "sum", strategy)
        for one in (*found, last):
            np.testing.assert_array_equal(one, np.full(one.shape, size, np.float32))
        np.testing.assert_allclose(first, size * (100 + length) / 4)


def test_calls_in_loops_and_branches(strategy: Any) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id

    @jax.jit
    def loops(start: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            carry = hsj.all_reduce(carry, "mean", strategy) + 1
            return carry, carry

        scanned, steps = jax.lax.scan(body, start, None, length=3)
        looped = jax.lax.fori_loop(
            0, 3, lambda i, c: hsj.all_reduce(c, "mean", strategy) + i, start
        )
        return scanned, steps, looped

    mean = (size - 1) / 2
    scanned, steps, looped = loops(jnp.float32(rank))
    assert (scanned, looped) == (mean + 3, mean + 3)
    np.testing.assert_array_equal(steps, mean + np.arange(1, 4, dtype=np.float32))

    @jax.jit
    def branch(wanted: Any, value: Any) -> Any:
        reduce = lambda v: hsj.all_reduce(v, "sum", strategy)  # noqa: E731
        return jax.lax.cond(wanted, reduce, lambda v: -v, value)

    assert branch(True, jnp.float32(2)) == 2 * size
    assert branch(False, jnp.float32(2)) == -2


@inside
@pytest.mark.parametrize("kind", ["sum", "mean", "gather", "broadcast"])
def test_gradients_are_those_of_the_sum_of_all_losses(
    strategy: Any, wrap: Wrap, kind: str
) -> None:
    """The expected gradients come from all replicas' losses in one process."""
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    calls = {
        "sum": (
            lambda t: hsj.all_reduce(t, "sum", strategy),
            lambda values: sum(values[1:], values[0]),
        ),
        "mean": (
            lambda t: hsj.all_reduce(t, "mean", strategy),
            lambda values: sum(values[1:], values[0]) / size,
        ),
        "gather": (
            lambda t: hsj.all_gather(t, 1, strategy),
            lambda values: jnp.concatenate(values, 1),
        ),
        "broadcast": (
            lambda t: hsj.broadcast(t, size - 1, strategy),
            lambda values: values[-1],
        ),
    }
    exchange, model = calls[kind]
    own = [jnp.arange(6.0).reshape(2, 3) / 6 + r for r in range(size)]

    def loss(value: Any) -> Any:
        # The integers have no gradient, but are exchanged, too.
        tree = exchange({"f": jnp.sin(value), "i": jnp.arange(4).reshape(2, 2)})
        return jnp.sum(tree["f"] ** 2) * (rank + 1)

    def all_losses(values: list[Any]) -> Any:
        joined = model([jnp.sin(value) for value in values])
        return sum(jnp.sum(joined**2) * (r + 1) for r in range(size))

    value, found = wrap(jax.value_and_grad(loss))(own[rank])
    expected = jax.grad(all_losses)(own)
    np.testing.assert_allclose(found, expected[rank], rtol=2e-6, atol=1e-6)
    joined = model([jnp.sin(v) for v in own])
    np.testing.assert_allclose(value, jnp.sum(joined**2) * (rank + 1), rtol=2e-6)


def test_gradients_through_loops_and_checkpoints(strategy: Any) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id

    def mean_of_sines(value: Any) -> Any:
        return hsj.all_reduce(jnp.sin(value), "mean", strategy)

    def loss(value: Any) -> Any:
        inner = jax.checkpoint(mean_of_sines)
        final, _ = jax.lax.scan(lambda c, _: (inner(c), None), value, None, length=3)
        return jnp.sum(final)

    def all_losses(values: Any) -> Any:
        for _ in range(3):
            mean = sum(map(jnp.sin, values)) / size
            values = [mean] * size
        return sum(map(jnp.sum, values))

    own = [jnp.arange(3.0) + r for r in range(size)]
    found = jax.jit(jax.grad(loss))(own[rank])
    np.testing.assert_allclose(found, jax.grad(all_losses)(own)[rank], rtol=1e-5)
    _, tangent = jax.jvp(mean_of_sines, (own[rank],), (jnp.ones(3),))
    np.testing.assert_allclose(tangent, sum(map(jnp.cos, own)) / size, rtol=1e-5)


def test_a_step_is_that_of_one_process_on_all_rows(strategy: Any) -> None:
    """Rows are divided unequally; the transformation has optax's two functions."""
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    random = np.random.default_rng(5)
    x, y = random.normal(size=(13, 4)).astype("f4"), random.normal(size=13).astype("f4")
    share = np.array_split(np.arange(13), [5, 7])[rank::size]
    rows = np.concatenate(share) if size > 1 else np.arange(13)
    reduced = hsj.cross_replica(strategy, "sum")
    init, update = reduced

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return jnp.sum((jnp.tanh(x @ weights["w"]) - y) ** 2) / 13

    @jax.jit
    def step(weights: Any, state: Any, x: Any, y: Any) -> Any:
        gradient, state = update(jax.grad(loss)(weights, x, y), state, weights)
        return jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradient), state

    weights = expected = {"w": jnp.zeros(4)}
    state = init(weights)
    for _ in range(5):
        weights, state = step(weights, state, x[rows], y[rows])
        gradient = jax.grad(loss)(expected, x, y)
        expected = jax.tree.map(lambda w, g: w - 0.5 * g, expected, gradient)
    np.testing.assert_allclose(weights["w"], expected["w"], rtol=1e-5, atol=1e-6)
    strategy.check_equal(weights)


def test_optax_takes_it_for_one_of_its_own(strategy: Any) -> None:
    optax = pytest.importorskip("optax")
    optimizer = optax.chain(hsj.cross_replica(strategy), optax.adam(0.1))
    weights = {"w": jnp.ones(3)}
    updates, _ = jax.jit(optimizer.update)(
        {"w": jnp.full(3, strategy.replica_id + 1.0)}, optimizer.init(weights), weights
    )
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-5)


def test_strategies_that_do_not_sum_each_step_are_refused(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(strategy), "sums_each_step", False)
    with pytest.raises(NotImplementedError, match="in sync for gradients of JAX"):
        hsj.cross_replica(strategy)


def test_vmap_is_refused_with_advice(strategy: Any) -> None:
    reduce = lambda x: hsj.all_reduce(x, "sum", strategy)  # noqa: E731
    for function in (jax.vmap(reduce), jax.jit(jax.vmap(reduce))):
        with pytest.raises(NotImplementedError, match=r"all_reduce\(jax.vmap\(f\)"):
            function(jnp.ones((2, 3)))
    # vmap may map other parts of a function, without the exchange.
    total = jnp.float32(strategy.num_replicas_in_sync)
    assert (jax.vmap(lambda x: x + reduce(jnp.float32(1)))(jnp.zeros(2)) == total).all()


def test_devices_that_cannot_take_part_are_refused_with_advice(strategy: Any) -> None:
    step = jax.jit(lambda x: hsj.all_reduce(x, "sum", strategy))
    traced = step.trace(jnp.ones(3))
    advice = {
        "cuda": "import cupy before the strategy is made, or set HPCSTRAT_DEVICE=gpu",
        "tpu": "expected all_reduce of arrays on CPUs or on GPUs with CUDA",
    }
    for platform, words in advice.items():
        with pytest.raises(NotImplementedError, match=words):
            traced.lower(lowering_platforms=(platform,))
    assert step(jnp.float32(1)) == strategy.num_replicas_in_sync


@inside
def test_a_mismatch_is_named_on_all_ranks(strategy: Any, wrap: Wrap) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    last = rank == size - 1
    jitted = wrap is jax.jit
    error = RuntimeError if jitted else hs.errors.CollectiveError
    reduce = lambda tree, op="sum": hsj.all_reduce(tree, op, strategy)  # noqa: E731
    faults: list[tuple[Callable[[], Any], str]] = [
        (lambda: wrap(reduce)(jnp.ones(4 if last else 3)), r"float32\[4\]"),
        (lambda: wrap(reduce)(jnp.ones(2, "i4" if last else "f4")), r"int32\[2\]"),
        (lambda: wrap(reduce)({"b" if last else "a": jnp.ones(2), "c": 1}), "'b'"),
        (lambda: wrap(lambda x: reduce(x, "mean" if last else "sum"))(1.0), "MEAN"),
        (
            lambda: wrap(lambda x: hsj.all_gather(x, 0, strategy))(jnp.ones(1 + last)),
            r"\(2,\)",
        ),
    ]
    for fault, words in faults:
        if size == 1:
            jax.block_until_ready(fault())
            continue
        with pytest.raises(error, match=words) as caught:
            jax.block_until_ready(fault())
        assert "expected all ranks in one call" in str(caught.value)
        # The error names the program's line, not a line of JAX.
        assert "check_jax_exchanges.py:" in str(caught.value)
    assert wrap(reduce)(jnp.float32(1)) == size


@inside
def test_what_cannot_be_reduced_is_refused_on_all_ranks(
    strategy: Any, wrap: Wrap
) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    faults: list[tuple[Callable[[Any], Any], str]] = [
        (lambda x: hsj.all_reduce(x, "any", strategy), "expected booleans for ANY"),
        (
            lambda x: hsj.all_reduce(x > 0, "sum", strategy),
            "found dtype bool; reduce it by",
        ),
        (lambda x: hsj.all_reduce(x, "largest", strategy), "SUM, MEAN"),
        (lambda x: hsj.all_reduce(x.astype("float8_e5m2"), "sum", strategy), "float8"),
        (lambda x: hsj.all_gather(x, 1, strategy), "expected 0 <= axis < 1"),
        (lambda x: hsj.broadcast(x, size, strategy), f"from 0 to {size - 1}"),
    ]
    for function, words in faults:
        with pytest.raises(ValueError, match=words):
            wrap(function)(jnp.ones(2))
        # Only one rank has the error; the other ranks raise in the call that they make.
        if rank == 0:
            with pytest.raises(ValueError, match=words):
                wrap(function)(jnp.ones(2))
        else:
            total = wrap(lambda x: hsj.all_reduce(x, "sum", strategy))
            with pytest.raises(RuntimeError, match="rank 0 failed in"):
                jax.block_until_ready(total(jnp.ones(2)))
    assert hsj.all_reduce(1.0, "sum", strategy) == size


def test_results_keep_their_memory(strategy: Any) -> None:
    """The library reuses memory without references; JAX holds the memory of results."""
    size = strategy.num_replicas_in_sync
    count = 1 << 14
    totals = [
        hsj.all_reduce(jnp.full(count, float(i)), "sum", strategy) for i in range(20)
    ]
    for index, total in enumerate(totals):
        assert (np.asarray(total) == index * size).all()
    # XLA may write into an array that was donated.
    double = jax.jit(lambda a: a * 2, donate_argnums=0)
    doubled = double(totals.pop())
    again = hsj.all_reduce(jnp.ones(count), "sum", strategy)
    assert (np.asarray(doubled) == 2 * 19 * size).all()
    assert (np.asarray(again) == size).all()


def test_calls_of_the_strategy_come_after_those_under_way(
    strategy: Any, job: Any
) -> None:
    """Batches and runs, whose numbers ranks compare, must wait for XLA's exchanges."""

    @jax.jit
    def slow(matrix: Any) -> Any:
        matrix = jax.lax.fori_loop(0, 20, lambda _, m: jnp.tanh(m @ m), matrix)
        return hsj.all_reduce(jnp.float32(job.rank) + 0 * matrix[0, 0], "sum", strategy)

    batches = strategy.experimental_distribute_dataset(hs.Dataset(np.arange(6), 2))
    found = []
    for _ in batches:
        found.append(slow(jnp.ones((150, 150))))
        if len(found) == 2:
            time.sleep(0.03 * job.rank)
            assert strategy.reduce("sum", np.int64(1), axis=None) == job.size
        strategy.run(lambda: None)
    assert len(found) == 3
    assert all(total == sum(range(job.size)) for total in found)


@inside
def test_global_mean_of_ragged_batches_is_that_of_one_process(
    strategy: Any, wrap: Wrap
) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    x = np.random.default_rng(3).normal(size=(7, 4)).astype(np.float32)

    def loss_sum(weights: Any, x: Any) -> Any:
        return jnp.sum((x @ weights - 1) ** 2)

    def step(weights: Any, x: Any) -> Any:
        sums = jax.value_and_grad(loss_sum)(weights, x)
        return hsj.global_mean(sums, len(x), strategy)

    weights = jnp.arange(4.0)
    # Rank 0 has one row, the last rank has the remaining rows, other ranks have none.
    own = x[1:] if rank == size - 1 else x[:1] if rank == 0 else x[:0]
    own = x if size == 1 else own
    found = wrap(step)(weights, jnp.asarray(own))
    whole = jax.value_and_grad(lambda w: loss_sum(w, x) / len(x))(weights)
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    half = wrap(lambda: hsj.global_mean(jnp.float16(size), 70000, strategy))()
    assert half.dtype == jnp.float16
    with pytest.raises(ValueError, match="one number as count"):
        hsj.global_mean(jnp.ones(2), jnp.ones(2), strategy)
