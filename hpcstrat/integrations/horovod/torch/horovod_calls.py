"""Horovod's calls on tensors and objects, with their gradients.

Calls whose name contains ``async`` are not collective: they submit a request, and
return a handle. All other calls, including `synchronize`, are collective over all
ranks; `poll` is collective from the second poll of a handle on. Ranks may submit
requests in different orders, because the ranks match requests by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from hpcstrat.integrations.horovod.torch import execution
from hpcstrat.integrations.horovod.torch.basics import (
    global_process_set,
    rank,
    require_all_ranks,
    size,
    submissions,
)
from hpcstrat.integrations.horovod.torch.compression import Compression
from hpcstrat.integrations.horovod.torch.submissions import Submission
from hpcstrat.integrations.torch.reduction_kinds import Reduction

__all__ = [
    "Operation",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "require_known",
    "sparse_allreduce_async",
    "synchronize",
]

_ALL = global_process_set
_PLAIN = torch.contiguous_format
_Tensors = Sequence[torch.Tensor]


class Operation(Enum):
    """The operation of a reduction; each value is torch's name for the operation."""

    Average = "AVG"
    Sum = "SUM"
    Adasum = "ADASUM"
    Min = "MIN"
    Max = "MAX"
    Product = "PRODUCT"


def require_known(op: Operation | None) -> Operation:
    """Return ``op``, or Average if it is None; NotImplementedError for Adasum."""
    if op is Operation.Adasum:
        raise NotImplementedError(
            "expected Average, Sum, Min, Max or Product, found Adasum; use Average, "
            "and a learning rate for the global batch"
        )
    return op or Operation.Average


def synchronize(handle: Submission) -> Any:
    """Wait until a request is carried out, and return its result.

    Collective over all ranks.

    Requests are carried out here: the waiting ranks compare the names of their
    requests, and carry out those that all ranks have submitted, in the same order.

    Parameters
    ----------
    handle : handle
        The result of a call whose name contains ``async``.

    Returns
    -------
    torch.Tensor, or what the call returns
        The call's result; for in-place calls the program's own tensor.

    Raises
    ------
    CollectiveError
        If ranks have submitted different calls under the handle's name, or if each rank
        waits for a name that another rank has not submitted. The error is raised on
        every rank that has submitted the name. ``hvd.HorovodInternalError`` is this
        class.
    """
    return submissions().wait(handle)


def poll(handle: Submission) -> bool:
    """Return whether a request is carried out.

    Not collective at the first poll of a handle; collective over all ranks from the
    second poll on.

    Requests are carried out only when all ranks wait or poll, and never while a program
    computes. So a second poll waits until the other ranks wait or poll, too. Without
    this wait, a program that only polls would never end.

    Parameters
    ----------
    handle : handle
        The result of a call whose name contains ``async``.

    Returns
    -------
    bool
        Whether `synchronize` would return its result without waiting.
    """
    return submissions().poll(handle)


class _Differentiable(torch.autograd.Function):
    """Makes a call on tensors, with the function ``gradient`` as its backward."""

    @staticmethod
    def forward(ctx: Any, call: Any, gradient: Any, *tensors: Any) -> Any:
        ctx.gradient = gradient
        return tuple(call(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *ctx.gradient(*gradients)


def _differentiable(call: Any, gradient: Any, tensors: Sequence[Any]) -> list[Any]:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return list(_Differentiable.apply(call, gradient, *tensors))
    return list(call(tensors))


def _compressed(call: Any, gradient: Any, tensors: Any, compression: Any) -> list[Any]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = _differentiable(call, gradient, [wire for wire, _ in pairs])
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]


def _first(results: Sequence[Any]) -> Any:
    return results[0]


def _described(tensors: _Tensors, *, lengths: bool = True) -> str:
    """Describe tensors as text, with their numbers of rows if ``lengths`` is set."""
    return ", ".join(_words(tensor, lengths) for tensor in tensors)


def _words(tensor: torch.Tensor, lengths: bool) -> str:
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"expected a dense tensor, found layout {tensor.layout}; call to_dense(), "
            "or hvd.sparse_allreduce_async"
        )
    shape = [":" if not lengths and i == 0 else n for i, n in enumerate(tensor.shape)]
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind}[{', '.join(map(str, shape))}]{place}"


