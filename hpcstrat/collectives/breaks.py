"""How ranks learn that another one has left a call by an error of its own.

Such a rank announces nothing in a header: it may have left in the midst of one, or of
the data, and does not wait for anybody. It sends a short message to every other rank,
which those find that wait for it, or for anything else; they raise, and answer. A rank
that was between two headers looks at all messages when it makes its next call: where
all ranks have left the same call at the same point, they go on as if nothing had been.
"""

from __future__ import annotations

import contextlib
import struct
from typing import Any

from hpcstrat.topology import Topology

__all__ = ["Breaks"]

_TAG = 11
# Far below what MPI libraries send at once, without the receiver's help.
_MOST_BYTES = 600
_POINT = struct.Struct("=qq")
_NOWHERE = -1, -1
_Point = tuple[int, int]


class Breaks:
    """The messages of one channel's rank; ``comm`` is the channel's own."""

    def __init__(self, topology: Topology, comm: Any) -> None:
        self._mpi = topology.mpi
        self._comm = comm
        self._point: _Point = _NOWHERE
        self._text = ""
        self._untold: list[int] = []
        # By rank, where it was, and what it has told.
        self._came: dict[int, tuple[_Point, str]] = {}
        # MPI reads their memory until they are done, which nobody waits for.
        self._requests: list[Any] = []

    def tell(self, text: str, point: _Point = _NOWHERE) -> None:
        """Tell all other ranks, without waiting for them.

        ``point`` is the number of the call at which this rank has entered what it has
        left, and of the one after which it did, where it is in none.
        """
        self._text, self._point = text, point
        own, size = self._comm.rank, self._comm.size
        self._untold = [rank for rank in range(size) if rank != own]
        self.finish()

    def finish(self) -> None:
        """Tell the ranks that were not told: also that can be interrupted."""
        while self._untold:
            self._send(self._untold[-1])
            self._untold.pop()

    def _send(self, rank: int) -> None:
        data = _POINT.pack(*self._point) + self._text.encode(errors="replace")
        # An error of MPI: the rank has died, or all of MPI has.
        with contextlib.suppress(Exception):
            request = self._comm.Isend(
                [data[:_MOST_BYTES], self._mpi.BYTE], dest=rank, tag=_TAG
            )
            self._requests.append(request)

    def look(self) -> str:
        """Return what other ranks have told, empty for nothing; drives MPI's progress.

        Who has told nothing itself answers, since its next call will not be made.
        """
        comm = self._comm
        while comm.Iprobe(tag=_TAG):
            status, buffer = self._mpi.Status(), bytearray(_MOST_BYTES)
            comm.Recv([buffer, self._mpi.BYTE], tag=_TAG, status=status)
            point = _POINT.unpack_from(buffer)
            text = buffer[_POINT.size : status.Get_count(self._mpi.BYTE)]
            self._came[status.source] = point, text.decode(errors="replace")
            if not self._text:
                self._text, self._untold = self._came[status.source][1], []
                self._send(status.source)
        return next((text for _, text in self._came.values()), "")

    def agreed(self) -> bool:
        """Whether all ranks have left the same call at the same point."""
        self.look()
        points = {point for point, _ in self._came.values()}
        return not self.missing() and points == {self._point} != {_NOWHERE}

    def missing(self) -> list[int]:
        """Return the ranks that have told nothing yet."""
        self.look()
        others = set(range(self._comm.size)) - {self._comm.rank}
        return sorted(others - self._came.keys())

    def forget(self) -> None:
        """Begin anew, after all ranks have."""
        self._text, self._point = "", _NOWHERE
        self._came.clear()
