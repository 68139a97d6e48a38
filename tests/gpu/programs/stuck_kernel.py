"""Sit in CUDA, waiting for a kernel of NCCL whose other end stands still."""

from __future__ import annotations

import os
from typing import Any

import cupy

import hpcstrat as hs
from hpcstrat.engine.gpu.transports import nccl_trial


def main() -> None:
    """Sum once; then the kernel of the last replica stands still."""
    # The stand-in takes seconds for the largest sum.
    nccl_trial._TRIAL_BYTES = (4,)
    settings = hs.Settings(warn_seconds=0.5, limit_seconds=4.0)
    strategy: Any = hs.MultiWorkerMirroredStrategy(settings=settings)
    size = strategy.num_replicas_in_sync
    total = strategy.reduce("sum", cupy.ones(8), axis=None)
    assert float(total[0]) == size
    print("reduced", flush=True)
    os.environ["HPCSTRAT_STANDIN_NCCL_FAULT"] = f"tree endless {size - 1}"
    total = strategy.reduce("sum", cupy.ones(9), axis=None)
    # NCCL says that all is well.
    print(float(total[0]))


if __name__ == "__main__":
    main()
