"""Converts tensors to arrays in host memory, without a copy if that is possible."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from hpcstrat.engine.typing import Array

__all__ = ["HostTensors", "require_numbers"]

# Types that NumPy has only with ml_dtypes: for each, a torch type of the same size, and
# the type's name in ml_dtypes.
_FOREIGN = {torch.bfloat16: (torch.int16, "bfloat16")}
for _name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
    if hasattr(torch, _name):
        _FOREIGN[getattr(torch, _name)] = torch.uint8, _name


def require_numbers(dtype: Any) -> None:
    """Raise an error for types whose values can be sent, but not added."""
    if dtype not in _FOREIGN or (dtype is torch.bfloat16 and find_spec("ml_dtypes")):
        return
    if dtype is torch.bfloat16:
        raise ImportError(
            "expected the package ml_dtypes to reduce bfloat16, found none; install "
            "it, or reduce float32"
        )
    raise NotImplementedError(
        f"expected a type that can be added, found {dtype}; reduce bfloat16 or float32"
    )


class HostTensors:
    """Converts tensors of one call to host arrays; `written` copies results back."""

    def __init__(self) -> None:
        self._copies: list[tuple[Any, Any]] = []

    def read(self, tensor: Any) -> Array:
        """Return a contiguous array of a tensor's values; booleans become uint8."""
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"expected a dense tensor, found layout {tensor.layout}; call "
                "to_dense() first (only all_reduce takes sparse tensors)"
            )
        # For a tensor on a GPU, `cpu` waits for the GPU's stream. A contiguous host
        # tensor is not copied.
        own = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        plain, name = _FOREIGN.get(own.dtype, (own.dtype, ""))
        if plain is torch.bool:
            plain = torch.uint8
        if not own.numel():
            array = np.empty(tuple(own.shape), _numpy_type(plain))
        else:
            array = np.asarray(_TensorMemory(own, _numpy_type(plain)))
        return _named(array, name) if name else array

    def write(self, tensor: Any) -> Array:
        """Return a tensor's values as an array to overwrite; then call `written`."""
        array = self.read(tensor)
        if array.ctypes.data != tensor.data_ptr() or tensor.device.type != "cpu":
            self._copies.append((tensor, array))
        return array

    def written(self) -> None:
        """Copy results into tensors whose arrays are copies; later calls do nothing."""
        copies, self._copies = self._copies, []
        for tensor, array in copies:
            # torch cannot read ml_dtypes' types: view them as a type of the same size.
            plain = _FOREIGN.get(tensor.dtype, (tensor.dtype,))[0]
            plain = torch.uint8 if plain is torch.bool else plain
            values = torch.from_numpy(array.view(_numpy_type(plain)))
            tensor.copy_(values.view(tensor.dtype))


class _TensorMemory:
    """Gives NumPy access to a tensor's memory; arrays keep the tensor alive.

    `torch.Tensor.numpy` is not used, because after it the storage cannot be resized,
    and FSDP resizes storages to free memory.
    """

    def __init__(self, tensor: Any, dtype: np.dtype[Any]) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "typestr": dtype.str,
        }


@functools.lru_cache(maxsize=64)
def _numpy_type(dtype: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = torch.empty(0, dtype=dtype).numpy().dtype
    return found


def _named(array: Array, name: str) -> Array:
    """Return the array as ml_dtypes' type ``name``, or unchanged without ml_dtypes."""
    try:
        import ml_dtypes
    except ImportError:
        return array
    named: Array = array.view(getattr(ml_dtypes, name))
    return named
