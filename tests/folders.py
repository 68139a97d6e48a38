"""What is in a folder of checkpoints, without the lock of the job that saves there."""

from __future__ import annotations

import os
from pathlib import Path

from hpcstrat.checkpoint.keep.owner import OWNER

__all__ = ["listed"]


def listed(folder: str | Path) -> list[str]:
    """Return the names in a folder."""
    return [name for name in os.listdir(folder) if name != OWNER]
