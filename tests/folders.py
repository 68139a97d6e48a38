"""Listing of a checkpoint folder without the lock file of the saving job."""

from __future__ import annotations

import os
from pathlib import Path

from hpcstrat.checkpoint.keep.folder import OWNER

__all__ = ["listed"]


def listed(folder: str | Path) -> list[str]:
    """Return the names in a folder, without the lock file."""
    return [name for name in os.listdir(folder) if name != OWNER]
