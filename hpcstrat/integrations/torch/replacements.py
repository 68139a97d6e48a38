"""Lines on standard error about what ``hpcstrat torch`` has set, hidden or replaced."""

from __future__ import annotations

import sys

from hpcstrat.engine.logs import is_first_rank

__all__ = ["tell"]

_told: set[str] = set()


def tell(text: str) -> None:
    """Print a line on rank 0, once for each text; not collective."""
    if is_first_rank() and text not in _told:
        _told.add(text)
        sys.stderr.write(f"hpcstrat torch: {text}\n")
        sys.stderr.flush()
