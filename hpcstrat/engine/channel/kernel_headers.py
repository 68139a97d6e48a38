"""Headers of one worker's ranks as the compiled kernel posts and compares them.

The records lie where those of `hpcstrat.engine.channel.headers` do. Their numbers are
stored and read as C11's atomics, the tick last with release and first with acquire, so
that a rank that sees a tick sees all that was stored before it, on every processor.
"""

from __future__ import annotations

from typing import Any

from hpcstrat.engine.channel.headers import SegmentHeaders
from hpcstrat.engine.native import load
from hpcstrat.engine.topology.topology import SLOTS_IN_RING, Topology

__all__ = ["KernelHeaders", "make_kernel"]


def make_kernel(topology: Topology) -> Any:
    """Return a kernel for this worker's segment; None unless all its ranks have one.

    Collective over ``topology.worker_comm``.
    """
    comm, segment = topology.worker_comm, topology.segment
    module, kernel = load(), None
    if module is not None and comm.size > 1:
        ring_bytes = topology.slot_bytes * SLOTS_IN_RING
        sizes = segment.common_bytes, segment.part_bytes, ring_bytes
        try:
            kernel = module.Kernel(segment.buffer, *sizes, comm.rank, comm.size)
        except ValueError:
            # A window of MPI, which may begin anywhere.
            kernel = None
    everywhere = all(comm.allgather(kernel is not None))
    if kernel is not None and not everywhere:
        kernel.close()
    return kernel if everywhere else None


class KernelHeaders(SegmentHeaders):
    """`SegmentHeaders`, by the kernel."""

    def __init__(self, topology: Topology, kernel: Any) -> None:
        super().__init__(topology)
        self._kernel = kernel

    def post(self, run: int, digest: int, flags: int) -> None:
        """Announce this rank's header; does not wait."""
        self._kernel.post(run, digest, flags)

    def agreed(self) -> bool:
        """Whether all ranks have announced the same; False while some are missing."""
        return bool(self._kernel.agreed())

    def missing(self) -> list[int]:
        """Return the ranks whose headers have not come."""
        tick = self._kernel.tick
        return [
            self._replicas[rank]
            for rank, (seen, *_) in enumerate(self.records(tick))
            if seen != tick
        ]

    def close(self) -> None:
        """Let go of the memory."""
        self._kernel.close()
        super().close()
