"""Lets the logical replicas of a rank meet inside of functions that JAX compiles."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax

from hpcstrat.engine.logical.threads import xla_problem
from hpcstrat.strategies import Strategy

__all__ = ["let_replicas_meet"]

# Part of the key by which JAX looks up compiled functions; replica 0 has the default.
_make: Any = getattr(jax, "make_user_context", None)
_replica = None if _make is None else _make(0)


class _TurnListener:
    """Tells JAX which replica has its turn, and waits at its end; see `Listener`."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def start(self) -> None:
        """Begin a run."""

    def begin(self, index: int) -> None:
        """Let this thread, which serves one replica, compile functions of its own.

        A function is locked until its first call has ended. In that call the first
        replica may wait for the others, which therefore must not need the same lock.
        """
        if index and _replica is not None and _replica.value != index:
            _replica(index).__enter__()

    def pause(self, index: int) -> None:
        """Wait for the replica's exchanges in compiled functions that still run."""
        self._wait()

    def resume(self, index: int) -> None:
        """Begin, too: the replica may have begun before this listener was added."""
        self.begin(index)

    def end(self) -> None:
        """End a run."""


_known: weakref.WeakKeyDictionary[Strategy, _TurnListener] = weakref.WeakKeyDictionary()


def let_replicas_meet(strategy: Strategy, wait: Callable[[], None]) -> str:
    """Let the replicas of a rank meet inside of compiled functions, from now on.

    Called when the first such function is compiled, before another replica runs;
    ``wait`` waits for exchanges under way. Returns why that is not possible, or an
    empty text.
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
