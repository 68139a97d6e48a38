"""End after a reduction, without ``close()``; see `main` for who looks at the sum."""

from __future__ import annotations

import atexit
import time
from typing import Any

import cupy

LENGTH = 1 << 20

_kept: list[Any] = []


@atexit.register
def _look() -> None:
    """Look at the sum on replica 0, which comes after the rank has left.

    By then the other ranks are gone.
    """
    strategy, total, communicators = _kept
    if strategy.replica_id == 0:
        time.sleep(1.0)
        right = bool((total == strategy.num_replicas_in_sync).all())
        freed = not any(communicator.comm for communicator in communicators)
        print(f"sum right: {right}, NCCL freed: {freed}", flush=True)


# After the function above, so that its own comes before it at the end.
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
    # A kernel of each rank takes so long to begin.
    cupy._standin.longest_delay = 0.5
    _kept.extend([strategy, strategy.reduce("sum", ones, axis=None), made])


if __name__ == "__main__":
    main()
