"""Horovod's all-reduces, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from hpcstrat.integrations.horovod.torch import execution
from hpcstrat.integrations.horovod.torch.basics import (
    global_process_set,
    require_all_ranks,
    size,
    submissions,
)
from hpcstrat.integrations.horovod.torch.call_handles import (
    compressed,
    describe,
    first,
    require_rows,
    synchronize,
)
from hpcstrat.integrations.horovod.torch.compression import Compression
from hpcstrat.integrations.horovod.torch.submissions import Submission
from hpcstrat.integrations.torch.reduction_kinds import Reduction

__all__ = [
    "Operation",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "require_known",
    "submit_reduction",
]

_ALL = global_process_set
_PLAIN = torch.contiguous_format


class Operation(Enum):
    """The operation of a reduction; of torch's name."""

    Average = "AVG"
    Sum = "SUM"
    Adasum = "ADASUM"
    Min = "MIN"
    Max = "MAX"
    Product = "PRODUCT"


def require_known(op: Operation | None) -> Operation:
    if op is Operation.Adasum:
        raise NotImplementedError(
            "expected Average, Sum, Min, Max or Product, found Adasum; use Average, "
            "and a learning rate for the global batch"
        )
    return op or Operation.Average


def _chosen(op: Operation | None, average: bool | None) -> Operation | None:
    """Return the operation that an old or a new program names."""
    if op is not None and average is not None:
        raise ValueError(
            "The op parameter supersedes average. Please provide only one of them."
        )
    return Operation.Sum if average is False else op


def submit_reduction(
    kind: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: Operation | None,
    factors: tuple[float, float],
    *,
    process_set: Any,
    conclude: Any,
    in_place: bool = False,
) -> Submission:
    """Submit tensors, to be reduced in their own memory, in copies, or into parts."""
    require_all_ranks(process_set)
    op, scatters = require_known(op), kind.endswith("reducescatter")
    words = f"{op.name} of {describe(tensors)}"
    if factors != (1, 1):
        words += f", times {factors[0]} before and {factors[1]} after"
    if scatters:
        require_rows(tensors)
    # Refuses what cannot be added, and the like.
    kinds = [Reduction(op.value, tensor, size()) for tensor in tensors]
    outs = list(tensors)
    if not in_place and not (scatters and factors[0] == 1):
        # In copies: the program's own tensors stay as they are.
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


def _start_allreduce(  # noqa: PLR0917 - Horovod's order
    kind: str,
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Operation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _ALL,
    **more: Any,
) -> Submission:
    op, factors = _chosen(op, average), (prescale_factor, postscale_factor)
    return submit_reduction(
        kind, tensors, name, op, factors, process_set=process_set, **more
    )


def allreduce_async(tensor: torch.Tensor, *args: Any, **options: Any) -> Submission:
    """Submit `allreduce`, with its arguments but for ``compression``."""
    return _start_allreduce("allreduce", [tensor], *args, conclude=first, **options)


def allreduce_async_(tensor: torch.Tensor, *args: Any, **options: Any) -> Submission:
    """Submit `allreduce_`, with its arguments."""
    return allreduce_async(tensor, *args, in_place=True, **options)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor], *args: Any, **options: Any
) -> Submission:
    """Submit `grouped_allreduce`, with its arguments but for ``compression``."""
    kind = "grouped_allreduce"
    return _start_allreduce(kind, tensors, *args, conclude=list, **options)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor], *args: Any, **options: Any
) -> Submission:
    """Submit `grouped_allreduce_`, with its arguments."""
    return grouped_allreduce_async(tensors, *args, in_place=True, **options)


def allreduce_(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Reduce a tensor in its own memory; ``allreduce`` has the arguments."""
    return synchronize(allreduce_async_(tensor, *args, **options))


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor], *args: Any, **options: Any
) -> Any:
    """Reduce tensors in their own memory; ``allreduce`` has the arguments."""
    return synchronize(grouped_allreduce_async_(tensors, *args, **options))


def _allreduce(
    kind: str, tensors: Sequence[torch.Tensor], compression: Any, *options: Any
) -> list[Any]:
    average, _, *others = options

    def call(wires: Any) -> Any:
        return synchronize(_start_allreduce(kind, wires, *options, conclude=list))

    def gradient(*gradients: Any) -> Any:
        unnamed = average, None, *others
        return _allreduce(kind, gradients, Compression.none, *unnamed)

    return compressed(call, gradient, tensors, compression)


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
    """Return the average of the ranks' tensors, or what else ``op`` says."""
    options = average, name, op, prescale_factor, postscale_factor, process_set
    return _allreduce("allreduce", [tensor], compression, *options)[0]


def grouped_allreduce(  # noqa: PLR0917
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Operation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _ALL,
) -> list[torch.Tensor]:
    """Reduce several tensors together."""
    options = average, name, op, prescale_factor, postscale_factor, process_set
    return _allreduce("grouped_allreduce", tensors, compression, *options)
