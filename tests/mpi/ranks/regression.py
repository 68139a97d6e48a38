"""The linear model that the tests of optimizers fit."""

from __future__ import annotations

from typing import Any

import numpy as np

RNG = np.random.default_rng(11)
ROWS, FEATURES = 37, 4
X = RNG.standard_normal((ROWS, FEATURES))
Y = X @ RNG.standard_normal((FEATURES, 3)) + 0.1 * RNG.standard_normal((ROWS, 3))


def gradients(weights: Any, bias: Any, x: Any, y: Any, size: int) -> Any:
    """Return losses of each row, and gradients of their mean over ``size`` rows."""
    residual = x @ weights + bias - y
    losses = (residual**2).sum(axis=1)
    return losses, 2 * x.T @ residual / size, 2 * residual.sum(axis=0) / size
