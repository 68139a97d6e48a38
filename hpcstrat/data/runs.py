"""Runs of neighbouring rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpcstrat.engine.typing import Array

__all__ = ["runs_of"]


def runs_of(rows: Array, step: int = 1) -> Iterator[tuple[int, int]]:
    """Give the ends of runs of rows, ``step`` apart, as places in ``rows``."""
    if not len(rows):
        return
    ends = np.flatnonzero(np.diff(rows) != step) + 1
    start = 0
    for end in ends.tolist():
        yield start, end
        start = end
    yield start, len(rows)
