"""Synchronizes logical replicas of a rank inside of functions that JAX compiles."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax

from hpcstrat.engine.logical.threads import xla_problem
from hpcstrat.strategies import Strategy

__all__ = ["let_replicas_meet"]

# JAX compiles a function again for each value of this context; replica 0 has value 0.
_make: Any = getattr(jax, "make_user_context", None)
_replica = None if _make is None else _make(0)


class _TurnListener:
    """A `Listener` that gives each replica its own compiled functions."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def start(self) -> None:
        """Do nothing at the start of a run."""

    def begin(self, index: int) -> None:
        """Make this replica's thread compile its own versions of functions.

        JAX locks a function until its first call has ended. In that call the first
        replica may wait for the other replicas. If the other replicas needed the same
        lock, all replicas would deadlock.
        """
        if index and _replica is not None and _replica.value != index:
            _replica(index).__enter__()

    def pause(self, index: int) -> None:
        """Wait for this replica's exchanges in compiled functions before a pause."""
        self._wait()

    def resume(self, index: int) -> None:
        """Call `begin`: the replica may have begun before this listener existed."""
        self.begin(index)

    def end(self) -> None:
        """Do nothing at the end of a run."""


_known: weakref.WeakKeyDictionary[Strategy, _TurnListener] = weakref.WeakKeyDictionary()


def let_replicas_meet(strategy: Strategy, wait: Callable[[], None]) -> str:
    """Allow exchanges between a rank's replicas inside of compiled functions.

    Called when the first such function is compiled, before another replica runs.
    ``wait`` is a function that waits for pending exchanges. Returns an error text if
    exchanges are not possible, or else an empty text.
    """
    count = len(strategy.local_replicas)
    if problem := xla_problem(count):
        return problem
    if _replica is None and count > 1:
        return (
            "expected a JAX that compiles functions for each logical replica, by "
            f"jax.make_user_context, found jax {jax.__version__}; upgrade it"
        )
    if strategy not in _known:
        _known[strategy] = _TurnListener(wait)
        strategy.replicas.listeners.append(_known[strategy])
    return ""
