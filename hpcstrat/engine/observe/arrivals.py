"""Statistics of the time that this rank has waited for other ranks.

If all ranks arrive at a call within a rank's first polls, no time is measured; only a
rank that waits longer measures its wait.
"""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hpcstrat.engine.observe.arrival_report import (
    BINS,
    ROW_BYTES,
    ArrivalReport,
    ReplicaArrivals,
)
from hpcstrat.engine.topology.bounded import finish
from hpcstrat.engine.topology.topology import Topology

__all__ = ["Arrivals"]

# Finding the missing ranks takes 0.1 microseconds for each rank. In a worker with more
# ranks than this, a rank looks for missing ranks only in a long wait.
_MOST_LOOKED_AT = 16
_PUBLISH_SECONDS = 0.1
_GATHER_SECONDS = 5.0
# Attempts to read a rank's page: a read fails while the rank writes the page.
_READ_ATTEMPTS = 50


@dataclass(slots=True)
class _Waits:
    """Statistics of one kind of wait: for late ranks, or for data."""

    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    longest_call: str = ""
    histogram: list[int] = field(default_factory=lambda: [0] * BINS)

    def add(self, seconds: float, call: str) -> None:
        """Add a wait of some seconds in a call; not collective."""
        self.count += 1
        self.seconds += seconds
        if seconds > self.longest:
            self.longest, self.longest_call = seconds, call
        self.histogram[min(int(seconds * 1e6).bit_length(), BINS - 1)] += 1


class Arrivals:
    """The waits of this rank in one channel. Collective over ``topology.replica_comm``.

    ``count`` is a function that returns the number of collective calls so far.
    """

    # Seconds that this process has waited in all channels, also those of process groups
    # of torch.distributed.
    process_seconds: ClassVar[float] = 0.0

    def __init__(self, topology: Topology, comm: Any, count: Callable[[], int]) -> None:
        self.comm = comm
        self.topology = topology
        # Identifies the channel. The number is broadcast, because ranks that counted
        # their channels might get different numbers.
        self.number: int = comm.bcast(secrets.randbits(31))
        self._count = count
        self._start = time.perf_counter()
        self._header, self._data = _Waits(), _Waits()
        replicas, own = topology.worker_replicas, topology.worker_comm.rank
        self._awaited = dict.fromkeys(replicas, 0.0)
        # True if late ranks can be identified.
        self._knows = topology.num_workers == 1 < topology.worker_comm.size
        # True if late ranks are identified even in short waits.
        self.looks_early = self._knows and len(replicas) <= _MOST_LOOKED_AT
        self._host = platform.node()
        # True if this is the first replica of its worker.
        self.leads = own == 0
        self._pages = [topology.status(n)[:ROW_BYTES] for n in range(len(replicas))]
        self._page = self._pages[own]
        self._publish_at = 0.0
        self._waiting: tuple[float, str] | None = None
        self.publish()

    def begin(self, call: str) -> float:
        """Record that this rank begins to wait; return the start time for `end`."""
        now = time.perf_counter()
        # Publishing now costs no time, because this rank has to wait anyway.
        if now > self._publish_at:
            self._publish_at = now + _PUBLISH_SECONDS
            self.publish()
        self._waiting = now, call
        return now

    def end(self, start: float, call: str, late: Sequence[int]) -> None:
        """Add a wait that has ended; ``late`` has the ranks that arrived last."""
        self._waiting, seconds = None, time.perf_counter() - start
        self._header.add(seconds, call)
        Arrivals.process_seconds += seconds
        if self._knows:
            for replica in late:
                self._awaited[replica] += seconds / len(late)

    def count_data(self, start: float, call: str) -> None:
        """Add a wait for data that began at ``start`` (``time.perf_counter``)."""
        seconds = time.perf_counter() - start
        self._data.add(seconds, call)
        Arrivals.process_seconds += seconds

    def own(self) -> ReplicaArrivals:
        """Return this replica's wait statistics, including a wait in progress."""
        header, data, now = self._header, self._data, time.perf_counter()
        waited, longest, text = header.seconds, header.longest, header.longest_call
        if self._waiting is not None:
            start, call = self._waiting
            waited += now - start
            if now - start > longest:
                longest, text = now - start, call
        awaited = sorted(self._awaited.items(), key=lambda pair: -pair[1])
        return ReplicaArrivals(
            replica=self.topology.replica_id,
            host=self._host,
            elapsed_seconds=now - self._start,
            calls=self._count(),
            waits=header.count,
            waited_seconds=waited,
            longest_seconds=longest,
            longest_call=text,
            histogram=tuple(header.histogram),
            data_waits=data.count,
            data_seconds=data.seconds,
            data_longest_seconds=data.longest,
            awaited=tuple(pair for pair in awaited if pair[1]),
        )

    def publish(self) -> None:
        """Write this replica's wait statistics to the worker's shared memory."""
        self._page[:] = self.own().packed()

    def of_worker(self) -> ArrivalReport:
        """Return the wait statistics that the worker's replicas have published.

        A replica that was killed while it wrote its statistics is omitted.
        """
        rows = []
        for page in self._pages:
            for _ in range(_READ_ATTEMPTS):
                row = ReplicaArrivals.unpacked(page.tobytes())
                if row is not None:
                    rows.append(row)
                    break
        return ArrivalReport(tuple(rows))

    def at_end(self) -> ArrivalReport | None:
        """Gather all replicas' `ReplicaArrivals` on replica 0, at the program's end.

        Collective over ``topology.replica_comm``, after all ranks have announced their
        end. Returns None on the other replicas, and after a timeout of 5 seconds, such
        as when a rank has died.
        """
        first = self.topology.replica_id == 0
        data = self.own().packed()
        rows = bytearray(ROW_BYTES * self.topology.num_replicas) if first else None
        request = self.comm.Igather(data, rows, root=0)
        came = finish([request], time.monotonic() + _GATHER_SECONDS, naps=True)
        if rows is None or not came:
            return None
        view = memoryview(rows)
        found = (
            ReplicaArrivals.unpacked(bytes(view[start : start + ROW_BYTES]))
            for start in range(0, len(rows), ROW_BYTES)
        )
        return ArrivalReport(tuple(row for row in found if row is not None))

    def close(self) -> None:
        """Release the views of the shared memory."""
        for page in self._pages:
            page.release()
        self._pages = []
