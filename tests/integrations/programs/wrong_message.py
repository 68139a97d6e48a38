"""Send a message of another size than the receiver expects; both ranks must raise."""

import torch
import torch.distributed as dist

import hpcstrat as hs
import hpcstrat.integrations.torch

torch.set_num_threads(1)
dist.init_process_group("hpcstrat")
try:
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
        dist.barrier()
    else:
        dist.recv(torch.ones(4), 0)
except hs.CollectiveError as error:
    print(f"{dist.get_rank()}: {error}", flush=True)
