"""End after a kernel of one replica that breaks its GPU's context."""

from __future__ import annotations

from typing import Any

import cupy

import hpcstrat as hs

CODE = """
struct alignas(16) Pair { double one, other; };
extern "C" __global__ void twice(Pair* pair) { *pair = Pair{1.0, 2.0}; }
"""


def main() -> None:
    """Launch a kernel that stores at a misaligned address, on the last replica."""
    strategy: Any = hs.MultiWorkerMirroredStrategy()
    total = strategy.reduce("sum", cupy.ones(8), axis=None)
    assert float(total[0]) == strategy.num_replicas_in_sync
    if strategy.replica_id == strategy.num_replicas_in_sync - 1:
        cupy.RawKernel(CODE, "twice")((1,), (1,), (total[1:],))
    # Reduce on the host, where no call reports the error of the kernel.
    strategy.reduce("sum", 1.0, axis=None)


if __name__ == "__main__":
    main()
