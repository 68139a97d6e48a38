"""Messages by which a rank that left a call by an error tells all others.

Such a rank announces nothing in a header, as it may have left in the midst of one, or
of the data. It sends a short message to every other rank, without waiting. Ranks that
wait for anything find it; they raise, and tell all, too: a third one may wait for them.
A rank that was between two headers looks at all messages when it makes its next call:
where all ranks have left the same call at the same point, they go on.
"""

from __future__ import annotations

import contextlib
import struct
import time
from typing import Any

from hpcstrat.engine.channel.waitable import Waitable
from hpcstrat.engine.topology.kept_requests import keep
from hpcstrat.engine.topology.topology import Topology

__all__ = ["AbortMessages"]

_TAG = 11
# Far below what MPI libraries send at once, without the receiver's help.
_MOST_BYTES = 600
# Number of earlier times that ranks went on together, and the sender's position.
_HEAD = struct.Struct("=qqq")
_ON_THE_WAY_SECONDS = 2.0
_Point = tuple[int, int]
_NOWHERE: _Point = -1, -1
# For each rank that has told something: where it was, and the text.
_Came = dict[int, tuple[_Point, str]]


class AbortMessages(Waitable):
    """The messages of one channel's rank; ``comm`` is the channel's own."""

    def __init__(self, topology: Topology, comm: Any) -> None:
        self._mpi = topology.mpi
        self._comm = comm
        self._others = frozenset(range(comm.size)) - {comm.rank}
        # This rank's text, empty while all is well, and the ranks still to be told it.
        self._text, self._point = "", _NOWHERE
        self._untold: set[int] = set()
        self._turn, self._came = 0, _Came()
        # Messages of ranks that went on before this one, and left another call.
        self._ahead = _Came()
        # The call for whose data this rank waits, and since when.
        self._awaited = -1, 0.0

    def tell(self, text: str, point: _Point = _NOWHERE) -> None:
        """Tell all other ranks, without waiting for them.

        ``point`` is the number of the call at which this rank has entered what it has
        left, and of the one after which it did, where it is in none.
        """
        self._text, self._point, self._untold = text, point, set(self._others)
        self._finish()

    def _finish(self) -> None:
        """Tell the ranks that were not told, after an interrupt of `tell`, too."""
        data = _HEAD.pack(self._turn, *self._point)
        data += self._text.encode(errors="replace")
        message = [data[:_MOST_BYTES], self._mpi.BYTE]
        for rank in sorted(self._untold):
            # MPI raises where the rank has died, or all of MPI has.
            with contextlib.suppress(Exception):
                keep([self._comm.Isend(message, dest=rank, tag=_TAG)])
            self._untold.discard(rank)

    def look(self, call: int | None = None, *, for_data: bool = False) -> str:
        """Return what other ranks have told, empty for nothing; drives MPI's progress.

        This rank then tells all, too, since it will not make its next call. ``call`` is
        the number of the call in which it waits, for its header or for its data:
        messages of ranks that have done their part of that are ignored.
        """
        comm = self._comm
        while comm.Iprobe(tag=_TAG):
            status, buffer = self._mpi.Status(), bytearray(_MOST_BYTES)
            comm.Recv([buffer, self._mpi.BYTE], tag=_TAG, status=status)
            turn, entered, left = _HEAD.unpack_from(buffer)
            data = buffer[_HEAD.size : status.Get_count(self._mpi.BYTE)]
            told = (entered, left), data.decode(errors="replace")
            if turn == self._turn or told[0] == _NOWHERE:
                # The second is for good, whenever it was sent.
                self._came[status.source] = told
            elif turn > self._turn:
                self._ahead[status.source] = told
        for point, text in self._came.values():
            if call is None or self._ends(point[1], call, for_data):
                if not self._text:
                    self._text, self._untold = text, set(self._others)
                self._finish()
                return text
        return ""

    def _ends(self, left: int, call: int, for_data: bool) -> bool:
        """Whether a rank that left after one call will not do its part of another."""
        if left != call or not for_data:
            return left < call
        # It has announced this call. Whether it has given its data, time tells.
        now = time.monotonic()
        if self._awaited[0] != call:
            self._awaited = call, now
        return now > self._awaited[1] + _ON_THE_WAY_SECONDS

    def agreed(self) -> bool:
        """Whether all ranks have left the same call at the same point."""
        self.look()
        points = {point for point, _ in self._came.values()}
        return not self.missing() and points == {self._point} != {_NOWHERE}

    def missing(self) -> list[int]:
        """Return the ranks that have told nothing yet; none once it is decided."""
        self.look()
        if any(point == _NOWHERE for point, _ in self._came.values()):
            return []
        return sorted(self._others - self._came.keys())

    def forget(self) -> None:
        """Begin anew, after all ranks have."""
        self._turn += 1
        self._text, self._point, self._untold = "", _NOWHERE, set()
        self._came, self._ahead = self._ahead, _Came()
