"""Checks of a model before it is distributed, to reject unsupported options."""

from __future__ import annotations

import sys
from typing import Any

import keras

from hpcstrat.strategies import Strategy

__all__ = [
    "keras_version",
    "require_distributable",
    "require_one_step",
    "require_strategy",
]


def keras_version() -> tuple[int, ...]:
    """Return the major and minor number of Keras' version."""
    return tuple(map(int, keras.__version__.split(".")[:2]))


def require_strategy(strategy: Any) -> None:
    """Raise ValueError if the argument is not a strategy of hpcstrat."""
    if not isinstance(strategy, Strategy):
        raise ValueError(
            f"expected a strategy of hpcstrat, found {type(strategy).__name__}; pass "
            "hpcstrat.MultiWorkerMirroredStrategy(), for example"
        )


def require_distributable(model: Any, *, is_compiled: bool = True) -> None:
    """Raise an error for a model that would fail later, or give wrong results.

    With ``is_compiled=False``, accept also a model that is not compiled.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"expected a keras.Model, found {type(model).__name__}; pass the model"
        )
    if (is_compiled and not model.compiled) or (
        model.compiled and model.optimizer is None
    ):
        raise ValueError(
            "expected a model that was compiled with an optimizer, found one without; "
            "call model.compile before distribute"
        )
    layers = model._flatten_layers()
    unbuilt = [layer.name for layer in layers if not layer.built]
    if unbuilt:
        raise ValueError(
            f"expected a model that is built, found {', '.join(unbuilt[:3])} without "
            "weights; call model.build with the shape of a batch, or the model on one"
        )
    synchronized = [
        layer.name for layer in layers if getattr(layer, "synchronized", False)
    ]
    if synchronized:
        raise NotImplementedError(
            "expected normalization over this replica's rows, found synchronized=True "
            f"in {synchronized[0]}; leave it out, or use the torch integration's "
            "SyncBatchNorm in a model of PyTorch"
        )
    _refuse_others()
    backend = keras.config.backend()
    if backend == "tensorflow" and model.jit_compile:
        raise ValueError(
            "expected jit_compile=False with TensorFlow, whose XLA cannot call MPI, "
            "found True; pass jit_compile=False to model.compile"
        )


def require_one_step(model: Any) -> None:
    """Raise NotImplementedError for several steps per execution with TensorFlow.

    With several steps, TensorFlow reads batches ahead, in another thread. Reading a
    batch and a step both make collective calls, which would then mix in a different
    order on each replica.
    """
    count = model.steps_per_execution if model.compiled else 1
    if keras.config.backend() == "tensorflow" and count > 1:
        raise NotImplementedError(
            "expected steps_per_execution=1 with TensorFlow for an iterable or a "
            f"stream, found {count}; leave it out, or pass arrays, or a "
            "hpcstrat.Dataset with random access"
        )


def _refuse_others() -> None:
    """Raise RuntimeError if a library would combine gradients a second time."""
    found = keras.distribution.distribution()
    if found is not None:
        raise RuntimeError(
            f"expected no distribution of Keras itself, found {type(found).__name__}, "
            "with which gradients would be combined twice; call "
            "keras.distribution.set_distribution(None)"
        )
    torch = sys.modules.get("torch.distributed")
    if keras.config.backend() != "torch" or torch is None or keras_version() < (3, 16):
        return
    if torch.is_available() and torch.is_initialized() and torch.get_world_size() > 1:
        raise RuntimeError(
            f"expected no process group of torch.distributed, found one, and Keras "
            f"{keras.__version__} combines gradients over it by itself; call "
            "torch.distributed.destroy_process_group() before distribute"
        )
