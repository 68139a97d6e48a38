"""Trees of JAX's arrays in checkpoints."""

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
    """Make a holder of a tree of arrays, for a CheckpointManager to save and restore.

    Collective over the strategy's replicas. JAX's arrays cannot be written, so the
    holder is given the newest tree before a save, and asked for it after a restore.

    Parameters
    ----------
    tree : tree of jax.Array
        The same on all replicas, such as parameters, optax's state and keys of
        ``jax.random``. All replicas start with replica 0's values.
    strategy : Strategy
        Whose replicas.

    Returns
    -------
    HeldState
        Its ``tree`` is read and assigned.

    Raises
    ------
    ValueError
        For leaves that are no arrays; the other replicas raise ReplicaError.
    CollectiveError
        On every replica, if they disagree on names, shapes or dtypes.

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

    The values are in host memory a second time, in variables whose copies the replicas
    compare.
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
        # As names in a file have it; a tree may be a single array.
        names = [name or "value" for name in leaf_names([path for path, _ in named])]
        with strategy.scope():
            self._variables = {
                name: Variable.adopt(value, name=name)
                for name, value in zip(names, values, strict=True)
            }
        self._leaves = leaves
        # Whether a manager may have written the variables since the leaves were copied.
        self._lent = True

    @property
    def tree(self) -> Tree:
        """The newest tree that was assigned, or restored; not collective.

        A tree that is assigned must have the structure, shapes and dtypes of the first;
        otherwise ValueError. This waits for JAX, so that the calls of its threads do
        not meet those of a save.
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
        """Return variables with the values of the tree, by the paths of its leaves.

        For the library's own modules: CheckpointManager reads or writes them.
        """
        if not self._lent:
            pairs = zip(self._leaves, self._variables.values(), strict=True)
            for leaf, variable in pairs:
                np.copyto(variable.component, np.asarray(_plain(leaf)))
            self._lent = True
        return dict(self._variables)

    def __repr__(self) -> str:
        """Show name, type and shape of each array."""
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
    """Return the numbers of an array, or of keys."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _like(leaf: Any, value: Array) -> Any:
    """Return a copy of a value as an array of a leaf's kind, where the leaf is."""
    if _is_key(leaf):
        return jax.random.wrap_key_data(
            jnp.array(value), impl=jax.random.key_impl(leaf)
        )
    # A copy, as JAX may take over memory of NumPy.
    return jax.device_put(value.copy(), leaf.sharding)


def _same(one: Array, other: Array) -> bool:
    """Whether all bits are the same; NaN, too."""
    first, second = (np.ascontiguousarray(a).reshape(-1) for a in (one, other))
    return bool(np.array_equal(first.view(np.uint8), second.view(np.uint8)))
