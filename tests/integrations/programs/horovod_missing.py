"""Wait for a call that rank 1 does not submit: ``horovod_missing.py ends|sleeps``."""

from __future__ import annotations

import sys
import time

import torch

import hpcstrat.integrations.horovod.torch as hvd


def main() -> None:
    """Make a call on all ranks except rank 1, which exits or sleeps."""
    hvd.init()
    hvd.barrier()
    if hvd.rank() != 1:
        hvd.allreduce(torch.zeros(3), name="lost")
    elif sys.argv[1] == "sleeps":
        # Sleep for a limited time, so that no process stays if the test fails.
        time.sleep(50)


main()
