"""Memory in which the compiled kernel adds the values that workers send in headers.

A worker of one replica shares no memory with other ranks. The kernel adds its values to
those of the other workers in private memory, which has the form of a shared segment: a
record and a place for each worker, instead of each rank. The values of other workers
come into their places from messages. Headers are compared by
`hpcstrat.engine.channel.wire_headers`; after that, the records of all workers are made
equal (``kernel.arrive``).
"""

from __future__ import annotations

import mmap

import numpy as np

from hpcstrat.engine.native import load
from hpcstrat.engine.typing import Array

__all__ = ["WorkerValues"]

_LINE_BYTES = 64


class WorkerValues:
    """A kernel for the values of all workers, and its memory; not collective.

    A place has ``room_bytes`` of values, and before them a header of ``header_bytes``
    (at most 64), so that both can be sent as one message.
    """

    def __init__(
        self, worker: int, num_workers: int, room_bytes: int, header_bytes: int
    ) -> None:
        self.place_bytes = -(-room_bytes // _LINE_BYTES) * _LINE_BYTES
        stride = _LINE_BYTES + self.place_bytes
        # Two records of each worker, which the kernel uses in turn, then the places.
        records = 2 * num_workers * _LINE_BYTES
        memory = mmap.mmap(-1, records + num_workers * stride + _LINE_BYTES)
        sizes = records + _LINE_BYTES, stride, self.place_bytes, self.place_bytes
        self.kernel = load().Kernel(memory, *sizes, worker, num_workers)
        array = np.frombuffer(memory, np.uint8, num_workers * stride, records)
        rows = array.reshape(num_workers, stride)
        # The values of all workers, one row for each, and the messages with headers.
        self.places: Array = rows[:, _LINE_BYTES:]
        self.messages: Array = rows[:, _LINE_BYTES - header_bytes :]
