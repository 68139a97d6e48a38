"""The state of the watchdog for one channel, which ranks of a worker share."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waiting import Waiting
from hpcstrat.engine.settings import Settings
from hpcstrat.safety.watchdog.pages import (
    BUSY,
    EXCHANGES,
    LEAVES,
    LONG_AGO,
    STALE_SECONDS,
    STATUS_START,
    WAITS,
    Page,
    RankState,
    Status,
)
from hpcstrat.safety.watchdog.peers import Mail, Peers, open_socket
from hpcstrat.safety.watchdog.stacks import Stacks, look_at, own_stacks, prepare

__all__ = ["HELD_SECONDS", "Watch"]

HELD_SECONDS = 6.0
"""Time for which an inquiry of another rank prevents an inquiry of this rank."""

# Time in which a report should appear after another rank has begun it.
_REPORT_SECONDS = 4.0
_LONGEST_TICK_SECONDS = 1.0
_SHORTEST_TICK_SECONDS = 0.05
_TICKS_IN_WARNING = 4
# After a request, ranks publish their stacks for this time.
_ASKED_SECONDS = 4.0
_LOOKED_SECONDS = 4.0


class Watch:
    """The state of this rank's watchdog for a channel.

    Collective over ``topology.replica_comm``.
    """

    def __init__(self, channel: Channel, settings: Settings) -> None:
        assert settings.warn_seconds is not None
        assert settings.limit_seconds is not None
        assert settings.stack_signal is not None
        self.channel, self.topology = channel, channel.topology
        topology = self.topology
        self.warn_seconds = settings.warn_seconds
        self.limit_seconds = settings.limit_seconds
        shortest = min(self.warn_seconds, self.limit_seconds) / _TICKS_IN_WARNING
        self.tick_seconds = min(
            max(shortest, _SHORTEST_TICK_SECONDS), _LONGEST_TICK_SECONDS
        )
        process = prepare(settings.stack_signal)
        self._main = process.main
        opened = open_socket() if topology.num_workers > 1 else None
        port = 0 if opened is None else opened.getsockname()[1]
        self.peers = Peers(topology, process, port)
        self.mail = None if opened is None else Mail(self.peers, opened)
        ranks = topology.worker_replicas
        self.indices = {rank: index for index, rank in enumerate(ranks)}
        self._pages = [
            Page(topology.status(index)[STATUS_START:]) for index in range(len(ranks))
        ]
        self._own = self._pages[topology.worker_comm.rank]
        self.closed = False
        self.turn_lock, self._lock = threading.Lock(), threading.RLock()
        self._status = Status()
        self._key: Any = None
        self._exchange: Waiting | None = None
        self._late: list[int] = []
        self._looked: dict[int, tuple[float, Stacks]] = {}

    def waiting(self) -> Waiting | None:
        """Return this rank's current wait (for headers, or inside of MPI), or None."""
        return self.channel.waiter.waiting or self._exchange

    def keep_alive(self) -> None:
        """Publish this rank's state once per tick, to show that its watchdog runs."""
        if time.monotonic() > self._status.beat + self.tick_seconds:
            self.publish()

    def publish(self, wants_stacks: bool = False) -> None:
        """Write this rank's state to its page; any thread may call this."""
        with self._lock:
            if self.closed:
                return
            now, status = time.monotonic(), self._status
            self._observe(now)
            status.beat, status.slow_until = now, self.channel.waiter.slow_until
            asked = wants_stacks or now < self._asked_at() + _ASKED_SECONDS
            if wants_stacks and now > status.asks_at + _ASKED_SECONDS / 2:
                status.asks_at = now
            status.text = {"late": self._late} if self._late else {}
            if asked:
                last = self.channel.last_call
                status.text |= {
                    "stacks": astuple(own_stacks()),
                    "last": "" if last is None else last.text,
                    "at": now,
                }
            self._own.write(status)

    def _observe(self, now: float) -> None:
        """Update the status: the main thread's state, and when that state began."""
        channel, status = self.channel, self._status
        waiting, exchanging = channel.waiter.waiting, channel.exchanging
        status.sequence = channel.num_calls
        if waiting is not None:
            status.state = LEAVES if waiting.leaves else WAITS
        else:
            status.state = BUSY if exchanging is None else EXCHANGES
        # An exchange may take any time while pieces move: each move restarts its time.
        key = status.sequence, status.state, waiting, self.topology.moves
        if key != self._key:
            self._key = key
            status.since = now if waiting is None else waiting.start
            self._exchange = None
            if waiting is None and exchanging is not None:
                begun = exchanging, now, self._main
                self._exchange = Waiting(channel.waiter, *begun)

    def _asked_at(self) -> float:
        return max((s.asks_at for s in self.statuses() if s), default=-math.inf)

    def statuses(self) -> list[Status | None]:
        """Return the statuses of the worker's ranks; None if a page is incomplete."""
        return [page.read() for page in self._pages]

    def states(self) -> list[RankState]:
        """Return the known states of this worker's ranks."""
        now = time.monotonic()
        return [
            RankState(rank)
            if status is None
            else RankState(
                rank,
                status.sequence,
                status.state,
                waited=now - status.since,
                slow_left=max(status.slow_until - now, LONG_AGO),
                age=now - status.beat,
            )
            for rank, status in zip(self.indices, self.statuses(), strict=True)
        ]

    def stacks_of(self, rank: int) -> tuple[Stacks, str] | None:
        """Return stacks and last call of a rank of this worker; None if not yet known.

        Takes up to half a second if the rank cannot publish its stacks itself.
        """
        now = time.monotonic()
        status = self._pages[self.indices[rank]].read(with_text=True)
        if status is None or now - status.beat > STALE_SECONDS:
            return self.look_at(rank), ""
        if status.text.get("at", -math.inf) < self._status.asks_at - self.tick_seconds:
            return None
        return Stacks(*status.text["stacks"]), status.text["last"]

    def look_at(self, rank: int) -> Stacks:
        """Return the stacks of a rank whose process does not update its page."""
        process, now = self.peers.process(rank), time.monotonic()
        if process is None:
            return Stacks("which does not answer")
        looked, stacks = self._looked.get(rank, (-math.inf, Stacks()))
        if now > looked + _LOOKED_SECONDS:
            stacks = look_at(process)
            self._looked[rank] = now, stacks
        return stacks

    def begin_inquiry(self) -> bool:
        """Publish that this rank begins an inquiry; return False if a lower one has."""
        with self._lock:
            self._status.inquires_at = time.monotonic()
        self.publish()
        return not self.others_inquire(self.topology.worker_comm.rank)

    def others_inquire(self, below: int | None = None) -> bool:
        """Return whether another rank of the worker is making an inquiry.

        If ``below`` is given, only ranks at lower positions in the worker are
        considered. Inquiries that began more than 6 seconds ago count as ended.
        """
        begun = time.monotonic() - HELD_SECONDS
        return any(
            status is not None and page is not self._own and status.inquires_at > begun
            for page, status in zip(self._pages[:below], self.statuses(), strict=False)
        )

    def reported_at(self) -> float:
        """Return the time of the last report known in this worker, or -infinity."""
        return max((s.reported_at for s in self.statuses() if s), default=-math.inf)

    def note_report(self) -> None:
        """Record and publish that this rank, or another, now reports late ranks."""
        with self._lock:
            self._status.reported_at = time.monotonic()
        self.publish()

    def decide(self, at: float, late: Sequence[int], patient_until: float) -> None:
        """Record and publish the result of an inquiry at time ``at``: the late ranks.

        All late ranks have announced to be slow until ``patient_until`` or longer.
        """
        with self._lock:
            self._late = list(late)[:8]
            self._status.verdict_at = at
            self._status.patient_until = patient_until
        self.publish()

    def adopt(self, waiting: Waiting) -> None:
        """Copy the newest result of an inquiry in this worker to this rank's wait."""
        reported_at = self.reported_at()
        if reported_at > waiting.start:
            waiting.held_until = reported_at + _REPORT_SECONDS
        told = [
            (status.verdict_at, index)
            for index, status in enumerate(self.statuses())
            if status is not None
        ]
        newest, index = max(told, default=(-math.inf, 0))
        if self._status.verdict_at >= newest:
            newest, status = self._status.verdict_at, self._status
            late = self._late
        else:
            page = self._pages[index].read(with_text=True)
            if page is None:
                return
            status, late = page, page.text.get("late", [])
        if newest > max(waiting.start, waiting.looked_at):
            waiting.patient_until = status.patient_until
            waiting.late = late
            # Set this field last: the main thread reads it before the other fields.
            waiting.looked_at = newest

    def close(self) -> None:
        """Release the shared memory, and close the socket."""
        with self._lock:
            self.closed = True
            for page in self._pages:
                page.release()
            if self.mail is not None:
                self.mail.close()
