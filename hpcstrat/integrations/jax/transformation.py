"""A transformation of gradients that optax can use in a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Tree
from hpcstrat.integrations.frameworks import gradient_operation, require_sums_each_step
from hpcstrat.integrations.jax.collective_calls import all_reduce

__all__ = ["GradientTransformation", "cross_replica"]


class GradientTransformation(NamedTuple):
    """The functions ``init`` and ``update``, which optax accepts as a transformation.

    Parameters
    ----------
    init : callable
        Function that returns the state for given parameters.
    update : callable
        Function of gradients, state and parameters, which returns new gradients and a
        new state.
    """

    init: Callable[[Tree], Any]
    update: Callable[..., tuple[Tree, Any]]


def cross_replica(strategy: Any, op: ReduceOp | str = "mean") -> GradientTransformation:
    """Make a transformation that reduces gradients over the replicas.

    Not collective; its ``update`` is collective over the strategy's replicas, like
    `all_reduce`.

    Parameters
    ----------
    strategy : Strategy
        The strategy whose replicas train together.
    op : ReduceOp or str
        ``MEAN`` if each replica's loss is a mean over its part of the batch, and all
        parts are equally large; ``SUM`` if each replica's loss is a sum that is divided
        by the size of the global batch.

    Returns
    -------
    GradientTransformation
        For ``optax.chain(cross_replica(strategy), optax.adam(1e-3))``. The
        transformation must be the first one, so that all later transformations get
        equal gradients on all replicas. Optax is not required: call ``init(params)``
        and ``update(gradients, state)``.

    Raises
    ------
    NotImplementedError
        For a strategy whose replicas are not in sync.
    ValueError
        For another operation.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import hpcstrat as hs
    >>> reduced = cross_replica(hs.get_strategy())
    >>> gradients, _ = reduced.update({"w": jnp.ones(2)}, reduced.init(None))
    >>> print(gradients["w"])
    [1. 1.]
    """

    require_sums_each_step(strategy, "gradients of JAX")
    parsed = gradient_operation(op)

    def update(updates: Tree, state: Any, *_: Any, **others: Any) -> tuple[Tree, Any]:
        del others
        return all_reduce(updates, parsed, strategy), state

    return GradientTransformation(lambda params: (), update)
