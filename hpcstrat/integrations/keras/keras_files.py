"""Conversion between a checkpoint's values and Keras' files of models or weights.

A checkpoint names a weight by its index in the model, because the numbers in Keras'
names of layers depend on all layers that a process has made. So a conversion needs the
model's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from hpcstrat.engine.typing import Array
from hpcstrat.integrations.keras.keras_state import weights_of
from hpcstrat.integrations.keras.replicas import value_of

__all__ = ["read_keras", "write_keras"]

_WEIGHTS = ".weights.h5"


def _loaded(model: str | None) -> Any:
    """Return the model that a ``.keras`` or ``.json`` file describes."""
    if model is None:
        raise ValueError(
            "expected the layers of the model, found none; give --model with a .keras "
            "file, or with a .json file of what model.to_json() returns"
        )
    if model.endswith(".json"):
        with open(model, encoding="utf-8") as file:
            return keras.models.model_from_json(file.read())
    return keras.models.load_model(model, compile=False)


def write_keras(
    path: str,
    values: Mapping[str, Array],
    tick: Callable[[int], None],
    *,
    model: str | None = None,
) -> None:
    """Write a model, or only its weights if the path ends in ``.weights.h5``."""
    loaded = _loaded(model)
    own = weights_of(loaded)
    faults = [f"{name} missing" for name in own.keys() - values.keys()]
    faults += [f"{name} unknown" for name in values.keys() - own.keys()]
    faults += [
        f"{name} of {list(values[name].shape)} for {list(own[name].shape)}"
        for name in own.keys() & values.keys()
        if tuple(values[name].shape) != tuple(own[name].shape)
    ]
    if faults:
        raise ValueError(
            f"expected the weights of the model in {model}, found "
            f"{', '.join(sorted(faults))}; give the model that was saved"
        )
    for name, variable in own.items():
        variable.assign(np.asarray(values[name]))
        tick(values[name].nbytes)
    if path.endswith(_WEIGHTS):
        loaded.save_weights(path, overwrite=True)
    else:
        loaded.save(path, overwrite=True)


def read_keras(path: str, *, model: str | None = None) -> dict[str, Array]:
    """Return the weights in a file, by the names that they have in checkpoints."""
    if path.endswith(_WEIGHTS):
        loaded = _loaded(model)
        loaded.load_weights(path)
    else:
        loaded = _loaded(path)
    return {name: value_of(variable) for name, variable in weights_of(loaded).items()}
