"""Replacements for Horovod's modules: a program changes only its import line."""

from __future__ import annotations

from typing import NoReturn

__all__: list[str] = []


def _refuse(name: str) -> NoReturn:
    """Raise ImportError for a module of Horovod that hpcstrat does not replace."""
    raise ImportError(
        f"expected horovod.torch, the only module of Horovod that hpcstrat replaces, "
        f"found {name}; train with model.fit of Keras 3 on its TensorFlow backend, and "
        "hpcstrat.integrations.keras.distribute(model, strategy), or with the strategy "
        "of hpcstrat.integrations.tf_distribute"
    )
