"""Tensors on GPUs in calls of the process group, used without copies to the host.

All work runs on torch's current stream, which is also CuPy's stream during a call. The
order of this stream ensures that a call reads tensors after torch's earlier kernels
have written them, and that torch's later kernels read complete results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.integrations.torch.tensors import memory_of

__all__ = ["DeviceTensors", "all_gather", "broadcast", "is_on_gpu", "reduce_scatter"]

# Types that hpcstrat's kernels and messages on GPUs support.
_TYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
    *(torch.complex64, torch.complex128),
}


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a dense tensor of numbers is in the memory of a CUDA GPU."""
    dense = tensor.layout is torch.strided
    return dense and tensor.device.type == "cuda" and tensor.dtype in _TYPES


class DeviceTensors:
    """Converts tensors of one call to GPU arrays; `written` copies results back."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, tensor: torch.Tensor) -> Array:
        """Return a contiguous array with a tensor's values."""
        return memory_of(_contiguous(tensor))

    def write(self, tensor: torch.Tensor) -> Array:
        """Return a tensor's values as an array to overwrite; then call `written`."""
        own = _contiguous(tensor)
        if own.data_ptr() != tensor.data_ptr():
            self._copies.append((tensor, own))
        return memory_of(own)

    def written(self) -> None:
        """Copy results into tensors whose arrays are copies; later calls do nothing."""
        copies, self._copies = self._copies, []
        for tensor, own in copies:
            tensor.copy_(own)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def broadcast(collectives: Any, arrays: Sequence[Array], root: int) -> None:
    """Copy one rank's arrays into the arrays of all ranks; collective over ranks."""
    found = collectives.broadcast(list(arrays), root, "broadcast")
    for array, result in zip(arrays, found, strict=True):
        array[...] = result


def all_gather(collectives: Any, own: Array, parts: Sequence[Array], what: str) -> None:
    """Copy all ranks' arrays, one after the other, into ``parts``; collective.

    Raises ValueError on this rank if ``parts`` and the arrays differ in total size.
    """
    whole = collectives.all_gather(own.reshape(-1), 0, what)
    size = sum(part.size for part in parts)
    if whole.size != size:
        raise ValueError(
            f"expected memory for the {whole.size} elements of all ranks in {what}, "
            f"found {size}; make the tensors as large as what the ranks give"
        )
    start = 0
    for part in parts:
        part.reshape(-1)[...] = whole[start : start + part.size]
        start += part.size


def reduce_scatter(
    collectives: Any, op: ReduceOp, parts: Sequence[Array], out: Array, rank: int
) -> None:
    """Reduce all parts, and copy the part of this rank into ``out``; collective.

    Every rank receives all reduced parts, so this call moves twice as many bytes as
    NCCL's reduce_scatter.
    """
    sums = collectives.batch_reduce(op, list(parts), "reduce_scatter")
    out.reshape(-1)[...] = sums[rank].reshape(-1)
