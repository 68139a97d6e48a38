"""Tensors on GPUs in calls of the process group, used without copies to the host.

All work runs on torch's current stream, which is also CuPy's stream during a call. So
torch's kernels before the call have written the tensors, its kernels after the call
read the results, and torch reuses the tensors' memory in the order of this stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.integrations.torch.tensors import memory_of

__all__ = ["DeviceTensors", "all_gather", "broadcast", "is_on_gpu", "reduce_scatter"]

# Types of tensors that hpcstrat's kernels and messages support.
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
        """Return an array of a tensor's values, in which a call stores its results.

        `written` copies the results into the tensor if the array is not its own memory.
        """
        own = _contiguous(tensor)
        if own.data_ptr() != tensor.data_ptr():
            self._copies.append((tensor, own))
        return memory_of(own)

    def written(self) -> None:
        """Copy results into non-contiguous tensors; a second call does nothing."""
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

    Raises ValueError on this rank if the sizes of ``parts`` and of the arrays differ.
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

    All ranks receive all reduced parts, so this call moves twice the bytes of NCCL's
    reduce_scatter.
    """
    sums = collectives.batch_reduce(op, list(parts), "reduce_scatter")
    out.reshape(-1)[...] = sums[rank].reshape(-1)
