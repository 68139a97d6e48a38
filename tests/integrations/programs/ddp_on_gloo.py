"""A typical user's program: DDP on gloo, without hpcstrat or MPI in its code.

``ddp_on_gloo.py [fail]``: with ``fail``, rank 0 raises while the other ranks continue.
"""

import os
import sys

import torch
import torch.distributed as dist

torch.set_num_threads(1)
local_rank, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(4, 4)
for step in range(3):
    if sys.argv[1:] == ["fail"] and rank == 0 and step == 2:
        raise RuntimeError("as meant")
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()
total = model.module.weight.detach().clone()
dist.all_reduce(total, op=dist.ReduceOp.MAX)
assert torch.equal(total, model.module.weight)
if rank == 0:
    size, place = dist.get_world_size(), sys.path[0]
    print(f"{dist.get_backend()} {size} {local_rank} {os.path.basename(place)}")
dist.destroy_process_group()
