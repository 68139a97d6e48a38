"""State of a Keras model, for a CheckpointManager to save and restore."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hpcstrat.checkpoint import CheckpointManager
from hpcstrat.engine.typing import Array
from hpcstrat.integrations.frameworks import variable_over
from hpcstrat.integrations.keras.distribution import owner_of
from hpcstrat.integrations.keras.replicas import (
    optimizers_of,
    seed_generators,
    value_of,
)
from hpcstrat.metrics import Log
from hpcstrat.strategies import Strategy
from hpcstrat.variables import Variable

__all__ = ["Checkpoint", "state", "weights_of"]


class _VariableCopies:
    """Copies of Keras' variables in host memory, which a CheckpointManager saves."""

    def __init__(self, find: Callable[[], dict[str, Any]], strategy: Strategy) -> None:
        self._find = find
        self.distribute_strategy = strategy
        self._held: dict[str, Variable] = {}

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return copies that have the current values of Keras' variables."""
        found = self._find()
        for name, variable in found.items():
            value = value_of(variable)
            if name not in self._held:
                # `distribute` has made the values equal on all replicas.
                self._held[name] = variable_over(
                    value, self.distribute_strategy, name, trainable=variable.trainable
                )
            else:
                # Copy in place: the manager keeps this variable from its first save on.
                np.copyto(self._held[name].component, value)
        return {name: self._held[name] for name in found}

    def checkpoint_spellings(self, name: str) -> list[str]:
        """Return the names that a variable may have in a file: only its own name."""
        return [name]

    def checkpoint_defer(
        self, name: str, value: Array, strategy: Any = None, *, is_part: bool = False
    ) -> None:
        """Raise ValueError, because the model has no variable for a saved value."""
        raise ValueError(
            f"expected a variable {name!r} in the model, found "
            f"{', '.join(self._held)}; restore into the model that was saved"
        )

    def checkpoint_restored(self, num_replicas: int, now: int) -> None:
        """Assign the restored values to Keras' variables."""
        for name, variable in self._find().items():
            variable.assign(self._held[name].component)


def weights_of(model: Any) -> dict[str, Any]:
    """Return a model's variables of weights and seeds, by their checkpoint names."""
    seeds = [generator.state for generator in seed_generators(model)]
    # Keras numbers layers in the order of their creation, which may differ between
    # processes, so names begin with an index.
    return {f"{i}/{v.name}": v for i, v in enumerate([*model.weights, *seeds])}


def state(model: Any) -> dict[str, Any]:
    """Return the state of a model, for a CheckpointManager to save.

    Not collective, except for a model that was made or compiled in a strategy's scope
    and has not been used yet: this call distributes the model.

    The state contains weights, states of layers, seeds, and all of the optimizers'
    state: momentum, numbers of steps, learning rates. The state can be restored on
    another number of replicas, and on another backend.

    Parameters
    ----------
    model : keras.Model
        A model from `distribute`, or of a strategy's scope. For any other model the
        current strategy is used.

    Returns
    -------
    dict of str to object
        Keyword arguments for `CheckpointManager` and `hpcstrat.elastic.Memory.track`:
        ``model``, and each optimizer under the name of the model's attribute, such as
        ``optimizer``.

    Examples
    --------
    >>> import keras
    >>> import hpcstrat as hs
    >>> import hpcstrat.integrations.keras as hsk
    >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> model = hsk.distribute(model, hs.get_strategy())
    >>> sorted(hsk.state(model))
    ['model', 'optimizer']
    """
    strategy = owner_of(model)

    def slots(optimizer: Any) -> dict[str, Any]:
        owners = [v.path.replace("/", "_") for v in model.weights]
        found = {}
        for index, variable in enumerate(optimizer.variables):
            kind = variable.name
            for owner in owners:
                kind = kind.removeprefix(f"{owner}_")
            found[f"{index}/{kind}"] = variable
        return found

    return {
        "model": _VariableCopies(functools.partial(weights_of, model), strategy),
        **{
            name: _VariableCopies(functools.partial(slots, optimizer), strategy)
            for name, optimizer in optimizers_of(model).items()
        },
    }


class Checkpoint(keras.callbacks.Callback):
    """A callback of ``fit`` that restores the newest checkpoint, and saves each epoch.

    Logically collective: each of the strategy's replicas must pass its own to ``fit``.

    Parameters
    ----------
    manager : CheckpointManager
        A manager that was made with the result of `state`, and with any other state to
        save. The number of a checkpoint is the number of completed epochs.
        ``keep_best`` can name values of the epoch's logs.
    asynchronous : bool
        Whether training continues while the files are written.
    log : hpcstrat.metrics.Log, optional
        Each epoch's logs are written to this log before the epoch is saved. Pass it to
        the manager, too, so that a restarted job has each epoch only once in the log.

    Examples
    --------
    >>> import tempfile
    >>> import keras
    >>> import numpy as np
    >>> import hpcstrat as hs
    >>> import hpcstrat.integrations.keras as hsk
    >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> model = hsk.distribute(model, hs.get_strategy())
    >>> manager = hs.CheckpointManager(tempfile.mkdtemp(), **hsk.state(model))
    >>> x, y = np.ones((4, 2)), np.ones((4, 1))
    >>> callbacks = [hsk.Checkpoint(manager)]
    >>> _ = model.fit(x, y, epochs=2, callbacks=callbacks, verbose=0)
    >>> history = model.fit(x, y, epochs=3, callbacks=callbacks, verbose=0)
    >>> history.epoch
    [2]
    """

    def __init__(
        self,
        manager: CheckpointManager,
        *,
        asynchronous: bool = False,
        log: Log | None = None,
    ) -> None:
        super().__init__()
        self._log = log
        self._manager = manager
        self._asynchronous = asynchronous

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the newest checkpoint, if there is one; collective."""
        # `fit` starts at this epoch; Keras' BackupAndRestore sets the same attribute.
        self.model._initial_epoch = self._manager.restore_or_initialize()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save a checkpoint; Keras calls this at the end of each epoch.

        Collective over the strategy's replicas.

        Parameters
        ----------
        epoch : int
            Number of the epoch that has ended, from 0.
        logs : dict of str to float, optional
            Values of the epoch, which are stored in the file.
        """
        if self._log is not None:
            self._log.scalars(epoch + 1, logs)
        self._manager.save(epoch + 1, metrics=logs, asynchronous=self._asynchronous)

    def on_train_end(self, logs: Any = None) -> None:
        """Wait until the files are written; collective."""
        self._manager.wait()
        if self._log is not None:
            self._log.flush()
        self.model._initial_epoch = None

    def __repr__(self) -> str:
        """Return the manager's description as text."""
        return f"<{type(self).__name__} by {self._manager!r}>"
