"""End after a reduction without ``close()``, and check the sum at exit."""

from __future__ import annotations

import atexit
import time
from typing import Any

import cupy

LENGTH = 1 << 20

_kept: list[Any] = []


@atexit.register
def _look() -> None:
    """Check the sum on replica 0 at exit, after the rank has left the job.

    By then the other ranks have ended.
    """
    strategy, total, communicators = _kept
    if strategy.replica_id == 0:
        time.sleep(1.0)
        right = bool((total == strategy.num_replicas_in_sync).all())
        freed = not any(communicator.comm for communicator in communicators)
        print(f"sum right: {right}, NCCL freed: {freed}", flush=True)


# Import hpcstrat after the registration above, so that its exit function runs first.
import hpcstrat as hs  # noqa: E402


def main() -> None:
    """Sum on slow GPUs; then all ranks end at once."""
    from cupy.cuda import nccl

    made: list[Any] = []

    class _Noted(nccl.NcclCommunicator):  # type: ignore[name-defined, misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    nccl.NcclCommunicator = _Noted
    strategy: Any = hs.MultiWorkerMirroredStrategy()
    ones = cupy.ones(LENGTH, cupy.float32)
    strategy.reduce("sum", ones, axis=None)
    cupy.cuda.get_current_stream().synchronize()
    # A kernel of each rank may start this much later.
    cupy._standin.longest_delay = 0.5
    _kept.extend([strategy, strategy.reduce("sum", ones, axis=None), made])


if __name__ == "__main__":
    main()
