"""Horovod's calls that move rows of tensors between ranks, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpcstrat.integrations.horovod.torch import execution
from hpcstrat.integrations.horovod.torch.allreduce_calls import (
    Operation,
    grouped_allreduce,
    require_known,
    submit_reduction,
)
from hpcstrat.integrations.horovod.torch.basics import (
    global_process_set,
    rank,
    require_all_ranks,
    size,
    submissions,
)
from hpcstrat.integrations.horovod.torch.call_handles import (
    compressed,
    describe,
    differentiable,
    first,
    require_rows,
    synchronize,
)
from hpcstrat.integrations.horovod.torch.compression import Compression
from hpcstrat.integrations.horovod.torch.submissions import Submission

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
]

_ALL = global_process_set


def _start_allgather(
    kind: str,
    tensors: Sequence[torch.Tensor],
    conclude: Any,
    name: str | None = None,
    process_set: Any = _ALL,
) -> Submission:
    require_all_ranks(process_set)
    require_rows(tensors)
    words = describe(tensors, lengths=False)
    own, gather = [t.detach() for t in tensors], execution.all_gather
    return submissions().submit(kind, name, words, gather, own, conclude=conclude)


def allgather_async(tensor: torch.Tensor, *args: Any, **options: Any) -> Submission:
    """Submit `allgather`, with its arguments."""
    return _start_allgather("allgather", [tensor], first, *args, **options)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], *args: Any, **options: Any
) -> Submission:
    """Submit `grouped_allgather`, with its arguments."""
    return _start_allgather("grouped_allgather", tensors, list, *args, **options)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = _ALL
) -> torch.Tensor:
    """Return the rows of all ranks' tensors, which may be more on some."""
    return _allgather("allgather", [tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = _ALL
) -> list[torch.Tensor]:
    """Return the rows of all ranks' tensors, of several at a time."""
    return _allgather("grouped_allgather", tensors, name, process_set)


def _allgather(
    kind: str, tensors: Sequence[torch.Tensor], name: str | None, process_set: Any
) -> list[torch.Tensor]:
    def call(own: Any) -> Any:
        return synchronize(_start_allgather(kind, own, list, name, process_set))

    def gradient(*gradients: Any) -> Any:
        means = grouped_allreduce(gradients)
        # Ranks may have other numbers of rows: where its own begin, all lengths say.
        lengths = allgather(torch.tensor([[len(tensor) for tensor in tensors]]))
        starts = lengths[: rank()].sum(0).tolist()
        return [
            mean[start : start + len(tensor)]
            for mean, start, tensor in zip(means, starts, tensors, strict=True)
        ]

    return differentiable(call, gradient, tensors)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: Operation, process_set: Any = _ALL
) -> Callable[[], torch.Tensor]:
    """Submit a sparse tensor; returns a function that waits for the sum or average."""
    require_known(op)
    indices = tensor._indices().t().contiguous()
    parts = [
        allgather_async(indices, f"{name}.indices", process_set),
        allgather_async(tensor._values(), f"{name}.values", process_set),
    ]

    def handle() -> torch.Tensor:
        places, values = map(synchronize, parts)
        if op is Operation.Average:
            values = values / size()
        return torch.sparse_coo_tensor(
            places.t(), values, tensor.shape, check_invariants=False
        )

    return handle


def _start_reducescatter(  # noqa: PLR0917 - Horovod's order
    kind: str,
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Operation | None = None,
    process_set: Any = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **more: Any,
) -> Submission:
    factors = prescale_factor, postscale_factor
    return submit_reduction(
        kind, tensors, name, op, factors, process_set=process_set, **more
    )


def reducescatter_async(tensor: torch.Tensor, *args: Any, **options: Any) -> Submission:
    """Submit `reducescatter`, with its arguments but for ``compression``."""
    kind = "reducescatter"
    return _start_reducescatter(kind, [tensor], *args, conclude=first, **options)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor], *args: Any, **options: Any
) -> Submission:
    """Submit `grouped_reducescatter`, with its arguments but for ``compression``."""
    kind = "grouped_reducescatter"
    return _start_reducescatter(kind, tensors, *args, conclude=list, **options)


def reducescatter(  # noqa: PLR0917
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Operation | None = None,
    process_set: Any = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduced tensor."""
    options = name, op, process_set, prescale_factor, postscale_factor
    return _reducescatter("reducescatter", [tensor], compression, *options)[0]


def grouped_reducescatter(  # noqa: PLR0917
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Operation | None = None,
    process_set: Any = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's rows of each of the reduced tensors."""
    options = name, op, process_set, prescale_factor, postscale_factor
    return _reducescatter("grouped_reducescatter", tensors, compression, *options)


def _reducescatter(
    kind: str, tensors: Sequence[torch.Tensor], compression: Any, *options: Any
) -> list[Any]:
    _, op, process_set, before, after = options

    def call(wires: Any) -> Any:
        return synchronize(_start_reducescatter(kind, wires, *options, conclude=list))

    def gradient(*gradients: Any) -> Any:
        factor = before * after * (size() if op is Operation.Sum else 1)
        scaled = [gradient * factor for gradient in gradients]
        return grouped_allgather(scaled, process_set=process_set)

    return compressed(call, gradient, tensors, compression)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: Any = _ALL,
) -> Submission:
    """Submit `alltoall`; what it waits for is always both results."""
    require_all_ranks(process_set)
    require_rows([tensor])
    lengths, kind = _lengths(tensor, splits)

    def conclude(result: Any) -> Any:
        rows, received = result
        return rows, torch.tensor(received, dtype=kind)

    return submissions().submit(
        "alltoall",
        name,
        describe([tensor], lengths=False),
        execution.all_to_all,
        (tensor.detach(), lengths),
        conclude=conclude,
    )


def _lengths(tensor: torch.Tensor, splits: Any) -> tuple[list[int], Any]:
    """Return how many rows go to each rank, and in which type that is said."""
    chosen = torch.as_tensor([] if splits is None else splits)
    kind = torch.int32 if splits is None or isinstance(splits, list) else chosen.dtype
    if not chosen.numel():
        if len(tensor) % size():
            raise ValueError(
                f"expected a multiple of {size()} rows where there are no splits, "
                f"found {len(tensor)}; pass splits"
            )
        return [len(tensor) // size()] * size(), torch.int32
    if chosen.is_floating_point() or chosen.shape != (size(),):
        raise ValueError(
            f"expected {size()} integers as splits, found {chosen.dtype} of shape "
            f"{tuple(chosen.shape)}; pass one for each rank, of torch.int32"
        )
    lengths = chosen.tolist()
    if min(lengths) < 0 or sum(lengths) > len(tensor):
        raise ValueError(
            f"expected splits of {len(tensor)} rows at most, found {lengths}; pass "
            "fewer"
        )
    return lengths, kind


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: Any = _ALL,
) -> Any:
    """Send rows to each rank; return what came, with ``splits`` also from whom."""

    def call(own: Any) -> Any:
        [given] = own
        return synchronize(alltoall_async(given, splits, name, process_set))

    def gradient(own: Any, _: Any) -> Any:
        sent, _ = alltoall(own, received)
        # Rows that were sent to nobody have no gradient.
        left = tensor.new_zeros((len(tensor) - len(sent), *tensor.shape[1:]))
        return [torch.cat([sent, left])]

    rows, received = differentiable(call, gradient, [tensor])
    return rows if splits is None else (rows, received)
