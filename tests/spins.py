"""Jobs side by side: without the looks that each might take before it naps."""

from __future__ import annotations

from hpcstrat.engine.channel import waiting

__all__ = ["keep_spins_short"]


def keep_spins_short() -> None:
    """Let ranks look for others for a moment only before they nap.

    Where jobs run side by side, others need the core. Results are the same.
    """
    waiting._MOST_SPIN_SECONDS = waiting._LEAST_SPIN_SECONDS
