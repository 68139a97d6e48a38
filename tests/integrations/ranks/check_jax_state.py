"""Trees of JAX arrays in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hpcstrat as hs
import hpcstrat.integrations.jax as hsj


def _tree(seed: int) -> dict[str, Any]:
    """Return a tree with many types, like the state of a training, from a seed."""
    return {
        "params": {
            "w": jnp.arange(50_000.0) + seed,
            "h": jnp.ones(3, "bfloat16") * seed,
        },
        "optimizer": (jnp.int32(seed), [jnp.float16(seed)], None),
        "flags": jnp.array([True, seed > 2]),
        "nan": jnp.array([jnp.nan, seed]),
        "key": jax.random.key(seed),
    }


def _expect(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = map(jax.random.key_data, (one, other))  # noqa: PLW2901
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_state_starts_equal_and_comes_back(strategy: Any, folder: Path) -> None:
    held = hsj.state(_tree(strategy.replica_id), strategy)
    _expect(held.tree, _tree(0))
    strategy.check_equal(held.tree["params"])
    first = held.tree["params"]["w"]
    checkpoints = hs.CheckpointManager(folder, net=held)
    held.tree = _tree(4)
    assert held.tree["params"]["w"] is held.tree["params"]["w"]
    first_path = checkpoints.save(1)
    # A value read before a save, or saved in the background, does not change.
    _expect(first, _tree(0)["params"]["w"])
    held.tree = _tree(5)
    second_path = checkpoints.save(2, asynchronous=True)
    held.tree = _tree(6)
    _expect(held.tree, _tree(6))
    checkpoints.wait()
    for path, seed in ((first_path, 4), (second_path, 5)):
        kept = held.tree
        before = np.array(kept["params"]["w"])
        checkpoints.restore(path)
        _expect(held.tree, _tree(seed))
        np.testing.assert_array_equal(kept["params"]["w"], before)
    checkpoints.close()


def test_state_of_another_structure_is_refused(strategy: Any) -> None:
    held = hsj.state({"w": jnp.ones(2)}, strategy)
    for other, words in (
        ({"v": jnp.ones(2)}, "expected a tree of the structure"),
        ({"w": jnp.ones(3)}, r"expected float32\[2\] as w, found float32\[3\]"),
        ({"w": jnp.ones(2, int)}, r"found int32\[2\]"),
    ):
        with pytest.raises(ValueError, match=words):
            held.tree = other
    # A tree may be a single array, and names of different leaves may be equal.
    assert list(hsj.state(jnp.ones(1), strategy).checkpoint_variables()) == ["value"]
    twice = hsj.state({"a/b": jnp.ones(1), "a": {"b": jnp.zeros(1)}}, strategy)
    assert len(twice.checkpoint_variables()) == 2


def test_state_that_differs_is_found_by_a_save(strategy: Any, folder: Path) -> None:
    held = hsj.state({"w": jnp.ones(2)}, strategy)
    checkpoints = hs.CheckpointManager(folder, net=held)
    held.tree = {"w": jnp.full(2, strategy.replica_id) * 1.0}
    if strategy.num_replicas_in_sync == 1:
        checkpoints.save(1)
    else:
        with pytest.raises(hs.errors.DivergenceError, match="variable 'net/w'"):
            checkpoints.save(1)
    held.tree = {"w": jnp.ones(2)}
    checkpoints.save(2)
    checkpoints.close()


def test_what_two_replicas_saved_comes_back_on_all(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    if 2 in strategies:
        held = hsj.state(_tree(1), strategies[2])
        held.tree = _tree(7)
        with hs.CheckpointManager(folder, training=held) as checkpoints:
            checkpoints.save(3)
    job.Barrier()
    strategy = strategies[job.size]
    held = hsj.state(_tree(strategy.replica_id), strategy)
    with hs.CheckpointManager(folder, training=held) as checkpoints:
        found = checkpoints.restore_or_initialize()
    assert found == (None if job.size == 1 else 3)
    _expect(held.tree, _tree(0 if job.size == 1 else 7))
