"""Callbacks of Keras on many replicas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hpcstrat.engine.options import ReduceOp
from hpcstrat.integrations.keras.py_dataset import Batches
from hpcstrat.integrations.keras.replicas import TrainingState
from hpcstrat.strategies import Strategy

__all__ = ["StopTogether", "SynchronizedCallback", "chosen", "is_watched"]

# Those that write, and change nothing on which the replicas must agree.
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
    """Return the callbacks of this replica: those that write are replica 0's."""
    if strategy.replica_id == 0:
        return callbacks
    # Several replicas that write one file would spoil it.
    return [callback for callback in callbacks if not isinstance(callback, _WRITERS)]


def is_watched(callback: Any) -> bool:
    """Whether a callback may stop the training within an epoch."""
    methods = callback.on_train_batch_end, callback.on_batch_end
    is_default = all(getattr(method, "_is_default", False) for method in methods)
    return not is_default and not isinstance(callback, _WRITERS)


def _agree(model: Any, strategy: Strategy) -> None:
    """Stop on all replicas if one stops."""
    own = np.array(int(model.stop_training))
    collectives = strategy.collectives
    total = collectives.batch_reduce(ReduceOp.SUM, own, "whether to stop training")
    model.stop_training = bool(total)


class SynchronizedCallback(keras.callbacks.Callback):
    """Lets all replicas begin and end together; behind the program's callbacks."""

    def __init__(self, state: TrainingState, strategy: Strategy, data: Any) -> None:
        super().__init__()
        self._state = state
        self._strategy = strategy
        self._data = data

    def on_train_begin(self, logs: Any = None) -> None:
        """Send replica 0's state to all, as it may have read a backup."""
        model = self.model
        steps, epochs = self.params.get("steps"), self.params.get("epochs")
        self._state.begin(f"fit of {epochs} epochs of {steps} steps")
        # Only replica 0 has read a backup: the others would begin anew.
        model._initial_epoch = self._strategy.collectives.broadcast_object(
            model._initial_epoch, 0, "first epoch"
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Tell the data which epoch begins."""
        if isinstance(self._data, Batches):
            self._data.epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop together."""
        _agree(self.model, self._strategy)


class StopTogether(keras.callbacks.Callback):
    """Lets all replicas stop within an epoch, where callbacks may; behind them."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self._strategy = strategy

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop together."""
        _agree(self.model, self._strategy)