def _require_rows(tensors: _Tensors) -> None:
    if any(not tensor.dim() for tensor in tensors):
        raise ValueError(
            "expected tensors with rows, found one that is a number; call reshape(1)"
        )


def _submit_reduction(
    kind: str,
    tensors: _Tensors,
    name: str | None,
    op: Operation | None,
    factors: tuple[float, float],
    *,
    process_set: Any,
    conclude: Any,
    in_place: bool = False,
) -> Submission:
    """Submit a request for an allreduce or a reduce-scatter of tensors."""
    require_all_ranks(process_set)
    op, scatters = require_known(op), kind.endswith("reducescatter")
    words = f"{op.name} of {_described(tensors)}"
    if factors != (1, 1):
        words += f", times {factors[0]} before and {factors[1]} after"
    if scatters:
        _require_rows(tensors)
    # `Reduction` raises errors for types that cannot be reduced.
    kinds = [Reduction(op.value, tensor, size()) for tensor in tensors]
    outs = list(tensors)
    if not in_place and not (scatters and factors[0] == 1):
        # Reduce copies, so that the program's own tensors are not changed.
        outs = [t.detach().clone(memory_format=_PLAIN) for t in tensors]
    reduced = [
        execution.Reduced(out.detach(), reduction, *factors)
        for out, reduction in zip(outs, kinds, strict=True)
    ]
    return submissions().submit(
        kind,
        name,
        words,
        execution.reduce_scatter if scatters else execution.all_reduce,
        reduced,
        conclude=lambda parts: conclude(parts if scatters else outs),
    )


# Allreduce.


def _start_allreduce(  # noqa: PLR0917 - Horovod's order
    kind: str,
    tensors: _Tensors,
    conclude: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Operation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _ALL,
    **more: Any,
) -> Submission:
    if op is not None and average is not None:
        raise ValueError(
            "The op parameter supersedes average. Please provide only one of them."
        )
    op = Operation.Sum if average is False else op
    more |= {"process_set": process_set, "conclude": conclude}
    factors = prescale_factor, postscale_factor
    return _submit_reduction(kind, tensors, name, op, factors, **more)


def allreduce_async(tensor: torch.Tensor, *args: Any, **options: Any) -> Submission:
    """Submit `allreduce`, with its arguments except ``compression``."""
    return _start_allreduce("allreduce", [tensor], _first, *args, **options)


def allreduce_async_(tensor: torch.Tensor, *args: Any, **options: Any) -> Submission:
    """Submit `allreduce_`, with its arguments."""
    return allreduce_async(tensor, *args, in_place=True, **options)


