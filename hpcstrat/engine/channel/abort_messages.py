"""Abort messages, which a rank sends to all ranks when an error ends one of its calls.

The rank cannot report the error in a header, because the error may have occurred while
headers or data were exchanged. Instead, it sends a short message to every other rank,
without waiting. Every waiting rank looks for these messages. A rank that finds a
message raises, and also sends abort messages to all ranks, because a third rank may be
waiting for it. A rank that left its call between two headers reads all messages in its
next call: if all ranks have left the same call at the same point, they continue.
"""

from __future__ import annotations

import contextlib
import struct
import time
from typing import Any

from hpcstrat.engine.channel.waitable import Waitable
from hpcstrat.engine.topology.kept_requests import keep
from hpcstrat.engine.topology.topology import Topology

__all__ = ["NOWHERE", "AbortMessages", "Point"]

_TAG = 11
# Size of a message, so small that MPI sends it before the receive is posted.
_MOST_BYTES = 600
# The head of a message: the sender's `Point`.
_HEAD = struct.Struct("=qq")
_ON_THE_WAY_SECONDS = 2.0

Point = tuple[int, int]
"""The numbers of headers that a rank had posted when it began, and when it left, the
entry that failed, if it left the entry between two headers."""

NOWHERE: Point = -1, -1
"""Stands for the point of a rank that cannot resume."""


class AbortMessages(Waitable):
    """The abort messages that one rank sends and receives over ``comm``."""

    def __init__(self, topology: Topology, comm: Any) -> None:
        self._mpi, self._comm = topology.mpi, comm
        self._others = frozenset(range(comm.size)) - {comm.rank}
        # The call for whose data this rank waits, and the time of its first look after
        # another rank had left this call.
        self._awaited = -1, 0.0
        self.forget()

    def forget(self) -> None:
        """Forget all messages, because all ranks have left the same call and resume.

        Each rank has sent one message, which has arrived. No rank leaves another call
        before all ranks have made a call together.
        """
        # The text of this rank's own message, or of a message that it passes on; the
        # point at which this rank left its call; the ranks not notified yet.
        self._text, self._point, self._untold = "", NOWHERE, set[int]()
        # The point and the text of each message received, by the rank that sent it.
        self._came: dict[int, tuple[Point, str]] = {}

    def tell(self, text: str, point: Point = NOWHERE) -> None:
        """Send an abort message to all other ranks, without waiting for them."""
        self._text, self._point, self._untold = text, point, set(self._others)
        self._finish()

    @property
    def may_resume(self) -> bool:
        """True if this rank has left a call between two headers; not collective."""
        return self._point != NOWHERE

    def _finish(self) -> None:
        """Send this rank's message to all ranks that it has not notified yet."""
        data = _HEAD.pack(*self._point) + self._text.encode(errors="replace")
        message = [data[:_MOST_BYTES], self._mpi.BYTE]
        for rank in sorted(self._untold):
            # MPI raises if the rank has died, or if MPI cannot be used any more.
            with contextlib.suppress(Exception):
                keep([self._comm.Isend(message, dest=rank, tag=_TAG)])
            self._untold.discard(rank)

    def look(self, call: int | None = None, *, for_data: bool = False) -> str:
        """Return another rank's abort text, or "" if there is none.

        If there is one, this rank also sends abort messages to all ranks, because it
        will not make its next call. This rank waits in the call with number ``call``,
        for headers or, if ``for_data``, for data. Messages of ranks that have done
        their part of this call are ignored. The look drives MPI's progress.
        """
        # Match each message when it is found: a progress thread or a signal handler may
        # look at the same time, and a receive would wait for the message it has taken.
        while (message := self._comm.Improbe(tag=_TAG)) is not None:
            status, buffer = self._mpi.Status(), bytearray(_MOST_BYTES)
            message.Recv([buffer, self._mpi.BYTE], status)
            entered, left = _HEAD.unpack_from(buffer)
            data = buffer[_HEAD.size : status.Get_count(self._mpi.BYTE)]
            told = (entered, left), data.decode(errors="replace")
            self._came[status.source] = told
        for point, text in list(self._came.values()):
            if call is None or self._ends(point[1], call, for_data):
                if not self._text:
                    self.tell(text)
                self._finish()
                return text
        return ""

    def _ends(self, left: int, call: int, for_data: bool) -> bool:
        """Return whether a rank that left call ``left`` keeps ``call`` from ending."""
        if left != call or not for_data:
            return left < call
        # The rank has posted the header of this call. If its data do not arrive within
        # some seconds, assume that it has not sent them.
        now = time.monotonic()
        if self._awaited[0] != call:
            self._awaited = call, now
        return now > self._awaited[1] + _ON_THE_WAY_SECONDS

    def agreed(self) -> bool:
        """Return whether all ranks have left the same call at the same point."""
        self.look()
        points = {point for point, _ in list(self._came.values())}
        return not self.missing() and points == {self._point} != {NOWHERE}

    def missing(self) -> list[int]:
        """Return the ranks without a message; ``[]`` if some rank cannot resume."""
        self.look()
        if any(point == NOWHERE for point, _ in list(self._came.values())):
            return []
        return sorted(self._others - self._came.keys())
