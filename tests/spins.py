"""Shorter polling of waiting ranks, for jobs that run concurrently."""

from __future__ import annotations

from hpcstrat.engine.channel import waiting

__all__ = ["keep_spins_short"]


def keep_spins_short() -> None:
    """Let waiting ranks poll only briefly before they sleep.

    Concurrent jobs need the core of a waiting rank. Numerical results do not change.
    """
    waiting._MOST_SPIN_SECONDS = waiting._LEAST_SPIN_SECONDS
