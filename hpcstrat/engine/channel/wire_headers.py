"""The headers of ranks on several workers, and the few values that travel in them.

The ranks of a worker compare their records in its shared segment. The first rank of
each then tells the other workers, by the dissemination of Bruck et al.
(doi:10.1109/71.642949): in step ``k`` it sends its own header and those of the
``2**k - 1`` workers after it to the worker ``2**k`` before it, so that ``p`` workers
know of all others after ``ceil(log2(p))`` messages of each. In one more step in the
segment the worker's ranks learn how it ended; both steps order memory, see
`hpcstrat.engine.channel.headers`.

A message begins with the header, and the values of a small reduction follow, so that it
costs no other exchange. Values beyond what MPI sends at once go in messages of their
own, which are received when the header has come, as that says how much follows. A rank
that gets another header than its own takes none of the values, and sends from there on
a header that is equal to no other: all learn of it in as many steps. Ranks that are in
different calls send messages of different lengths; each is received into memory for the
longest one.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.channel.headers import SegmentHeaders
from hpcstrat.engine.channel.interruptible import EAGER_BYTES
from hpcstrat.engine.channel.shared_rings import SharedRings
from hpcstrat.engine.channel.waitable import HeaderPayload, Waitable
from hpcstrat.engine.topology.topology import Topology

__all__ = ["HEADER_BYTES", "WireHeaders", "room_bytes"]

_HEADER = struct.Struct("=4q")
HEADER_BYTES = _HEADER.size
"""Size of a header between workers; values begin behind it."""

# No header that a rank announces: sequence numbers are positive.
_DIFFERENT = b"\xff" * HEADER_BYTES
_TAG = 17
# Bytes that a wire carries in the time of a message: 10 Gbit/s for 13 us.
_DELAY_BYTES = 16 << 10
# Larger values are better sent in pieces, so that a wire is busy while ranks add.
_MOST_DELAYS = 16
_ALIGNMENT_BYTES = 16
# Number of bits of a header's last number that are flags; the rest is the size of the
# values behind it.
_FLAG_BITS = 8

# Most sizes of values for which requests are kept; a program may have new ones forever.
_MOST_KEPT = 256

# Requests of one step: of the header with the values in it, and for the values behind
# it. They are used again, which takes half of the time.
_Requests = tuple[Any, Sequence[Any], Sequence[Any]]

# Buffers that MPI may still write to.
_left: list[Any] = []


def room_bytes(num_workers: int, *, narrows: bool = False) -> int:
    """Return the most bytes of values of each worker that a header carries.

    A rank gets ``p - 1`` times the values. By parts, see `collectives.exchanged`, it
    gets ``2 (p - 1) / p`` times, in two more exchanges, each of which takes as long as
    ``_DELAY_BYTES``: up to this size the header is faster. With ``narrows``, parts, and
    only they, travel in half as many bytes.
    """
    delays = float(_MOST_DELAYS)
    if narrows:
        delays = 2 * num_workers / max(1, num_workers - 1)
    elif num_workers > 2:
        delays = min(delays, 2 * num_workers / (num_workers - 2))
    room = int(delays * _DELAY_BYTES) // max(1, num_workers - 1)
    return room // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES


class WireHeaders(Waitable):
    """The headers of one rank of several workers; ``comm`` is its channel's own.

    Collective over ``topology.replica_comm``.
    """

    def __init__(
        self, topology: Topology, comm: Any, segment: SegmentHeaders, rings: SharedRings
    ) -> None:
        self._comm, self._segment, self._rings = comm, segment, rings
        self.alone = topology.worker_comm.size == 1
        leads = topology.worker_comm.rank == 0
        # The first replica of each worker, in the order of the workers.
        firsts = sorted(set(comm.allgather(topology.worker_replicas[0])))
        me, size = topology.worker_id, len(firsts)
        self.worker, self.num_workers = me, size
        self.room_bytes = room = room_bytes(size)
        # For each step: receiver, sender, and number of workers whose values travel.
        self._peers, self.counts = [], list[int]()
        for distance in (1 << step for step in range((size - 1).bit_length())):
            to, source = firsts[(me - distance) % size], firsts[(me + distance) % size]
            self._peers.append((to, source))
            self.counts.append(min(distance, size - distance))
        counts = self.counts if leads else []
        # Buffers for sending, with the values of this worker first, and for receiving.
        self.out = np.zeros(HEADER_BYTES + max(counts, default=0) * room, np.uint8)
        self.came = [np.zeros(HEADER_BYTES + n * room, np.uint8) for n in counts]
        # The sum of all.
        self.total = np.zeros(room if leads else 0, np.uint8)
        self._header: Any = self.out.data[:HEADER_BYTES]
        # Much faster than a comparison of the memory itself.
        self._reads = [came.data[:HEADER_BYTES].tobytes for came in self.came]
        self._receives = [
            comm.Recv_init(came, source, _TAG)
            for came, (_, source) in zip(self.came, self._peers, strict=False)
        ]
        # For each size of a worker's values: the requests of each step.
        self._kept: dict[int, list[_Requests]] = {}
        self._requests_for(0)
        self._sequence = 0
        # The comparison of a header; whether it has ended, whether messages are on
        # their way, and whether all headers so far are the same.
        self._steps: Iterator[None] = iter(())
        self._done, self._travels, self._same = True, False, True

    def _requests_for(self, nbytes: int) -> list[_Requests]:
        """Return the requests of all steps, for values of a size."""
        found = self._kept.get(nbytes)
        if found is None:
            found, make = [], self._comm
            for step, came in enumerate(self.came):
                to, source = self._peers[step]
                end = HEADER_BYTES + self.counts[step] * nbytes
                cuts = [
                    slice(start, min(start + EAGER_BYTES, end))
                    for start in range(0, end, EAGER_BYTES)
                ]
                first, *sends = [make.Send_init(self.out[c], to, _TAG) for c in cuts]
                receives = [make.Recv_init(came[c], source, _TAG) for c in cuts[1:]]
                found.append((first, sends, receives))
            self._kept[nbytes] = found
        return found

    def _forget(self) -> None:
        """Free the requests of all sizes."""
        for first, sends, receives in itertools.chain(*self._kept.values()):
            for request in (first, *sends, *receives):
                request.Free()
        self._kept.clear()

    def post(
        self, run: int, digest: int, flags: int, load: HeaderPayload | None
    ) -> None:
        """Announce this rank's header, and values; does not wait."""
        self._sequence = sequence = self._sequence + 1
        nbytes = 0 if load is None else load.nbytes
        own = _HEADER.pack(sequence, run, digest, flags | nbytes << _FLAG_BITS)
        self._done, self._same = False, True
        # A flag has all ranks agree once more, on the same values.
        if self.alone:
            self._steps = self._compare_across(own, load, finishes=not flags)
            next(self._steps, None)
        else:
            self._steps = self._compare_in_worker(own, load, finishes=not flags)
            # Each worker has its own rings, whose places its own ranks compare.
            self._segment.post(run, digest ^ self._rings.next, flags)

    def agreed(self) -> bool:
        """Whether all ranks have announced the same; False while some are missing."""
        if not self._done:
            next(self._steps, None)
        return self._done and self._same

    def missing(self) -> list[int]:
        """Return ``[-1]`` while ranks are missing: it is not known which."""
        self.agreed()
        return [] if self._done else [-1]

    def close(self) -> None:
        """Free the requests; not collective."""
        if self._travels:
            # Left in the midst of a header: a message may still come.
            _left.append(self)
            return
        self._forget()
        for request in self._receives:
            request.Free()
        self._receives = []

    def _compare_across(
        self, own: bytes, load: HeaderPayload | None, *, finishes: bool
    ) -> Iterator[None]:
        """Tell the other workers; goes as far as can be without waiting, and yields."""
        if load is not None:
            load.gather()
        if len(self._kept) > _MOST_KEPT:
            self._forget()
        requests = self._requests_for(0 if load is None else load.nbytes)
        self._header[:] = own
        self._travels = True
        for step, receive in enumerate(self._receives):
            sent, sends, receives = requests[step]
            sent.Start()
            receive.Start()
            behind = _started(sends)
            # The next message is laid out in the memory that this one is sent from.
            while not (receive.Test() and sent.Test()):
                yield
            header = self._reads[step]()
            if not self._same or header != own:
                # This rank sends another header from here on. It still receives the
                # values behind the header that came: the next one would get them.
                self._same, load, requests = False, None, self._requests_for(0)
                self._header[:] = _DIFFERENT
                nbytes = max(0, _HEADER.unpack(header)[-1] >> _FLAG_BITS)
                receives = self._requests_for(nbytes)[step][-1]
            behind += _started(receives)
            while behind and not type(behind[0]).Testall(behind):
                yield
            if load is not None:
                load.take(step)
        self._travels = False
        if load is not None and finishes:
            load.finish()
        self._done = self.alone

    def _compare_in_worker(
        self, own: bytes, load: HeaderPayload | None, *, finishes: bool
    ) -> Iterator[None]:
        """Do the same as one of several ranks of a worker, of which the first tells."""
        yield from self._compare_inside()
        if self._receives:
            if not self._same:
                own, load = _DIFFERENT, None
            yield from self._compare_across(own, load, finishes=finishes)
        self._segment.post(0, 0, int(not self._same))
        yield from self._compare_inside()
        self._done = True

    def _compare_inside(self) -> Iterator[None]:
        """Wait for the worker's ranks, and take note where they differ."""
        segment = self._segment
        while not segment.agreed():
            if not segment.missing():
                # They may have come between the two looks.
                self._same = self._same and segment.agreed()
                return
            yield


def _started(requests: Sequence[Any]) -> list[Any]:
    for request in requests:
        request.Start()
    return list(requests)
