"""The current strategy and context of a program."""

from __future__ import annotations

import threading
from typing import Any

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.context import ContextEntry, current, push
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
        The default strategy outside everything.

    Raises
    ------
    RuntimeError
        In a thread that has not inherited the context, in a job of several ranks: the
        default strategy would be wrong there.
    """
    entry = current()
    if entry is not None:
        # Whatever is pushed is a Strategy, which lies above the stack.
        return entry.strategy  # type: ignore[return-value]
    # With one rank the default strategy is right in any thread.
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
    """Whether the current strategy is another than the default.

    Not collective.

    Returns
    -------
    bool
        True in a scope, and inside ``run``, ``merge_call`` and ``update``.
    """
    entry = current()
    return entry is not None and not entry.strategy.is_default


def get_replica_context() -> ReplicaContext | None:
    """Return the replica's context.

    Not collective.

    Returns
    -------
    ReplicaContext or None
        None in cross-replica context; outside everything the default strategy's.
    """
    entry = current()
    context: ReplicaContext | None = (
        get_strategy().replicas.entries[0] if entry is None else entry
    ).replica_context
    return context


def in_cross_replica_context() -> bool:
    """Whether this is cross-replica context.

    Not collective.

    Returns
    -------
    bool
        True in a scope, ``merge_call`` and ``update``; False inside ``run`` and
        outside everything.
    """
    entry = current()
    return entry is not None and entry.replica_context is None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make a strategy current without a ``with`` block.

    Not collective.

    Parameters
    ----------
    strategy : Strategy or None
        Replaces the one set before; None unsets it.

    Raises
    ------
    RuntimeError
        Inside a scope.
    """
    entry = current()
    if entry is not None and not entry.is_base:
        raise RuntimeError(
            "expected experimental_set_strategy outside every scope, found that of "
            f"{entry.strategy!r}; leave the scope first"
        )
    push(None if strategy is None else ContextEntry(strategy, is_base=True))


def get_loss_reduction() -> Any:
    """Return how losses are combined over replicas.

    Not collective.

    Returns
    -------
    ReduceOp
        ``SUM``.
    """
    return ReduceOp.SUM
