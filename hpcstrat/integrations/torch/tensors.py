"""Conversions between torch tensors and arrays over the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import as_array, is_device
from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.streams import borrowed_stream
from hpcstrat.engine.typing import Array
from hpcstrat.errors import HpcstratError

__all__ = [
    "as_tensor",
    "gradient_of",
    "memory_of",
    "rows_of",
    "takes_hooks",
    "torchs_stream",
]


@contextmanager
def torchs_stream() -> Iterator[None]:
    """Make calls of hpcstrat use torch's current stream of the GPU.

    The function can also be used as a decorator. Without it, hpcstrat's kernels run on
    CuPy's current stream. Torch does not wait for that stream, so torch's kernels could
    read results, and reuse memory, too early.
    """
    if not (library.is_loaded() and torch.cuda.is_initialized()):
        yield
        return
    stream = torch.cuda.current_stream()
    with borrowed_stream(stream.cuda_stream, stream.device_index):
        yield


@contextmanager
def takes_hooks(parameter: torch.Tensor) -> Iterator[None]:
    """Allow hooks on a frozen parameter; the hooks run after it is unfrozen."""
    trained = parameter.requires_grad
    # torch raises an error for hooks on a tensor that needs no gradient.
    parameter.requires_grad_(True)
    yield
    parameter.requires_grad_(trained)


def _bfloat16() -> Any:
    """Return NumPy's type for bfloat16, which ml_dtypes defines."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise HpcstratError(
            "expected ml_dtypes for tensors of bfloat16, found none; install it: "
            "pip install ml_dtypes"
        ) from error
    return ml_dtypes.bfloat16


def memory_of(tensor: torch.Tensor) -> Array:
    """Return an array over the memory of a dense tensor, without a copy."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        # A CuPy array, converted by DLPack.
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


def rows_of(
    gradient: torch.Tensor | None, parameter: torch.Tensor, name: str
) -> IndexedSlices:
    """Return the rows of a parameter's sparse gradient, or no rows if it is None."""
    shape = tuple(parameter.shape)
    if gradient is None:
        indices = torch.zeros(0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_zeros((0, *shape[1:]))
        return IndexedSlices(memory_of(values), memory_of(indices), shape)
    if gradient.sparse_dim() != 1:
        raise ValueError(
            f"expected a sparse gradient of {name!r} with one index for each row, "
            f"found {gradient.sparse_dim()} indices for each value; make it dense"
        )
    gradient = gradient.coalesce()
    values, indices = gradient.values(), gradient.indices()[0]
    return IndexedSlices(memory_of(values), memory_of(indices), shape)


def gradient_of(rows: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return rows as a sparse gradient of a parameter."""
    # Clone, because coalesce returns some tensors unchanged, such as a tensor without
    # rows. The next backward enlarges such a tensor, but cannot enlarge NumPy's memory.
    made: torch.Tensor = torch.sparse_coo_tensor(
        as_tensor(rows.indices).to(parameter.device)[None].clone(),
        as_tensor(rows.values).to(parameter.device).clone(),
        parameter.shape,
        # torch warns if this argument is missing.
        check_invariants=False,
    )
    return made.coalesce()
