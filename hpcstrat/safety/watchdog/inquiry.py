"""An inquiry: a waiting rank's search for the late ranks, and for their stacks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hpcstrat.engine.channel.waiting import Waiting
from hpcstrat.safety.watchdog.late_ranks import SHOWN_RANKS, LateRank, LateReport
from hpcstrat.safety.watchdog.pages import EXCHANGES, STALE_SECONDS, RankState
from hpcstrat.safety.watchdog.stacks import Stacks, site_of
from hpcstrat.safety.watchdog.watchdog_messages import WatchdogMessages

__all__ = ["Inquiry"]

_SILENT = Stacks("which does not answer")
_WORKERS_AT_ONCE = 64
# Attempts to ask a worker: its processes to ask (first, end), and seconds to wait.
# Several processes are tried, because each of them may be stopped.
_ATTEMPTS = ((0, 1, 0.4), (1, 2, 0.4), (2, 4, 0.4), (0, 16, 0.8))
_NAP_SECONDS = 0.05
_AGAIN_SECONDS = 0.5


class Inquiry:
    """Finds the late ranks for which this rank waits.

    ``serve`` answers other ranks' messages, for some seconds or until one arrives.
    """

    def __init__(
        self,
        messages: WatchdogMessages,
        waiting: Waiting,
        serve: Callable[[float], None],
    ) -> None:
        self._watch, self._messages = messages.watch, messages
        self._waiting, self._serve = waiting, serve
        self._sequence = self._watch.channel.num_calls
        self.late: list[RankState] = []
        self._reports = False
        self.states: list[RankState] = []
        self._last_calls: dict[int, str] = {}

    @property
    def obsolete(self) -> bool:
        """True if the wait is over, or a lower rank makes an inquiry instead."""
        watch = self._watch
        ended = watch.closed or watch.waiting() is not self._waiting
        return ended or (self._messages.yields and not self._reports)

    def run(self) -> bool:
        """Find and publish the `late` ranks; return False if this became `obsolete`."""
        watch = self._watch
        self._messages.begin()
        if not watch.begin_inquiry():
            return False
        self.states = watch.states()
        self._ask_workers()
        if self.obsolete:
            return False
        self.states.sort(key=lambda state: state.rank)
        self.late = self._find_late()
        left = min((state.slow_left for state in self.late), default=-math.inf)
        late, now = [state.rank for state in self.late[:SHOWN_RANKS]], time.monotonic()
        watch.decide(now, late, now + left)
        self._messages.tell_verdict(late, left)
        watch.adopt(self._waiting)
        return True

    def _ask_workers(self) -> None:
        """Ask workers for states, in groups whose answers fit the socket's buffer."""
        watch = self._watch
        topology = watch.topology
        others = [w for w in range(topology.num_workers) if w != topology.worker_id]
        for start in range(0, len(others), _WORKERS_AT_ONCE):
            self._ask(others[start : start + _WORKERS_AT_ONCE])
        notes: dict[int, float] = {}
        answers = self._messages.answers
        for answer in answers.values():
            self.states += [RankState(*row) for row in answer["ranks"]]
            notes |= {int(rank): left for rank, left in answer["notes"].items()}
        for worker in set(others) - answers.keys():
            for rank in watch.peers.ranks(worker):
                left = max(self._messages.noted(rank), notes.get(rank, -math.inf))
                self.states.append(RankState(rank, slow_left=left))

    def _ask(self, workers: list[int]) -> None:
        watch, answers = self._watch, self._messages.answers
        if watch.mail is None:
            return
        for first, last, seconds in _ATTEMPTS:
            missing = [w for w in workers if w not in answers]
            asked = [r for w in missing for r in watch.peers.ranks(w)[first:last]]
            self._messages.ask(asked)
            deadline = time.monotonic() + (seconds if asked else 0)
            while time.monotonic() < deadline and not self.obsolete:
                if all(w in answers for w in missing):
                    return
                self._serve(_NAP_SECONDS)

    def _find_late(self) -> list[RankState]:
        """Return the late ranks, according to the states that are known."""
        states = self.states
        known = self._watch.channel.waiter.late
        if self._watch.channel.waiter.waiting is self._waiting and -1 not in known:
            missing = [state for state in states if state.rank in known]
            idle = [state for state in missing if not state.in_call]
            if idle or self._watch.topology.num_workers == 1:
                # If some missing ranks are idle (in no call), report only these,
                # because missing ranks in another call perhaps wait for them.
                return idle or missing
        idle = [state for state in states if not state.in_call]
        behind = [s for s in idle if s.sequence < self._sequence or not s.fresh]
        earlier = [s for s in states if s.sequence < self._sequence]
        others = [s for s in states if s.rank != self._watch.topology.replica_id]
        # If no rank is late, a data exchange hangs in MPI: return its ranks.
        return behind or idle or earlier or [s for s in others if s.state == EXCHANGES]

    def report(self) -> LateReport | None:
        """Collect the stacks of the late ranks, and return the report.

        This takes some seconds. Returns None if the inquiry has become obsolete.
        """
        watch, waiting = self._watch, self._waiting
        # Notify the other ranks that this rank reports.
        self._reports = True
        watch.note_report()
        self._messages.tell_report()
        shown = {state.rank: state for state in self.late[:SHOWN_RANKS]}
        stacks = self._collect(list(shown))
        # Remove late ranks that have entered the call meanwhile.
        for state in watch.states():
            came = state.in_call and state.sequence >= self._sequence
            if came and state.rank in shown:
                del shown[state.rank]
        if self.obsolete or (self.late and not shown):
            return None
        late = [
            self._late_rank(state, stacks.get(rank, _SILENT))
            for rank, state in shown.items()
        ]
        names = watch.topology.job_ranks
        waits = [
            names[state.rank]
            for state in self.states
            if state.in_call and state.sequence == self._sequence
        ]
        if waiting.leaves:
            place = f"at the end of the program (call {self._sequence})"
        else:
            site = site_of(waiting.thread)
            where = f"{site}, " if site else ""
            place = f"in {waiting.call.text} ({where}call {self._sequence})"
        return LateReport(
            waits or [names[watch.topology.replica_id]],
            time.monotonic() - waiting.start,
            place,
            late,
            len(self.late),
        )

    def _late_rank(self, state: RankState, stacks: Stacks) -> LateRank:
        """Return the description of a late rank; its known state may be outdated."""
        last, ago = "", None
        known, number = self._watch.channel.last_call, state.sequence
        if state.age == math.inf or number < self._sequence - 1:
            # The rank has not answered, but must have begun the previous call, because
            # this rank has begun the current one.
            number = self._sequence - 1
        elif state.fresh or number >= self._sequence - 1:
            ago = state.waited + (0 if state.fresh else state.age)
        if number == self._sequence - 1:
            text = "" if known is None else known.text
        else:
            text = self._last_calls.get(state.rank, "")
        if number > 0:
            last = f"call {number} {text}".rstrip()
        was_slow = state.slow_left > self._waiting.start - time.monotonic()
        return LateRank(
            self._watch.topology.job_ranks[state.rank],
            self._watch.peers.host(state.rank),
            stacks,
            last_call=last,
            seconds_ago=ago,
            slow_left=state.slow_left,
            is_slow=was_slow,
        )

    def _collect(self, ranks: list[int]) -> dict[int, Stacks]:
        """Return the stacks of those late ranks that answer in time."""
        watch, found = self._watch, dict[int, Stacks]()
        deadline = time.monotonic() + STALE_SECONDS + 3 * watch.tick_seconds + 1
        again_at = -math.inf
        while len(found) < len(ranks) and time.monotonic() < deadline:
            if self.obsolete:
                break
            if time.monotonic() > again_at:
                again_at = time.monotonic() + _AGAIN_SECONDS
                self._want(found)
            for rank in ranks:
                if rank not in found:
                    self._collect_one(rank, found)
                    self._serve(0)
            self._serve(_NAP_SECONDS)
        return found

    def _want(self, found: dict[int, Stacks]) -> None:
        """Ask for stacks that are not in ``found``, by shared memory and messages."""
        watch = self._watch
        watch.publish(wants_stacks=True)
        for worker, answer in self._messages.answers.items():
            ranks = [
                state.rank
                for state in self.late[:SHOWN_RANKS]
                if state.rank not in found and watch.peers.worker(state.rank) == worker
            ]
            if ranks:
                self._messages.ask_stacks(answer["from"], ranks)

    def _collect_one(self, rank: int, found: dict[int, Stacks]) -> None:
        watch = self._watch
        if rank in watch.indices:
            answer = watch.stacks_of(rank)
            if answer is not None:
                found[rank], self._last_calls[rank] = answer
        elif rank in self._messages.found:
            found[rank], self._last_calls[rank] = self._messages.found[rank]
        elif watch.peers.worker(rank) not in self._messages.answers:
            found[rank] = watch.look_at(rank)