def allreduce_(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Reduce a tensor in place; `allreduce_async` has the same arguments."""
    return synchronize(allreduce_async_(tensor, *args, **options))


def grouped_allreduce_async(
    tensors: _Tensors, *args: Any, **options: Any
) -> Submission:
    """Submit `grouped_allreduce`, with its arguments except ``compression``."""
    return _start_allreduce("grouped_allreduce", tensors, list, *args, **options)


def grouped_allreduce_async_(
    tensors: _Tensors, *args: Any, **options: Any
) -> Submission:
    """Submit `grouped_allreduce_`, with its arguments."""
    return grouped_allreduce_async(tensors, *args, in_place=True, **options)


def grouped_allreduce_(tensors: _Tensors, *args: Any, **options: Any) -> Any:
    """Reduce tensors in place; `grouped_allreduce_async` has the same arguments."""
    return synchronize(grouped_allreduce_async_(tensors, *args, **options))


def _allreduce(
    kind: str, tensors: _Tensors, compression: Any, *options: Any
) -> list[Any]:
    average, _, *others = options

    def call(wires: Any) -> Any:
        return synchronize(_start_allreduce(kind, wires, list, *options))

    def gradient(*gradients: Any) -> Any:
        unnamed = average, None, *others
        return _allreduce(kind, gradients, Compression.none, *unnamed)

    return _compressed(call, gradient, tensors, compression)


def allreduce(  # noqa: PLR0917 - Horovod's order
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Operation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _ALL,
) -> torch.Tensor:
    """Return the average of all ranks' tensors, or the reduction that ``op`` names."""
    options = average, name, op, prescale_factor, postscale_factor, process_set
    return _allreduce("allreduce", [tensor], compression, *options)[0]


def grouped_allreduce(  # noqa: PLR0917
    tensors: _Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Operation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _ALL,
) -> list[torch.Tensor]:
    """Reduce several tensors together, as `allreduce` does, and return the results."""
    options = average, name, op, prescale_factor, postscale_factor, process_set
    return _allreduce("grouped_allreduce", tensors, compression, *options)


# Allgather.


def _start_allgather(
    kind: str,
    tensors: _Tensors,
    conclude: Any,
    name: str | None = None,
    process_set: Any = _ALL,
) -> Submission:
    require_all_ranks(process_set)
    _require_rows(tensors)
    words = _described(tensors, lengths=False)
    own, gather = [t.detach() for t in tensors], execution.all_gather
    return submissions().submit(kind, name, words, gather, own, conclude=conclude)


def allgather_async(tensor: torch.Tensor, *args: Any, **options: Any) -> Submission:
    """Submit `allgather`, with its arguments."""
    return _start_allgather("allgather", [tensor], _first, *args, **options)


def grouped_allgather_async(
    tensors: _Tensors, *args: Any, **options: Any
) -> Submission:
    """Submit `grouped_allgather`, with its arguments."""
    return _start_allgather("grouped_allgather", tensors, list, *args, **options)


def _allgather(
    kind: str, tensors: _Tensors, name: str | None, process_set: Any
) -> list[torch.Tensor]:
    def call(own: Any) -> Any:
        return synchronize(_start_allgather(kind, own, list, name, process_set))

    def gradient(*gradients: Any) -> Any:
        means = grouped_allreduce(gradients)
        # This rank's rows begin after the rows of earlier ranks, whose numbers vary.
        lengths = allgather(torch.tensor([[len(tensor) for tensor in tensors]]))
        starts = lengths[: rank()].sum(0).tolist()
        return [
            mean[start : start + len(tensor)]
            for mean, start, tensor in zip(means, starts, tensors, strict=True)
        ]

    return _differentiable(call, gradient, tensors)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = _ALL
) -> torch.Tensor:
    """Return all ranks' rows, concatenated; the numbers of rows may differ."""
    return _allgather("allgather", [tensor], name, process_set)[0]


def grouped_allgather(
    tensors: _Tensors, name: str | None = None, process_set: Any = _ALL
) -> list[torch.Tensor]:
    """Return for each of several tensors the rows of all ranks, concatenated."""
    return _allgather("grouped_allgather", tensors, name, process_set)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: Operation, process_set: Any = _ALL
) -> Callable[[], torch.Tensor]:
    """Submit a sum or average of sparse tensors; return a function to wait for it."""
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


# Reduce-scatter.


def _start_reducescatter(  # noqa: PLR0917 - Horovod's order
    kind: str,
    tensors: _Tensors,
    conclude: Any,
    name: str | None = None,
    op: Operation | None = None,
    process_set: Any = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Submission:
    factors = prescale_factor, postscale_factor
    more = {"process_set": process_set, "conclude": conclude}
    return _submit_reduction(kind, tensors, name, op, factors, **more)


def reducescatter_async(tensor: torch.Tensor, *args: Any, **options: Any) -> Submission:
    """Submit `reducescatter`, with its arguments except ``compression``."""
    return _start_reducescatter("reducescatter", [tensor], _first, *args, **options)


def grouped_reducescatter_async(
    tensors: _Tensors, *args: Any, **options: Any
) -> Submission:
    """Submit `grouped_reducescatter`, with its arguments except ``compression``."""
    kind = "grouped_reducescatter"
    return _start_reducescatter(kind, tensors, list, *args, **options)


def _reducescatter(
    kind: str, tensors: _Tensors, compression: Any, *options: Any
) -> list[Any]:
    _, op, process_set, before, after = options

    def call(wires: Any) -> Any:
        return synchronize(_start_reducescatter(kind, wires, list, *options))

    def gradient(*gradients: Any) -> Any:
        factor = before * after * (size() if op is Operation.Sum else 1)
        scaled = [gradient * factor for gradient in gradients]
        return grouped_allgather(scaled, process_set=process_set)

    return _compressed(call, gradient, tensors, compression)


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
    tensors: _Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Operation | None = None,
    process_set: Any = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's rows of each reduced tensor."""
    options = name, op, process_set, prescale_factor, postscale_factor
    return _reducescatter("grouped_reducescatter", tensors, compression, *options)


# All-to-all.


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: Any = _ALL,
) -> Submission:
    """Submit `alltoall`; even without ``splits`` its result is a pair: rows, counts."""
    require_all_ranks(process_set)
    _require_rows([tensor])
    lengths, kind = _lengths(tensor, splits)

    def conclude(result: Any) -> Any:
        rows, received = result
        return rows, torch.tensor(received, dtype=kind)

    words, payload = _described([tensor], lengths=False), (tensor.detach(), lengths)
    move = execution.all_to_all
    return submissions().submit(
        "alltoall", name, words, move, payload, conclude=conclude
    )


