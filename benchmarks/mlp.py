"""The multi-layer perceptron that bench_frameworks.py trains in all frameworks."""

from __future__ import annotations

__all__ = ["MLP_SIZES", "MOMENTUM", "RATE", "ROWS"]

# Widths of the layers, with 5.2 million parameters.
MLP_SIZES = (784, 1536, 1536, 1024, 10)
# Number of rows in a replica's batch.
ROWS = 64
RATE, MOMENTUM = 0.01, 0.9
