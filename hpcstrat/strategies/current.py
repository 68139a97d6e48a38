"""Functions that return the current strategy and the current context."""

from __future__ import annotations

import threading
from typing import Any

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.context import ActiveContext, current, push
from hpcstrat.engine.options import ReduceOp
from hpcstrat.strategies.base import Strategy
from hpcstrat.strategies.default import DefaultStrategy
from hpcstrat.strategies.replica_context import ReplicaContext

_default = DefaultStrategy()


def get_strategy() -> Strategy:
    """Return the current strategy.

    Not collective.

    Returns
    -------
    Strategy
        The strategy; outside of all scopes, the default strategy.

    Raises
    ------
    RuntimeError
        In a job of several ranks, if the calling thread is not the main thread and has
        not inherited a context: the default strategy would be wrong in this thread.
    """
    entry = current()
    if entry is not None:
        # The attribute's type is a protocol, but only Strategy objects are pushed.
        return entry.strategy  # type: ignore[return-value]
    # In a job of one rank, the default strategy is right in any thread.
    main = threading.current_thread() is threading.main_thread()
    if not main and launch_from_environment().size > 1:
        raise RuntimeError(
            "expected a thread with a strategy, found thread "
            f"{threading.current_thread().name!r}, which has not inherited the "
            "context, in a job of several ranks; start it with "
            "contextvars.copy_context().run"
        )
    return _default


def has_strategy() -> bool:
    """Return whether the current strategy is not the default strategy.

    Not collective.

    Returns
    -------
    bool
        True in a scope, in ``run``, ``merge_call`` and ``update``, and after
        `experimental_set_strategy`.
    """
    entry = current()
    return entry is not None and not entry.strategy.is_default


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the running replica.

    Not collective.

    Returns
    -------
    ReplicaContext or None
        The context; None in cross-replica context. Outside of all scopes, the context
        of the default strategy.
    """
    entry = current()
    context: ReplicaContext | None = (
        get_strategy().replicas.entries[0] if entry is None else entry
    ).replica_context
    return context


def in_cross_replica_context() -> bool:
    """Return whether the current context is cross-replica context.

    Not collective.

    Returns
    -------
    bool
        True in a scope, ``merge_call`` and ``update``, and after
        `experimental_set_strategy`; False in ``run`` and outside of all scopes.
    """
    entry = current()
    return entry is not None and entry.replica_context is None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make a strategy current without a ``with`` block.

    Not collective.

    Parameters
    ----------
    strategy : Strategy or None
        The new current strategy; None: the default strategy again.

    Raises
    ------
    RuntimeError
        If the call is inside a scope.
    """
    entry = current()
    if entry is not None and not entry.is_base:
        raise RuntimeError(
            "expected experimental_set_strategy outside every scope, found that of "
            f"{entry.strategy!r}; leave the scope first"
        )
    push(None if strategy is None else ActiveContext(strategy, is_base=True))


def get_loss_reduction() -> Any:
    """Return the operation that combines losses over replicas.

    Not collective.

    Returns
    -------
    ReduceOp
        ``SUM``.
    """
    return ReduceOp.SUM
