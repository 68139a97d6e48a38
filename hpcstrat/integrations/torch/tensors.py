"""Memory of tensors as arrays that the library's calls take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hpcstrat.engine.arrays.kinds import as_array, is_device
from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.streams import borrowed_stream
from hpcstrat.engine.typing import Array
from hpcstrat.errors import HpcstratError

__all__ = ["as_tensor", "memory_of", "takes_hooks", "torchs_stream"]


@contextmanager
def torchs_stream() -> Iterator[None]:
    """Let calls of the library take their place in torch's current stream of the GPU.

    Also a decorator. They follow CuPy's current stream, of which torch knows nothing:
    results would be read on torch's, and memory used again, before they are there.
    """
    if not (library.is_loaded() and torch.cuda.is_initialized()):
        yield
        return
    stream = torch.cuda.current_stream()
    with borrowed_stream(stream.cuda_stream, stream.device_index):
        yield


@contextmanager
def takes_hooks(parameter: torch.Tensor) -> Iterator[None]:
    """Let a frozen parameter take hooks, which serve it once it is thawed."""
    trained = parameter.requires_grad
    # torch refuses hooks of a tensor that needs no gradient.
    parameter.requires_grad_(True)
    yield
    parameter.requires_grad_(trained)


def _bfloat16() -> Any:
    """Return the type that NumPy has for it only where ml_dtypes is installed."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise HpcstratError(
            "expected ml_dtypes for tensors of bfloat16, found none; install it: "
            "pip install ml_dtypes"
        ) from error
    return ml_dtypes.bfloat16


def memory_of(tensor: torch.Tensor) -> Array:
    """Return the memory of a dense tensor as an array, never a copy."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        # CuPy's, by DLPack.
        return as_array(tensor)
    if tensor.dtype is torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(_bfloat16())
    own: Array = tensor.numpy()
    return own


def as_tensor(array: Array) -> torch.Tensor:
    """Return an array as a tensor over the same memory."""
    if array.dtype.name == "bfloat16" and not is_device(array):
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.as_tensor(array)
