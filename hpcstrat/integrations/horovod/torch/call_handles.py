"""Handles of calls that were submitted; what calls on tensors have in common.

Calls whose name ends in ``async`` are not collective: they submit a request, and return
a handle. All others, `synchronize` too, are collective over all ranks; so is `poll`
from its second look at a handle on. Names may come in any order on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpcstrat.integrations.horovod.torch.basics import submissions
from hpcstrat.integrations.horovod.torch.submissions import Submission

__all__ = [
    "compressed",
    "describe",
    "differentiable",
    "first",
    "poll",
    "require_rows",
    "synchronize",
]


def synchronize(handle: Submission) -> Any:
    """Wait for the end of a call, and return its result.

    Collective over all ranks.

    Calls are made here: all ranks that wait compare the names of what they have
    submitted, and make the calls that all of them have, in one order.

    Parameters
    ----------
    handle : handle
        What a call whose name ends in ``async`` has returned.

    Returns
    -------
    torch.Tensor, or what the call returns
        In place for those in place.

    Raises
    ------
    CollectiveError
        If ranks have submitted different calls under its name, or each waits for a name
        that another one has not submitted. ``hvd.HorovodInternalError`` is this class.
        On every rank that has submitted it.
    """
    return submissions().wait(handle)


def poll(handle: Submission) -> bool:
    """Return whether a call has ended.

    Collective over all ranks, from the second time on; the first time it only looks.

    Nothing goes on while a program computes: calls are made by ranks that wait. So that
    a program that does nothing but poll comes to its end, polling again waits until the
    other ranks wait or poll, too.

    Parameters
    ----------
    handle : handle
        What a call whose name ends in ``async`` has returned.

    Returns
    -------
    bool
        Whether `synchronize` has its result at once.
    """
    return submissions().poll(handle)


class _Differentiable(torch.autograd.Function):
    """A call on tensors, with another one as its gradient."""

    @staticmethod
    def forward(ctx: Any, call: Any, gradient: Any, *tensors: Any) -> Any:
        ctx.gradient = gradient
        return tuple(call(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *ctx.gradient(*gradients)


def differentiable(call: Any, gradient: Any, tensors: Sequence[Any]) -> list[Any]:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return list(_Differentiable.apply(call, gradient, *tensors))
    return list(call(tensors))


def compressed(call: Any, gradient: Any, tensors: Any, compression: Any) -> list[Any]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = differentiable(call, gradient, [wire for wire, _ in pairs])
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]


def first(results: Sequence[Any]) -> Any:
    return results[0]


def describe(tensors: Sequence[torch.Tensor], *, lengths: bool = True) -> str:
    """Describe tensors; without lengths where each rank may have another one."""
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


def require_rows(tensors: Sequence[torch.Tensor]) -> None:
    if any(not tensor.dim() for tensor in tensors):
        raise ValueError(
            "expected tensors with rows, found one that is a number; call reshape(1)"
        )