def _lengths(tensor: torch.Tensor, splits: Any) -> tuple[list[int], Any]:
    """Return the number of rows to send to each rank, and the dtype for such counts."""
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
    """Send rows to each rank; return the received rows and, with ``splits``, counts."""

    def call(own: Any) -> Any:
        [given] = own
        return synchronize(alltoall_async(given, splits, name, process_set))

    def gradient(own: Any, _: Any) -> Any:
        sent, _ = alltoall(own, received)
        # Rows that were not sent to any rank have zero gradients.
        left = tensor.new_zeros((len(tensor) - len(sent), *tensor.shape[1:]))
        return [torch.cat([sent, left])]

    rows, received = _differentiable(call, gradient, [tensor])
    return rows if splits is None else (rows, received)


# Broadcast, objects, barrier.


def _start_broadcast(
    tensor: torch.Tensor,
    out: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = _ALL,
) -> Submission:
    require_all_ranks(process_set)
    return submissions().submit(
        "broadcast",
        name,
        f"{_described([tensor])} from rank {_valid(root_rank)}",
        execution.broadcast,
        (tensor.detach(), out.detach(), root_rank),
        key=f"{root_rank:08d}",
        conclude=lambda _: out,
    )


def _valid(root_rank: int) -> int:
    if not 0 <= root_rank < size():
        raise ValueError(
            f"expected a root_rank from 0 to {size() - 1}, found {root_rank}; change it"
        )
    return root_rank


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, *args: Any, **options: Any
) -> Submission:
    """Submit `broadcast`, with its arguments."""
    out = torch.empty_like(tensor, requires_grad=False)
    return _start_broadcast(tensor, out, root_rank, *args, **options)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, *args: Any, **options: Any
) -> Submission:
    """Submit `broadcast_`, with its arguments."""
    return _start_broadcast(tensor, tensor, root_rank, *args, **options)


def broadcast_(tensor: torch.Tensor, root_rank: int, *args: Any, **options: Any) -> Any:
    """Copy the root's tensor into each rank's tensor; see `broadcast`."""
    return synchronize(broadcast_async_(tensor, root_rank, *args, **options))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = _ALL,
) -> torch.Tensor:
    """Return the root's tensor on all ranks."""

    def call(own: Any) -> Any:
        [given] = own
        return [synchronize(broadcast_async(given, root_rank, name, process_set))]

    def gradient(own: Any) -> Any:
        mean = allreduce(own)
        return [mean if rank() == root_rank else torch.zeros_like(mean)]

    return _differentiable(call, gradient, [tensor])[0]


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = _ALL
) -> Any:
    """Return the root's object, of any type that pickle supports, on all ranks."""
    require_all_ranks(process_set)
    words, move = f"from rank {_valid(root_rank)}", execution.broadcast_objects
    job, payload = submissions(), (obj, root_rank)
    return job.wait(job.submit("broadcast_object", name, words, move, payload))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return a list of all ranks' objects, by rank."""
    job, move = submissions(), execution.all_gather_objects
    return job.wait(job.submit("allgather_object", name, "", move, obj))


def barrier(process_set: Any = _ALL) -> None:
    """Wait until all ranks have called this function."""
    require_all_ranks(process_set)
    job = submissions()
    job.wait(job.submit("barrier", None, "", execution.meet))
