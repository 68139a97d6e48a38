"""Wait in CUDA for a kernel of NCCL whose other rank is stuck."""

from __future__ import annotations

import os
from typing import Any

import cupy

import hpcstrat as hs
from hpcstrat.engine.gpu.transports import nccl_trial


def main() -> None:
    """Sum once; then the kernel of the last replica hangs."""
    # Skip the largest trial sum, for which the stand-in needs seconds.
    nccl_trial._TRIAL_BYTES = (4,)
    settings = hs.Settings(warn_seconds=0.5, limit_seconds=4.0)
    strategy: Any = hs.MultiWorkerMirroredStrategy(settings=settings)
    size = strategy.num_replicas_in_sync
    total = strategy.reduce("sum", cupy.ones(8), axis=None)
    assert float(total[0]) == size
    print("reduced", flush=True)
    os.environ["HPCSTRAT_STANDIN_NCCL_FAULT"] = f"tree endless {size - 1}"
    total = strategy.reduce("sum", cupy.ones(9), axis=None)
    # NCCL reports no error here.
    print(float(total[0]))


if __name__ == "__main__":
    main()
