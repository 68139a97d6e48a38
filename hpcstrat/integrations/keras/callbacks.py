"""Callbacks of Keras, made to work with many replicas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hpcstrat.engine.options import ReduceOp
from hpcstrat.integrations.keras.py_dataset import Batches
from hpcstrat.integrations.keras.replicas import TrainingState
from hpcstrat.strategies import Strategy

__all__ = ["StopTogether", "SynchronizedCallback", "chosen", "is_watched"]

# Callbacks that only write files or output, and change nothing that replicas share.
_NAMES = (
    "BackupAndRestore",
    "CSVLogger",
    "ModelCheckpoint",
    "OrbaxCheckpoint",
    "ProgbarLogger",
    "RemoteMonitor",
    "TensorBoard",
)
_WRITERS = tuple(
    found for name in _NAMES if (found := getattr(keras.callbacks, name, None))
)


def chosen(callbacks: list[Any], strategy: Strategy) -> list[Any]:
    """Return this replica's callbacks; only replica 0 keeps those that write files."""
    if strategy.writes:
        return callbacks
    # Several replicas that write the same file would corrupt it.
    return [callback for callback in callbacks if not isinstance(callback, _WRITERS)]


def is_watched(callback: Any) -> bool:
    """Return whether a callback may stop the training within an epoch."""
    methods = callback.on_train_batch_end, callback.on_batch_end
    is_default = all(getattr(method, "_is_default", False) for method in methods)
    return not is_default and not isinstance(callback, _WRITERS)


def _agree(model: Any, strategy: Strategy) -> None:
    """Stop training on all replicas if any replica stops; collective."""
    own = np.array(int(model.stop_training))
    collectives = strategy.collectives
    total = collectives.batch_reduce(ReduceOp.SUM, own, "whether to stop training")
    model.stop_training = bool(total)


class SynchronizedCallback(keras.callbacks.Callback):
    """Makes replicas start with equal state, and stop after the same epoch.

    This callback runs after the user's callbacks.
    """

    def __init__(self, state: TrainingState, strategy: Strategy, data: Any) -> None:
        super().__init__()
        self._state = state
        self._strategy = strategy
        self._data = data
        self._first_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Set all replicas' state to replica 0's, which may be from a backup file."""
        model = self.model
        steps, epochs = self.params.get("steps"), self.params.get("epochs")
        self._state.begin(f"fit of {epochs} epochs of {steps} steps")
        # Without this, other replicas, which read no backup, would start at epoch 0.
        model._initial_epoch = self._strategy.collectives.broadcast_object(
            model._initial_epoch, 0, "first epoch"
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Tell `Batches` the epoch, which determines the order of its rows."""
        if self._first_epoch is None:
            self._first_epoch = epoch
        if isinstance(self._data, Batches):
            anew = self._data.begins_anew
            self._data.epoch = epoch - self._first_epoch if anew else epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop all replicas after this epoch if one replica stops."""
        _agree(self.model, self._strategy)


class StopTogether(keras.callbacks.Callback):
    """Makes all replicas stop at the same batch; runs after the user's callbacks."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self._strategy = strategy

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop all replicas after this batch if one replica stops."""
        _agree(self.model, self._strategy)
