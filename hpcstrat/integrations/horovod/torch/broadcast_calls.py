"""Horovod's broadcasts, and its calls on objects."""

from __future__ import annotations

from typing import Any

import torch

from hpcstrat.integrations.horovod.torch import execution
from hpcstrat.integrations.horovod.torch.allreduce_calls import allreduce
from hpcstrat.integrations.horovod.torch.basics import (
    global_process_set,
    rank,
    require_all_ranks,
    size,
    submissions,
)
from hpcstrat.integrations.horovod.torch.call_handles import (
    describe,
    differentiable,
    synchronize,
)
from hpcstrat.integrations.horovod.torch.submissions import Submission

__all__ = [
    "allgather_object",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
]

_ALL = global_process_set


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
        f"{describe([tensor])} from rank {_valid(root_rank)}",
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
    """Write the root's tensor into that of each rank; see `broadcast`."""
    return synchronize(broadcast_async_(tensor, root_rank, *args, **options))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = _ALL,
) -> torch.Tensor:
    """Return the root's tensor."""

    def call(own: Any) -> Any:
        [given] = own
        return [synchronize(broadcast_async(given, root_rank, name, process_set))]

    def gradient(own: Any) -> Any:
        mean = allreduce(own)
        return [mean if rank() == root_rank else torch.zeros_like(mean)]

    return differentiable(call, gradient, [tensor])[0]


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = _ALL
) -> Any:
    """Return the root's object, of any kind that can be pickled."""
    require_all_ranks(process_set)
    words, move = f"from rank {_valid(root_rank)}", execution.broadcast_objects
    job, payload = submissions(), (obj, root_rank)
    return job.wait(job.submit("broadcast_object", name, words, move, payload))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks."""
    job, move = submissions(), execution.all_gather_objects
    return job.wait(job.submit("allgather_object", name, "", move, obj))


def barrier(process_set: Any = _ALL) -> None:
    """Wait for all ranks."""
    require_all_ranks(process_set)
    job = submissions()
    job.wait(job.submit("barrier", None, "", execution.meet))
