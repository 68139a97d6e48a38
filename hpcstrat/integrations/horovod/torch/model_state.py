"""Broadcasts that make models and optimizers equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from hpcstrat.integrations.horovod.torch.basics import rank
from hpcstrat.integrations.horovod.torch.horovod_calls import (
    broadcast_async_,
    broadcast_object,
    synchronize,
)

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Copy the root's tensors (such as a state dict) to all ranks; collective."""
    if isinstance(params, dict):
        params = sorted(params.items())
    elif isinstance(params, (str, torch.Tensor)) or not hasattr(params, "__iter__"):
        raise ValueError(f"invalid params of type: {type(params)}")
    named = [each if isinstance(each, tuple) else (None, each) for each in params]
    # Submit all tensors before the first wait, so that one call broadcasts them all.
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in named]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,  # noqa: ARG001
) -> None:
    """Copy the state and the options of the root's optimizer to all ranks.

    Collective over all ranks.

    If the optimizer has no state yet, Horovod's function makes a step. This function
    does not, because with weight decay a step would change weights.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        An optimizer with as many parameters as the root's. All of torch's optimizers
        work except LBFGS, for which ValueError is raised.
    root_rank : int
        Rank whose state is copied.
    model : torch.nn.Module, optional
        Not used.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state:
        # Horovod's function sets gradients to zeros for its step, and leaves them: a
        # program may rely on finding zeros instead of None.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
    own = optimizer.state_dict() if rank() == root_rank else None
    state = broadcast_object(own, root_rank)
    if rank() != root_rank:
        groups = optimizer.param_groups
        optimizer.load_state_dict(state)
        # Keep the existing group dicts, because schedulers refer to them.
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        optimizer.param_groups = groups
