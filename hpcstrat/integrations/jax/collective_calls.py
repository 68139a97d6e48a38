"""Collective calls that exchange trees of JAX's arrays between replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpcstrat.engine.arrays.kinds import to_reducible
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Tree
from hpcstrat.integrations.jax.primitive import (
    TreeOperation,
    bind,
    refuse,
    require_replica_context,
)
from hpcstrat.integrations.jax.xla_handler import DTYPES

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "checked",
    "global_mean",
    "leaf_names",
    "to_leaf",
]


def all_reduce(tree: Tree, op: ReduceOp | str, strategy: Any) -> Tree:
    """Reduce the arrays of all replicas, inside or outside of jit.

    Collective over the strategy's replicas, each time that the call runs; a call in a
    jitted function runs when that function runs. All calls are made in the order of the
    program. A call of the strategy itself, such as ``strategy.reduce``, first waits for
    all exchanges in jitted functions that the program has started.

    Parameters
    ----------
    tree : tree of jax.Array, each of shape (...)
        A tree with the same structure, shapes and dtypes on all replicas: integers,
        floating and complex numbers of at least 8 bits; for operations that compare
        elements also booleans, and no complex numbers. Not modified.
    op : ReduceOp or str
        ``SUM``, ``MEAN``, ``MAX``, ``MIN``, or, for booleans only, ``ALL`` or ``ANY``.
        The mean of integers has JAX's floating type, as in ``jnp.mean``.
    strategy : Strategy
        The strategy whose replicas exchange arrays.

    Returns
    -------
    tree of jax.Array
        The reduced arrays, equal bit for bit on all replicas. The gradient of this call
        is the gradient of the sum of all replicas' results: cotangents are reduced in
        the same way. For ``MAX`` and ``MIN``, replicas whose elements are equal to the
        result share its cotangent equally; a gradient then makes two more calls.

    Raises
    ------
    CollectiveError
        On every replica, if structure, shapes or dtypes differ between replicas. Inside
        of jit, and on GPUs, JAX raises its own RuntimeError with the same text when the
        program waits for the result.
    ValueError
        For another operation, or for arrays that have no sum, such as arrays of bool.
    NotImplementedError
        Inside of ``vmap``; also for arrays on a GPU if the strategy has no GPU, see the
        guide on GPUs.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import hpcstrat as hs
    >>> step = jax.jit(lambda tree: all_reduce(tree, "mean", hs.get_strategy()))
    >>> print(step({"w": jnp.ones(2)})["w"])
    [1. 1.]
    """
    parsed = checked(strategy, "all_reduce", ReduceOp.parse, op)
    kind = parsed.name.lower()

    def convert(leaf: Any) -> Any:
        leaf = to_leaf(leaf)
        # Bfloat16 is known to NumPy here, so that this raises the usual errors.
        to_reducible(np.empty(0, leaf.dtype), parsed)
        if kind == "mean" and jnp.issubdtype(leaf.dtype, jnp.integer):
            return leaf.astype(jnp.result_type(float))
        return leaf

    return _exchanged(tree, convert, strategy, kind)


def global_mean(tree: Tree, count: Any, strategy: Any) -> Tree:
    """Return the means over the examples of all replicas, inside or outside of jit.

    Collective over the strategy's replicas, as `all_reduce` is; one call reduces a
    loss, its gradient and the count. The result is the same as in one process with the
    global batch. A mean of the replicas' own means would be different if replicas have
    different counts.

    Parameters
    ----------
    tree : tree of jax.Array, each of shape (...)
        Sums over this replica's examples (zeros if it has none), for example the values
        that ``jax.value_and_grad`` returns for the sum of the losses.
    count : int, float or jax.Array of shape ()
        Number of these examples, or the sum of their weights.
    strategy : Strategy
        The strategy whose replicas exchange arrays.

    Returns
    -------
    tree of jax.Array
        Equal bit for bit on all replicas; NaN if no replica has an example. Means of
        integers have JAX's floating type.

    Raises
    ------
    ValueError
        For a count of several elements. `all_reduce` describes the other errors.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import hpcstrat as hs
    >>> def loss_sum(w, x, y):
    ...     return jnp.sum((x * w - y) ** 2)
    >>> x = jnp.array([1.0, 2.0])
    >>> sums = jax.value_and_grad(loss_sum)(jnp.float32(0), x, x)
    >>> loss, gradient = global_mean(sums, len(x), hs.get_strategy())
    >>> print(loss, gradient)
    2.5 -5.0
    """

    def check() -> Any:
        number = jnp.asarray(count)
        if number.ndim:
            raise ValueError(
                f"expected one number as count, found shape {number.shape}; pass the "
                "number of this replica's examples, such as len(x)"
            )
        return number

    number = checked(strategy, "global_mean", check)
    sums, total = all_reduce((tree, number), "sum", strategy)

    def divided(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            leaf = leaf.astype(jnp.result_type(float))
        # Divide in at least float32: a large count overflows float16.
        wide = jnp.result_type(leaf.dtype, jnp.float32)
        return (leaf.astype(wide) / total.astype(wide)).astype(leaf.dtype)

    return jax.tree.map(divided, sums)


def all_gather(tree: Tree, axis: int, strategy: Any) -> Tree:
    """Concatenate the replicas' arrays along an axis, inside or outside of jit.

    Collective over the strategy's replicas, as `all_reduce` is, with the same errors.

    Parameters
    ----------
    tree : tree of jax.Array, each of shape (...)
        As for `all_reduce`; for lengths that differ between replicas use
        `Strategy.gather`.
    axis : int
        At least 0, and smaller than the number of dimensions of all arrays; ValueError
        if not.
    strategy : Strategy
        The strategy whose replicas exchange arrays.

    Returns
    -------
    tree of jax.Array
        The arrays in replica order, equal on all replicas. The gradient of this call is
        the gradient of the sum of all replicas' results.
    """

    def convert(leaf: Any) -> Any:
        leaf = to_leaf(leaf)
        if not 0 <= axis < leaf.ndim:
            raise ValueError(
                f"expected 0 <= axis < {leaf.ndim}, the dimensions of the array to "
                f"gather, found axis {axis}; change it, or give scalars a dimension"
            )
        return leaf

    return _exchanged(tree, convert, strategy, "gather", axis)


def broadcast(tree: Tree, root: int, strategy: Any) -> Tree:
    """Return one replica's arrays on all replicas, inside or outside of jit.

    Collective over the strategy's replicas, as `all_reduce` is, with the same errors.

    Parameters
    ----------
    tree : tree of jax.Array, each of shape (...)
        As for `all_reduce`.
    root : int
        Number, from 0, of the replica whose arrays are returned; the same on all
        replicas. ValueError if there is no such replica.
    strategy : Strategy
        The strategy whose replicas exchange arrays.

    Returns
    -------
    tree of jax.Array
        The root's arrays, equal on all replicas. The gradient of the sum of all
        replicas' results reaches only the root's arrays; the gradient of other
        replicas' arrays is zero.
    """

    def check() -> None:
        count = strategy.num_replicas_in_sync
        if not 0 <= root < count:
            raise ValueError(
                f"expected a root from 0 to {count - 1}, found {root}; change it"
            )

    checked(strategy, "broadcast", check)
    return _exchanged(tree, to_leaf, strategy, "broadcast", root)


def leaf_names(paths: list[Any]) -> tuple[str, ...]:
    """Return a name for each path to a leaf, such as ``layers/0/kernel``."""
    short = [jax.tree_util.keystr(p, simple=True, separator="/") for p in paths]
    if len(set(short)) == len(short):
        return tuple(short)
    return tuple(jax.tree_util.keystr(path) for path in paths)


def to_leaf(leaf: Any) -> Any:
    """Return a leaf as an array on one device.

    Raises ValueError for dtypes that are not exchanged, and for an array that JAX
    divides among devices; of an array that all devices have, this rank's copy is taken.
    """
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    if concrete and len(leaf.sharding.device_set) > 1:
        if not leaf.is_fully_replicated:
            raise ValueError(
                "expected arrays that all of their devices have, found one of shape "
                f"{leaf.shape} with {leaf.sharding}; sum it over the devices first, by "
                "jax.lax.psum in shard_map for example, with out_specs=PartitionSpec()"
            )
        leaf = leaf.addressable_data(0)
    array = jnp.asarray(leaf)
    if array.dtype not in DTYPES.values():
        raise ValueError(
            "expected arrays of numbers of at least 8 bits, found dtype "
            f"{array.dtype}; cast it, or take jax.random.key_data of keys"
        )
    return array


def _exchanged(
    tree: Tree, convert: Any, strategy: Any, kind: str, place: int = 0
) -> Tree:
    what = TreeOperation(strategy, kind, (), place).what
    require_replica_context(strategy, what)

    def prepare() -> Any:
        named, structure = jax.tree_util.tree_flatten_with_path(tree)
        names = leaf_names([path for path, _ in named])
        return names, [convert(leaf) for _, leaf in named], structure

    names, leaves, structure = checked(strategy, what, prepare)
    exchange = TreeOperation(strategy, kind, names, place)
    return structure.unflatten(bind(exchange, leaves))


def checked(strategy: Any, what: str, function: Any, *args: Any) -> Any:
    """Call a function that checks arguments; if it fails, all replicas raise errors."""
    try:
        return function(*args)
    except Exception as error:
        refuse(strategy, what, error)
