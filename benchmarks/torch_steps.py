"""Training steps in PyTorch, one for each way to average gradients."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mlp import MOMENTUM, RATE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_models import MODELS, Transformer

import hpcstrat as hs
import hpcstrat.integrations.torch as hst

__all__ = ["TorchStep", "torch_steps"]


class TorchStep:
    """A training step (forward, backward, update) with its own model."""

    def __init__(
        self, model: nn.Module, batch: Any, after: Callable[[nn.Module], None] | None
    ) -> None:
        self.model, self.after = model, after
        self.inputs, self.targets = batch
        self.optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)

    def __call__(self) -> None:
        """Do a step; collective, unless it does not communicate."""
        self.optimizer.zero_grad()
        outputs = self.model(self.inputs)
        nn.functional.cross_entropy(outputs, self.targets).backward()
        if self.after is not None:
            self.after(self.model)
        self.optimizer.step()

    def parameters(self) -> list[Any]:
        """Return the weights as arrays; collective if they are sharded."""
        with torch.no_grad():
            whole = [
                p.full_tensor() if hasattr(p, "full_tensor") else p
                for p in self.model.parameters()
            ]
        return [tensor.detach().numpy().copy() for tensor in whole]


def _by_tensor(comm: Any, mpi: Any) -> Callable[[nn.Module], None]:
    def average(model: nn.Module) -> None:
        for parameter in model.parameters():
            gradient = parameter.grad.numpy()
            comm.Allreduce(mpi.IN_PLACE, gradient)
            gradient *= 1 / comm.size

    return average


def _flat(comm: Any, mpi: Any) -> Callable[[nn.Module], None]:
    def average(model: nn.Module) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        packed = torch.cat([gradient.reshape(-1) for gradient in gradients])
        array = packed.numpy()
        comm.Allreduce(mpi.IN_PLACE, array)
        array *= 1 / comm.size
        parts = packed.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    return average


def _sharded(model: nn.Module, group: Any) -> nn.Module:
    """Shard a model layer by layer."""
    mesh = DeviceMesh.from_group(group, "cpu")
    layers = model.layers if isinstance(model, Transformer) else model
    for layer in layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def torch_steps(strategy: Any, name: str, gloo: Any, own: Any) -> dict[str, TorchStep]:
    """Return the rivals, whose models all start with equal weights.

    Collective over the strategy's replicas.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The replicas of this strategy take part.
    name : str
        Name of the model.
    gloo, own : torch.distributed.ProcessGroup
        Process groups of the same ranks, with the backends gloo and ``hpcstrat``.

    Returns
    -------
    dict of str to TorchStep
        The steps by name; the first step does not communicate.
    """
    topology = strategy.topology
    comm, mpi = topology.replica_comm.Dup(), topology.mpi
    make, draw = MODELS[name]
    torch.manual_seed(0)
    model = make()
    batch = draw(torch.Generator().manual_seed(1 + topology.replica_id))

    def step(wrap: Any = None, after: Any = None) -> TorchStep:
        mine = copy.deepcopy(model)
        return TorchStep(mine if wrap is None else wrap(mine), batch, after)

    def ddp(group: Any) -> Any:
        return lambda model: DistributedDataParallel(model, process_group=group)

    steps = {
        "none": step(),
        "mpi4py, by tensor": step(after=_by_tensor(comm, mpi)),
        "mpi4py, packed": step(after=_flat(comm, mpi)),
        "hpcstrat, replicate": step(lambda model: hst.replicate(model, strategy)),
        "torch DDP, gloo": step(ddp(gloo)),
        "hpcstrat, DDP on it": step(ddp(own)),
    }
    if topology.num_workers > 1:
        half = hs.CommunicationOptions(wire_dtype="float16")
        narrow = hs.MultiWorkerMirroredStrategy(communication_options=half)
        for mib in (4, 8):
            steps[f"replicate, float16, {mib} MiB"] = step(
                functools.partial(
                    hst.replicate, strategy=narrow, bucket_bytes=mib << 20
                )
            )
    if name == "transformer":
        steps["torch FSDP2, gloo"] = step(lambda model: _sharded(model, gloo))
        steps["hpcstrat, FSDP2 on it"] = step(lambda model: _sharded(model, own))
    dist.barrier(group=own)
    return steps
