"""Wait for a rank that does not arrive: ``missing_rank.py group|recv``."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import hpcstrat.integrations.torch  # noqa: F401


def main() -> None:
    """Make a call on all ranks except rank 1."""
    dist.init_process_group("hpcstrat")
    dist.barrier()
    late = dist.get_rank() == 1
    if sys.argv[1] == "recv":
        if late:
            # Sleep, so that the other rank waits first, even on busy cores.
            time.sleep(5)
            dist.recv(torch.zeros(3), 0)
        dist.all_reduce(torch.zeros(3))
    elif late or dist.get_rank() == 2:
        # Sleep for a limited time, so that no process stays if the test fails.
        time.sleep(50)
    else:
        dist.new_group([0, 1])


main()
