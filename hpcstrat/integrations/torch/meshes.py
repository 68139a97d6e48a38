"""Meshes of PyTorch's devices, from the ranks of a strategy."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hpcstrat.integrations.torch.process_group import BACKEND
from hpcstrat.strategies import Strategy

__all__ = ["device_mesh", "is_dtensor"]


def device_mesh(strategy: Strategy) -> dist.device_mesh.DeviceMesh:
    """Return PyTorch's mesh of a strategy's ranks: by replica, and inside of it.

    Collective over all ranks of the job.

    The mesh is for libraries of PyTorch that divide a model themselves, such as
    ``parallelize_module`` and DTensor over ``mesh["inside"]``, and FSDP2 over
    ``mesh["replica"]``; these also sum the gradients, so such a model is not for
    `replicate`. If there is no default process group, it is made, with the backend
    ``hpcstrat``. The program destroys it by ``dist.destroy_process_group()``.

    Parameters
    ----------
    strategy : Strategy
        A strategy over all ranks of the job.

    Returns
    -------
    torch.distributed.device_mesh.DeviceMesh
        Of shape (number of replicas, ranks per replica), with the dimensions
        ``"replica"`` and ``"inside"``, on GPUs if this rank has one.

    Raises
    ------
    ValueError
        On every rank, if the strategy has other ranks than the default process group.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> import hpcstrat.integrations.torch as hst
    >>> mesh = hst.device_mesh(hs.MultiWorkerMirroredStrategy())
    >>> mesh.mesh_dim_names
    ('replica', 'inside')
    >>> dist.destroy_process_group()
    """
    if not dist.is_initialized():
        dist.init_process_group(BACKEND)
    across, inside = strategy.collectives, strategy.inside
    shape = across.size, inside.size
    rank = across.rank * inside.size + inside.position
    found = dist.get_world_size(), dist.get_rank()
    if found != (shape[0] * shape[1], rank):
        raise ValueError(
            f"expected a strategy over the {found[0]} ranks of the default process "
            f"group, found {strategy!r}; leave out comm"
        )
    kind = "cuda" if strategy.device.startswith("GPU") else "cpu"
    return dist.device_mesh.init_device_mesh(
        kind, shape, mesh_dim_names=("replica", "inside")
    )


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is divided over a mesh by PyTorch itself."""
    # Importing DTensor would take a second.
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)
