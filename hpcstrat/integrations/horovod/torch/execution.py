"""Functions that carry out requests of one kind, which all ranks have submitted.

Each function is collective over the ranks, which have already compared the requests.
``batch`` and the returned list have one element for each request. Where possible, one
collective call serves all requests of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.integrations.horovod.torch.submissions import Submissions
from hpcstrat.integrations.torch.host_tensors import HostTensors
from hpcstrat.integrations.torch.reduction_kinds import Reduction
from hpcstrat.integrations.torch.tensors import as_tensor, memory_of

__all__ = [
    "Reduced",
    "all_gather",
    "all_gather_objects",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "broadcast_objects",
    "meet",
    "reduce_scatter",
]


@dataclass
class Reduced:
    """A tensor to reduce, and the factors to multiply it by before and afterwards."""

    tensor: torch.Tensor
    reduction: Reduction
    before: float = 1.0
    after: float = 1.0


def _scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply a tensor in place: integers in float64, 2-byte types in float32."""
    if factor == 1:
        return
    if not tensor.is_floating_point() and not tensor.is_complex():
        tensor.copy_(tensor.double() * factor)
    elif tensor.dtype.itemsize == 2:
        tensor.copy_(tensor.float() * factor)
    else:
        tensor.mul_(factor)


def all_reduce(job: Submissions, batch: list[list[Reduced]]) -> list[Any]:
    """Reduce tensors in place: one call for each operation."""
    everything = [one for some in batch for one in some]
    arrays: dict[ReduceOp, list[Array]] = {}
    for one in everything:
        _scale(one.tensor, one.before)
        reduction = one.reduction
        if reduction.op is not None:
            arrays.setdefault(reduction.op, []).append(memory_of(one.tensor))
        else:
            host = HostTensors()
            array = host.write(one.tensor)
            what = f"allreduce({reduction.name})"
            job.parts.combine(reduction.function, array, what)
            host.written()
    for op, some in arrays.items():
        job.collectives.batch_reduce(op, some, "allreduce", out=some)
    for one in everything:
        if one.reduction.averages:
            one.reduction.conclude(memory_of(one.tensor))
        _scale(one.tensor, one.after)
    return [[one.tensor for one in some] for some in batch]


def _rows_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor as bytes, so that rows of any type can be sent."""
    # For a conjugate or negated tensor torch may keep the original bytes and a mark.
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Set the stride, which may be any number along a dimension of length 1.
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    width = math.prod(plain.shape[1:]) * plain.itemsize
    return flat.view(len(plain) if plain.dim() else 1, width)


def _from_bytes(rows: torch.Tensor, like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Convert rows of bytes to a tensor of shape ``shape`` and of ``like``'s type."""
    flat = rows.as_strided((rows.numel(),), (1,))
    return flat.view(like.dtype).view(shape)


def all_gather(job: Submissions, batch: list[list[torch.Tensor]]) -> list[Any]:
    """Return for each tensor all ranks' rows, concatenated; row counts may differ."""
    tensors = [tensor for one in batch for tensor in one]
    arrays = [memory_of(_rows_of_bytes(tensor)) for tensor in tensors]
    gathered = iter(job.collectives.all_gather(arrays, 0, "allgather"))

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        rows = as_tensor(next(gathered))
        return _from_bytes(rows, tensor, len(rows), *tensor.shape[1:])

    return [[whole(tensor) for tensor in one] for one in batch]


def broadcast(
    job: Submissions, batch: list[tuple[torch.Tensor, torch.Tensor, int]]
) -> list[Any]:
    """Copy the root's tensors into all ranks' tensors, in one call."""
    root = batch[0][2]
    arrays = [memory_of(_rows_of_bytes(tensor)) for tensor, _, _ in batch]
    received = job.collectives.broadcast(arrays, root, "broadcast")
    for (tensor, out, _), rows in zip(batch, received, strict=True):
        if job.strategy.replica_id == root:
            out.copy_(tensor)
        else:
            out.copy_(_from_bytes(as_tensor(rows), tensor, *tensor.shape))
    return [out for _, out, _ in batch]


def all_to_all(
    job: Submissions, batch: list[tuple[torch.Tensor, list[int]]]
) -> list[Any]:
    """Send rows to each rank; return pairs: received rows, and a count by sender."""
    own = np.array([splits for _, splits in batch])
    size = job.collectives.size
    table = np.empty((size, *own.shape), own.dtype)
    # Exchange the numbers of rows first, because a rank knows only how many rows it
    # sends, not how many it receives.
    job.moves.all_gather_into(own, list(table), "splits of alltoall")
    counts = table[:, :, job.strategy.replica_id]
    results = []
    for index, (tensor, splits) in enumerate(batch):
        host, rows = HostTensors(), _rows_of_bytes(tensor)
        sends = _cut(host.read(rows), splits)
        received = counts[:, index].tolist()
        came = rows.new_empty((sum(received), rows.shape[1]))
        job.moves.all_to_all(sends, _cut(host.write(came), received), "alltoall")
        host.written()
        whole = _from_bytes(came, tensor, len(came), *tensor.shape[1:])
        results.append((whole, received))
    return results


def _cut(array: Array, lengths: list[int]) -> list[Array]:
    """Split rows into consecutive parts, one for each rank."""
    ends = np.cumsum(lengths)
    return [array[end - n : end] for end, n in zip(ends, lengths, strict=True)]


def reduce_scatter(job: Submissions, batch: list[list[Reduced]]) -> list[Any]:
    """Reduce tensors; return only this rank's part of the rows of each result."""
    return [[_scattered(job, one) for one in some] for some in batch]


def _scattered(job: Submissions, one: Reduced) -> torch.Tensor:
    size, rank = job.collectives.size, job.strategy.replica_id
    tensor, reduction, host = one.tensor, one.reduction, HostTensors()
    _scale(tensor, one.before)
    # If the rows cannot be divided evenly, the first ranks get one more row.
    whole, left = divmod(len(tensor), size)
    lengths = [whole + (number < left) for number in range(size)]
    part = tensor.new_empty((lengths[rank], *tensor.shape[1:]))
    array = host.write(part)
    job.parts.reduce_scatter(
        reduction.function,
        _cut(host.read(tensor), lengths),
        array,
        f"reducescatter({reduction.name})",
        divisor=reduction.divisor,
    )
    reduction.conclude(array)
    host.written()
    _scale(part, one.after)
    return part


def broadcast_objects(job: Submissions, batch: list[tuple[Any, int]]) -> list[Any]:
    """Return the root's object of each request, on all ranks."""
    return [
        job.collectives.broadcast_object(value, root, "broadcast_object")
        for value, root in batch
    ]


def all_gather_objects(job: Submissions, batch: list[Any]) -> list[Any]:
    """Return for each request a list of all ranks' objects, on all ranks."""
    return [
        job.collectives.all_gather_object(value, "allgather_object") for value in batch
    ]


def meet(_job: Submissions, batch: list[None]) -> list[Any]:
    """Do nothing: all ranks have submitted the barrier when this function is called."""
    return batch
