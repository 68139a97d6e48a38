"""Keras models on replicas: fit, evaluate and predict, on PyTorch, JAX, TensorFlow."""

from hpcstrat.integrations.frameworks import require

# Check before the import, so that a missing or old keras is reported in one sentence.
require("keras", "3.10")

# ruff: noqa: E402
from hpcstrat.integrations.keras.distribution import distribute
from hpcstrat.integrations.keras.keras_state import Checkpoint, state
from hpcstrat.integrations.keras.py_dataset import Batches

__all__ = ["Batches", "Checkpoint", "distribute", "state"]
