"""Jobs of hundreds of strategies: without the memory and cores that each might take."""

from __future__ import annotations

from hpcstrat.channel import places, waiting

__all__ = ["keep_rings_small"]


def keep_rings_small() -> None:
    """Let strategies that are made from here on reserve little shared memory.

    Two ranks on cores that share no cache take 128 MiB, for which a strategy needs
    longer than for all that a small program does with it. Nor do they look for long
    before they nap: jobs run side by side, and others need the core. Results are the
    same.
    """
    places._are_apart = lambda *_: False
    waiting._MOST_SPIN_SECONDS = waiting._LEAST_SPIN_SECONDS
