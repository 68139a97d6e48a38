"""Wait in CUDA for a kernel that never ends, after NCCL has failed."""

from __future__ import annotations

import threading
from typing import Any

import cupy

import hpcstrat as hs
from hpcstrat.safety.watchdog import gpu_watch


class Failed:
    """A communicator whose remote GPU no longer answers."""

    def check_async_error(self) -> None:
        """Raise the error of NCCL."""
        raise RuntimeError("NCCL_ERROR_REMOTE_ERROR: network error")


def main() -> None:
    """Fail on replica 0, while the other replica waits for it in a call of MPI."""
    gpu_watch._GRACE_SECONDS = 1.0
    strategy: Any = hs.MultiWorkerMirroredStrategy()
    total = strategy.reduce("sum", cupy.ones(8), axis=None)
    assert float(total[0]) == strategy.num_replicas_in_sync
    print("reduced", flush=True)
    if strategy.replica_id == 0:
        group = strategy.collectives.channel.device_group
        group._transports["nccl"].group._comm = Failed()
        stream, never = cupy.cuda.get_current_stream(), threading.Event()
        stream.launch_host_func(lambda _: never.wait(), None)
        stream.synchronize()
    strategy.reduce("sum", cupy.ones(8), axis=None)


if __name__ == "__main__":
    main()
