"""Messages between the watchdogs of different workers, for one channel.

Each process of a worker can answer for all ranks of the worker, so that there is an
answer even if a process is stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from hpcstrat.safety.watchdog.pages import LONG_AGO, RankState
from hpcstrat.safety.watchdog.stacks import Stacks
from hpcstrat.safety.watchdog.watch import HELD_SECONDS, Watch

__all__ = ["WatchdogMessages"]

# When a rank expects to be slow, it notifies two ranks in each of two other workers.
_WORKERS_TOLD = 2
_RANKS_TOLD = 2


class WatchdogMessages:
    """Sends, receives and answers the messages of this rank.

    A round is one inquiry of this rank. ``held_until`` is the time at which another
    rank's inquiry should be over. ``yields`` is True if a lower rank has begun an
    inquiry in this round. ``answers`` has the answers of this round by worker.
    ``found`` has stacks and last calls of ranks of other workers.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._mail = watch.mail
        self._rank = watch.topology.replica_id
        self._round = 0
        self._notes: dict[int, float] = {}
        self.held_until = -math.inf
        self.yields = False
        self.answers: dict[int, dict[str, Any]] = {}
        self.found: dict[int, tuple[Stacks, str]] = {}
        # Number of failures of the watchdog's thread for this channel.
        self.failures = 0

    def begin(self) -> None:
        """Begin a round: ignore answers to questions of earlier rounds from now on."""
        self._round += 1
        self.yields = False
        self.answers.clear()
        self.found.clear()

    def ask(self, ranks: Sequence[int]) -> None:
        """Ask ranks for the states of their workers; answers go to `answers`."""
        self._send(ranks, "ask", {})

    def ask_stacks(self, to: int, ranks: Sequence[int]) -> None:
        """Ask rank ``to`` for stacks of ranks of its worker; answers go to `found`."""
        self._send([to], "stacks", {"ranks": ranks})

    def tell_verdict(self, late: Sequence[int], left: float) -> None:
        """Send the result of the inquiry to the ranks that answered.

        These are the late ranks, and the seconds for which they may still be slow.
        """
        senders = [answer["from"] for answer in self.answers.values()]
        self._send(senders, "verdict", {"late": late, "left": max(left, LONG_AGO)})

    def tell_report(self) -> None:
        """Notify the ranks that answered that this rank makes the report."""
        senders = [answer["from"] for answer in self.answers.values()]
        self._send(senders, "report", {})

    def tell_slow(self, slow_until: float) -> None:
        """Notify two other workers that this rank expects to be slow.

        These workers can then answer for this rank, if C code stops its watchdog and
        its worker has no other rank.
        """
        topology, peers = self.watch.topology, self.watch.peers
        note = {"left": slow_until - time.monotonic()}
        for step in range(1, min(_WORKERS_TOLD, topology.num_workers - 1) + 1):
            worker = (topology.worker_id + step) % topology.num_workers
            self._send(peers.ranks(worker)[:_RANKS_TOLD], "note", note)

    def noted(self, rank: int) -> float:
        """Return the seconds for which a rank of another worker expects to be slow."""
        return max(self._notes.get(rank, -math.inf) - time.monotonic(), LONG_AGO)

    def receive(self) -> None:
        """Process and answer the messages that have arrived."""
        if self._mail is None:
            return
        takers = {
            "ask": self._answer_ask,
            "status": self._take_status,
            "stacks": self._answer_stacks,
            "found": self._take_found,
            "verdict": self._take_verdict,
            "report": self._take_report,
            "note": self._take_note,
        }
        for message in self._mail.receive():
            takers[message["kind"]](message)

    def _send(self, ranks: Sequence[int], kind: str, more: dict[str, Any]) -> None:
        if self._mail is not None:
            fixed = {"kind": kind, "from": self._rank, "round": self._round}
            self._mail.send(ranks, {**fixed, **more})

    def _answer(self, message: dict[str, Any], kind: str, more: dict[str, Any]) -> None:
        self._send([message["from"]], kind, {**more, "round": message["round"]})

    def _answer_ask(self, message: dict[str, Any]) -> None:
        # Only one rank reports: the first rank that asks, or the lowest of several.
        self.held_until = time.monotonic() + HELD_SECONDS
        if message["from"] < self._rank:
            self.yields = True
        answer = {
            "ranks": [_row(state) for state in self.watch.states()],
            "notes": {rank: self.noted(rank) for rank in self._notes},
        }
        self._answer(message, "status", answer)

    def _take_status(self, message: dict[str, Any]) -> None:
        if message["round"] == self._round:
            self.answers[self.watch.peers.worker(message["from"])] = message

    def _answer_stacks(self, message: dict[str, Any]) -> None:
        watch = self.watch
        watch.publish(wants_stacks=True)
        for rank in message["ranks"]:
            found = watch.stacks_of(rank) if rank in watch.indices else None
            if found is not None:
                answer = {"rank": rank, "stacks": astuple(found[0]), "last": found[1]}
                self._answer(message, "found", answer)

    def _take_found(self, message: dict[str, Any]) -> None:
        if message["round"] == self._round:
            found = Stacks(*message["stacks"]), str(message["last"])
            self.found[message["rank"]] = found

    def _take_verdict(self, message: dict[str, Any]) -> None:
        now = time.monotonic()
        self.watch.decide(now, message["late"], now + message["left"])

    def _take_report(self, message: dict[str, Any]) -> None:
        self.watch.note_report()

    def _take_note(self, message: dict[str, Any]) -> None:
        self._notes[message["from"]] = time.monotonic() + message["left"]


def _row(state: RankState) -> list[float]:
    """Return a state as a list of rounded numbers, to keep messages short."""
    return [x if isinstance(x, int) else round(x, 2) for x in astuple(state)]
