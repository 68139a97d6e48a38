"""Reading and writing of ``torch.save`` files with tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hpcstrat.engine.typing import Array
from hpcstrat.integrations.torch.tensors import as_tensor, memory_of

__all__ = ["read_torch", "write_torch"]


def write_torch(
    path: str, values: Mapping[str, Array], tick: Callable[[int], None]
) -> None:
    """Write values into one file, as a dict that ``load_state_dict`` accepts."""
    torch.save({name: as_tensor(value) for name, value in values.items()}, path)
    tick(sum(value.nbytes for value in values.values()))


def read_torch(path: str) -> dict[str, Array]:
    """Return a file's tensors by name; tensor ``b`` of a dict ``a`` is ``a/b``."""
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError:
        # Files in the older format cannot be memory-mapped.
        saved = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(saved, Mapping):
        raise ValueError(f"it holds a {type(saved).__name__}, not tensors by name")
    return dict(_tensors(saved))


def _tensors(saved: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Array]]:
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", memory_of(value.contiguous())
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{name}/")
