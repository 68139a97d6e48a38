"""A function that makes the variables of tests."""

from __future__ import annotations

from typing import Any

import numpy as np

import hpcstrat as hs

START = np.array([[1.0, -2.0], [4.0, 8.0]])


def make(strategy: Any, value: Any = START, **options: Any) -> Any:
    with strategy.scope():
        return hs.Variable(value, **options)
