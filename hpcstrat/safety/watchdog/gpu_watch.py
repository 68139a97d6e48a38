"""Detection of NCCL kernels that never end, because of a failure or a deadlock.

A collective call raises an error if NCCL has failed. But the program may never make
another collective call, because it waits inside of CUDA for an NCCL kernel that never
ends. NCCL itself reports only network errors. If a rank of the same node dies, or its
GPU hangs, the kernels of the other ranks wait forever without an error
(github.com/NVIDIA/nccl/issues/585). Therefore a CUDA event is recorded after each call
of NCCL, and the watchdog checks these events.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

from hpcstrat.engine.gpu import library
from hpcstrat.engine.logs import get_logger
from hpcstrat.safety.watchdog.late_ranks import some_ranks
from hpcstrat.safety.watchdog.watch import Watch

__all__ = ["GpuWatch"]

# Time that the program has for other work, such as a save, after NCCL has failed.
_GRACE_SECONDS = 60.0


class GpuWatch:
    """Checks NCCL kernels of this process; used by the watchdog's thread."""

    def __init__(self) -> None:
        # Time at which NCCL has failed; start time of the last wait that was reported.
        self._failed_at = math.inf
        self._told_for = math.inf
        self._looking: threading.Thread | None = None

    def reason_to_end(self, watches: Sequence[Watch]) -> str:
        """Return why this process must end, or an empty text; log warnings before."""
        if not library.is_loaded():
            return ""
        from hpcstrat.engine.gpu.transports import nccl_group

        failure, now = nccl_group.nccl_failure(), time.monotonic()
        self._failed_at = min(self._failed_at, now) if failure else math.inf
        if now > self._failed_at + _GRACE_SECONDS:
            return (
                f"NCCL has failed ({failure}), and a kernel that waits for a kernel of "
                "another rank would never end; set NCCL_DEBUG=INFO to see why"
            )
        if self._looking is None or not self._looking.is_alive():
            # Check the events in a separate thread, because a call of CUDA may hang.
            self._looking = threading.Thread(
                target=nccl_group.look_at_kernels, name="hpcstrat-gpu", daemon=True
            )
            self._looking.start()
        since = nccl_group.kernels_wait_since()
        if not watches or math.isinf(since):
            return ""
        return self._reason(watches, since, now)

    def _reason(self, watches: Sequence[Watch], since: float, now: float) -> str:
        slow_until = max(watch.channel.waiter.slow_until for watch in watches)
        waited = now - max(since, slow_until)
        found = (
            f"{waited:.0f} s after all ranks had begun it, a call of NCCL has not ended"
            f" on this rank's GPU{_calls(watches)}{_silent(watches)}"
        )
        if waited > min(watch.limit_seconds for watch in watches):
            return (
                f"{found}; look at the processes and GPUs of the other ranks "
                "(nvidia-smi, dmesg), or raise limit_seconds, if their earlier kernels "
                "take so long"
            )
        warns = waited > min(watch.warn_seconds for watch in watches)
        if warns and self._told_for != since:
            self._told_for = since
            get_logger().warning("%s; the job ends after limit_seconds", found)
        return ""


def _calls(watches: Sequence[Watch]) -> str:
    last: list[Any] = [watch.channel.last_call for watch in watches]
    texts = [call.text for call in last if call is not None]
    return f" (last call: {', '.join(texts)})" if texts else ""


def _silent(watches: Sequence[Watch]) -> str:
    """Return a text that names the ranks of this worker whose watchdogs do not run."""
    states = [(watch, state) for watch in watches for state in watch.states()]
    silent = [(w.topology, state.rank) for w, state in states if not state.fresh]
    ranks = sorted({topology.job_ranks[rank] for topology, rank in silent})
    return f", and {some_ranks(ranks)} of this worker shows no life" if ranks else ""
