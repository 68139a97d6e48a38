"""Saving and restoring of trees of JAX's arrays in checkpoints."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpcstrat.engine.typing import Array, Tree
from hpcstrat.integrations.jax.collective_calls import leaf_names
from hpcstrat.integrations.jax.primitive import refuse
from hpcstrat.variables import Variable

__all__ = ["HeldState", "state"]


def state(tree: Tree, strategy: Any) -> HeldState:
    """Return a holder of a tree of arrays, which a CheckpointManager can save.

    Collective over the strategy's replicas. JAX's arrays cannot be overwritten in
    place. So assign the newest tree to the holder before a save, and read the restored
    tree from the holder after a restore.

    Parameters
    ----------
    tree : tree of jax.Array
        A tree such as parameters, optax's state and keys of ``jax.random``, with equal
        names, shapes and dtypes on all replicas. All replicas get replica 0's values.
    strategy : Strategy
        The strategy whose replicas hold the state.

    Returns
    -------
    HeldState
        The holder, whose ``tree`` is read and assigned.

    Raises
    ------
    ValueError
        For leaves that are not arrays; the other replicas raise ReplicaError.
    CollectiveError
        On every replica, if names, shapes or dtypes differ between replicas.

    Examples
    --------
    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> import hpcstrat as hs
    >>> training = state({"w": jnp.zeros(2), "step": jnp.int32(0)}, hs.get_strategy())
    >>> checkpoints = hs.CheckpointManager(tempfile.mkdtemp(), training=training)
    >>> training.tree = {"w": jnp.ones(2), "step": jnp.int32(7)}
    >>> path = checkpoints.save(7)
    >>> training.tree = {"w": jnp.zeros(2), "step": jnp.int32(0)}
    >>> checkpoints.restore()
    7
    >>> print(training.tree["w"], training.tree["step"])
    [1. 1.] 7
    """
    return HeldState(tree, strategy)


class HeldState:
    """A tree of JAX's arrays that a CheckpointManager saves and restores; see `state`.

    Variables in host memory have a second copy of the values. When they are made, the
    replicas compare their names, shapes and dtypes.
    """

    def __init__(self, tree: Tree, strategy: Any) -> None:
        self.distribute_strategy = strategy
        try:
            named, self._structure = jax.tree_util.tree_flatten_with_path(tree)
            leaves = [_checked_leaf(leaf) for _, leaf in named]
            jax.block_until_ready(leaves)
            values = [np.array(_plain(leaf)) for leaf in leaves]
        except Exception as error:
            refuse(strategy, "state", error)
        # Names in a checkpoint; a tree that is a single array has an empty name.
        names = [name or "value" for name in leaf_names([path for path, _ in named])]
        with strategy.scope():
            self._variables = {
                name: Variable.adopt(value, name=name)
                for name, value in zip(names, values, strict=True)
            }
        self._leaves = leaves
        # True if a manager may have overwritten the variables: `tree` must then compare
        # them with the leaves.
        self._lent = True

    @property
    def tree(self) -> Tree:
        """The tree that was assigned or restored most recently; not collective.

        An assigned tree must have the structure, shapes and dtypes of the first tree;
        ValueError if not. The assignment waits until JAX has computed the arrays, so
        that collective calls in JAX's threads do not mix with the calls of a save.
        """
        if self._lent:
            for index, variable in enumerate(self._variables.values()):
                leaf = self._leaves[index]
                if not _same(np.asarray(_plain(leaf)), variable.component):
                    self._leaves[index] = _like(leaf, variable.component)
            self._lent = False
        return self._structure.unflatten(self._leaves)

    @tree.setter
    def tree(self, tree: Tree) -> None:
        leaves, structure = jax.tree.flatten(tree)
        if structure != self._structure:
            raise ValueError(
                f"expected a tree of the structure {self._structure}, found "
                f"{structure}; make a new state for another one"
            )
        leaves = [_checked_leaf(leaf) for leaf in leaves]
        for name, leaf, old in zip(self._variables, leaves, self._leaves, strict=True):
            if (leaf.shape, leaf.dtype) != (old.shape, old.dtype):
                raise ValueError(
                    f"expected {old.dtype}{list(old.shape)} as {name}, found "
                    f"{leaf.dtype}{list(leaf.shape)}; make a new state for it"
                )
        self._leaves = jax.block_until_ready(leaves)
        self._lent = False

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return variables with the tree's current values, by the paths of the leaves.

        For the library's own modules: CheckpointManager reads or writes the variables.
        """
        if not self._lent:
            pairs = zip(self._leaves, self._variables.values(), strict=True)
            for leaf, variable in pairs:
                np.copyto(variable.component, np.asarray(_plain(leaf)))
            self._lent = True
        return dict(self._variables)

    def __repr__(self) -> str:
        """Return name, type and shape of each array as text."""
        found = self._variables.items()
        arrays = ", ".join(f"{name} {v.dtype}{list(v.shape)}" for name, v in found)
        return f"<{type(self).__name__} of {arrays}>"


def _checked_leaf(leaf: Any) -> Any:
    array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    if isinstance(array, jax.core.Tracer):
        raise ValueError(
            "expected arrays with values as state, found one inside of jit; assign "
            "what the jitted function returns"
        )
    return array


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _plain(leaf: Any) -> Any:
    """Return an array unchanged, or the integers of an array of random keys."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _like(leaf: Any, value: Array) -> Any:
    """Return a value as an array like ``leaf``: on its device, or as random keys."""
    if _is_key(leaf):
        return jax.random.wrap_key_data(
            jnp.array(value), impl=jax.random.key_impl(leaf)
        )
    # Pass a copy, because JAX may keep NumPy's memory for its own array.
    return jax.device_put(value.copy(), leaf.sharding)


def _same(one: Array, other: Array) -> bool:
    """Return whether two arrays are equal bit for bit; so a NaN equals itself."""
    first, second = (np.ascontiguousarray(a).reshape(-1) for a in (one, other))
    return bool(np.array_equal(first.view(np.uint8), second.view(np.uint8)))
