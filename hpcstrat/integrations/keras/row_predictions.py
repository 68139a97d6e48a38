"""Predictions of all rows; each replica computes the predictions of its own rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hpcstrat.data import Dataset
from hpcstrat.data.batches import share, writable
from hpcstrat.data.sources import Columns
from hpcstrat.integrations.keras.dealt_batches import DealtBatches
from hpcstrat.strategies import Strategy

__all__ = ["Predictions"]


class Predictions:
    """Collective methods that return predictions for the rows of all replicas."""

    def __init__(self, model: Any, strategy: Strategy) -> None:
        self._model = model
        self._strategy = strategy

    def of_columns(self, columns: Columns, function: Callable[[Any], Any]) -> Any:
        """Call a function on this rank's rows; return all ranks' results, in order."""
        count, rows = self._strategy.num_replicas_in_sync, columns.num_rows
        found = [
            _of_share(columns, function, *share(rows, count, replica))
            for replica in self._strategy.local_replicas
        ]
        return self.gathered(_concatenated(found))

    def of_batches(self, dataset: Dataset, steps: int | None) -> Any:
        """Return the predictions for all batches of a dataset."""
        found = []
        for batch in dataset.take(-1 if steps is None else steps):
            x = batch[0] if isinstance(batch, tuple) else batch
            found.append(self._model.predict_on_batch(x))
        return _concatenated(found)

    def of_dealt(self, batches: DealtBatches, steps: int | None) -> Any:
        """Return the predictions for batches that are divided among the replicas."""
        alone = type(self._model).predict_on_batch
        found = []
        # Keras ends an epoch before the first one, too.
        batches.on_epoch_end()
        batches.on_epoch_begin()
        for batch in itertools.islice(batches.elements(), steps):
            rows = keras.tree.flatten(batch[0])[0].shape[0]
            own = alone(self._model, keras.tree.map_structure(_at_least_one, batch[0]))
            own = keras.tree.map_structure(lambda part, n=rows: part[:n], own)
            found.append(self.gathered(own))
        batches.on_epoch_end()
        return _concatenated(found)

    def gathered(self, own: Any) -> Any:
        """Return the predictions of all replicas, in replica order."""
        return self._strategy.collectives.all_gather(own, 0, "predict")


def _of_share(
    columns: Columns, function: Callable[[Any], Any], first: int, last: int
) -> Any:
    """Return a function's results for the rows of one replica."""
    # Keras cannot predict without rows: pass at least one row, and drop its result.
    least = min(max(last, first + 1), columns.num_rows)
    found = function(writable(columns.read(slice(least - max(last - first, 1), least))))
    return keras.tree.map_structure(lambda part: part[: last - first], found)


def _at_least_one(array: Any) -> Any:
    """Return an array, or one row of zeros if it is empty: Keras needs a row."""
    return array if len(array) else np.zeros((1, *array.shape[1:]), array.dtype)


def _concatenated(found: list[Any]) -> Any:
    if len(found) == 1:
        return found[0]
    return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *found)
