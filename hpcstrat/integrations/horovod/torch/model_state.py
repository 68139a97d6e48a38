"""Makes models and optimizers equal on all ranks."""

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
    """Give all ranks the root's tensors, such as ``model.state_dict()``; collective."""
    if isinstance(params, dict):
        params = sorted(params.items())
    elif isinstance(params, (str, torch.Tensor)) or not hasattr(params, "__iter__"):
        raise ValueError(f"invalid params of type: {type(params)}")
    named = [each if isinstance(each, tuple) else (None, each) for each in params]
    # All submitted before the first wait: they travel in few messages.
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in named]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,  # noqa: ARG001
) -> None:
    """Give all ranks the state and the options of the root's optimizer.

    Collective over all ranks.

    Makes no step where there is no state yet, as Horovod does: with weight decay a step
    changes weights.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        As many parameters as the root's; any of torch's but LBFGS, which is refused by
        ValueError.
    root_rank : int
        Whose state.
    model : torch.nn.Module, optional
        Not needed.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state:
        # Horovod makes a step with these gradients, and leaves them.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
    own = optimizer.state_dict() if rank() == root_rank else None
    state = broadcast_object(own, root_rank)
    if rank() != root_rank:
        groups = optimizer.param_groups
        optimizer.load_state_dict(state)
        # The same dicts as before, which schedulers change.
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        optimizer.param_groups = groups
