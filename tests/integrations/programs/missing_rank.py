"""Wait for a rank that is elsewhere: ``missing_rank.py group|recv``."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import hpcstrat.integrations.torch  # noqa: F401


def main() -> None:
    """Let rank 1 not come."""
    dist.init_process_group("hpcstrat")
    dist.barrier()
    late = dist.get_rank() == 1
    if sys.argv[1] == "recv":
        if late:
            # The other one is to wait first, on busy cores too.
            time.sleep(5)
            dist.recv(torch.zeros(3), 0)
        dist.all_reduce(torch.zeros(3))
    elif late or dist.get_rank() == 2:
        # Not for ever: nothing must be left of a test that fails.
        time.sleep(50)
    else:
        dist.new_group([0, 1])


main()
