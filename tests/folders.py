"""The files in a folder of checkpoints, but for the lock of the job that saves."""

from __future__ import annotations

import os
from pathlib import Path

from hpcstrat.checkpoint.keep.folder import OWNER

__all__ = ["listed"]


def listed(folder: str | Path) -> list[str]:
    """Return the names in a folder."""
    return [name for name in os.listdir(folder) if name != OWNER]
