"""A program that was written for GPUs, and for Slurm; see `test_torch_launcher`.

``for_gpus.py [HOW]``: it makes its process group for GPUs only; ``alone`` makes no
model of DDP, ``second`` makes a group of another backend, ``gathers`` lets rank 0 wait
in a gather of MPI for the ranks that make their group.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def main() -> None:
    """Train on this rank's rows; print the sum of the weights."""
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if how == "gathers" and rank == 0:
        from mpi4py import MPI

        MPI.COMM_WORLD.gather(rank)
    if torch.cuda.is_available() or how in ("gathers", "second"):
        dist.init_process_group("nccl")
    if how != "alone":
        rank, local = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_LOCALID"])
        size = dist.get_world_size()
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    model: torch.nn.Module = torch.nn.Sequential(*layers).double()
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if how != "alone":
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[local])
    else:
        rank, size = 0, 1
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.linspace(-1, 1, 48, dtype=torch.float64).view(12, 4)
    rows = rows[rank::size]
    for _ in range(3):
        optimizer.zero_grad()
        (model(rows).squeeze(1) - rows.sin().sum(1)).square().mean().backward()
        optimizer.step()
    total = sum(float(weights.detach().abs().sum()) for weights in model.parameters())
    print(
        f"{dist.is_initialized()} {'OMPI_COMM_WORLD_SIZE' in os.environ} {total:.12f}"
    )


if __name__ == "__main__":
    main()
