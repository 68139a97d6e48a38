"""Wait for a call that rank 1 does not submit: ``horovod_missing.py ends|sleeps``."""

from __future__ import annotations

import sys
import time

import torch

import hpcstrat.integrations.horovod.torch as hvd


def main() -> None:
    """Let rank 1 not come."""
    hvd.init()
    hvd.barrier()
    if hvd.rank() != 1:
        hvd.allreduce(torch.zeros(3), name="lost")
    elif sys.argv[1] == "sleeps":
        # Not for ever: nothing must be left of a test that fails.
        time.sleep(50)


main()
