"""The channel of a topology: headers, calls that are started, and the end of a rank."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from hpcstrat.channel.agreement import Agreement, EveryRankError
from hpcstrat.channel.awaited import HEADER, Awaited, Awaits
from hpcstrat.channel.call import Call, describe_call
from hpcstrat.channel.disagreement import FAILED, LEFT, Announcement, announce_error
from hpcstrat.channel.progress import ProgressThread, check_progress_thread
from hpcstrat.channel.started import Started
from hpcstrat.channel.waiting import Waiting
from hpcstrat.errors import CollectiveError
from hpcstrat.observe.timeline import active, recorded_wait
from hpcstrat.topology.topology import Topology

__all__ = ["Channel", "EveryRankError"]

_LEAVING = describe_call("leaving the program")

# What MPI may write to after a death, as long as it has not given up these calls.
_abandoned: list[Any] = []


class Channel(Agreement):
    """Carries one topology's calls.

    Collective over ``topology.replica_comm``.

    Parameters
    ----------
    topology : Topology
        At least two replicas.
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        # Made at the first call with arrays on GPUs, see device_group.
        self.device_group: Any = None
        self._progress: ProgressThread | None = None
        self._lock = threading.RLock()

    def post_leave(self) -> None:
        """Announce that this rank ends the program; waits for started calls only.

        Collective over ``topology.replica_comm`` where there are started calls.
        """
        with contextlib.suppress(Exception):
            self.drain()
        self.num_calls += 1
        self._records.post(0, _LEAVING.digest, LEFT)
        now, thread = time.monotonic(), threading.get_ident()
        self._waiter.waiting = Waiting(_LEAVING, now, thread, leaves=True)

    def poll_leave(self) -> str | None:
        """Look whether all ranks have answered `post_leave`.

        Not collective until the ranks differ, then collective over ``replica_comm``.

        Returns
        -------
        str or None
            None while ranks are missing; empty when all are leaving; else what the
            others did instead.

        Raises
        ------
        CollectiveError
            If they do not come in time.
        """
        late, waiting = self._records.missing(), self._waiter.waiting
        if late:
            self._waiter.late = late
            self.breaks.look()
            if waiting is not None:
                self._waiter.check_limit(waiting)
            return None
        self._waiter.waiting = None
        if self._records.agreed():
            return ""
        announcement = Announcement(self._rank, LEFT, "left the program")
        try:
            self._raise_disagreement(announcement)
        except CollectiveError as error:
            return str(error)
        return ""

    def step(self, call: Call) -> Awaited:
        """Tell this worker's ranks that this one has come to the next step of a call.

        Collective over ``topology.worker_comm``.

        Parameters
        ----------
        call : Call
            Which call.

        Returns
        -------
        SegmentRecords
            For `wait`: to be done when all have come.
        """
        self._steps.post(0, call.digest ^ self.slots.next, 0)
        self.topology.moves += 1
        return self._steps

    def drive(
        self, steps: Awaits, call: Call, timeout_seconds: float | None = None
    ) -> None:
        """Make a call: what an algorithm does before the header, that, and the rest.

        Collective over ``topology.replica_comm``. `Started` does the same without
        waiting.
        """
        header = next(steps)
        assert header is HEADER
        self.agree(call, timeout_seconds)
        with self.moving(call):
            for awaited in steps:
                self.wait(awaited, call)

    def wait(self, awaited: Awaited, call: Call) -> None:
        """Wait for a step, or a message.

        Collective over ``topology.replica_comm``; for a step, over its worker's ranks.

        Parameters
        ----------
        awaited : SegmentRecords or Message
            What is awaited.
        call : Call
            In which call, for messages.

        Raises
        ------
        CollectiveError
            If it does not come in time, or a process has died.
        """
        agreed = awaited.agreed
        self.topology.moves += 1
        for _ in range(self._waiter.quick_looks):
            if agreed():
                return
        if not self.arrivals.wait_data(self._waiter, awaited, call):
            raise CollectiveError(
                f"expected every rank in the same step of {call.text}, found "
                "another call's; end the program on every rank"
            )

    def start(self, started: Started) -> None:
        """Take a call whose end is not awaited; it goes on in every later call.

        Collective over ``topology.replica_comm``; does not wait.

        Parameters
        ----------
        started : Started
            The call.
        """
        self._refuse_if_broken(started.call)
        if active.recorder is not None:
            active.recorder.started(started)
        with self._lock:
            self.started.append(started)
            self.progress()
        if self._progress is not None:
            self._progress.wake()

    def forget_done(self) -> None:
        """Let go of the arrays of started calls that GPUs have done.

        Not collective.
        """
        if self.device_group is not None:
            with self._lock:
                self.device_group.lane.forget_done()

    def progress(self) -> None:
        """Do what can be done for the started calls without waiting.

        Not collective.
        """
        with self._lock:
            while self.started:
                first = self.started[0]
                if not first.advance(waits=False):
                    return
                self._forget(first)

    def drain(self, last: Started | None = None) -> None:
        """Wait for the end of started calls, whose handles keep their errors.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        last : Started, optional
            Up to which; default: all.
        """
        with self._lock:
            while self.started:
                first = self.started[0]
                first.advance(waits=True)
                self._forget(first)
                if first is last:
                    return

    def _forget(self, ended: Started) -> None:
        """Take an ended call off the queue, which an error may have emptied."""
        if self.started and self.started[0] is ended:
            self.started.popleft()
            if active.recorder is not None:
                active.recorder.ended(ended)

    def use_progress_thread(self, enter: Callable[[], object]) -> None:
        """Take started calls further in a thread, which calls ``enter`` first.

        Collective over ``topology.replica_comm``. A second call does nothing. Raises
        TopologyError on every rank if MPI was not started for threads, or a rank has no
        second core.
        """
        self.agree(describe_call("use of a progress thread"))
        check_progress_thread(self.topology)
        if self._progress is None:
            self._progress = ProgressThread(self, enter)

    def post_header(self, call: Call, run: int, *, failed: bool = False) -> None:
        """Announce a started call; does not wait.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        call : Call
            Which call.
        run : int
            ``step_mark`` when it was started.
        failed : bool
            Whether this rank cannot make it.
        """
        self._refuse_if_broken(call)
        self.num_calls += 1
        self._records.post(run, self._marked(call), FAILED if failed else 0)

    def header_came(self, call: Call, error: Exception | None = None) -> bool:
        """Look whether all ranks have announced the call of `post_header`.

        Not collective until the ranks differ, then collective over ``replica_comm``.

        Parameters
        ----------
        call : Call
            Which call.
        error : Exception, optional
            Why this rank has announced that it failed.

        Returns
        -------
        bool
            False while ranks are missing.

        Raises
        ------
        CollectiveError
            On every rank, if any announced something else, or left the program.
        """
        records = self._records
        if not records.agreed() and records.missing():
            self.look()
            return False
        self._end_header(call, records.agreed(), error)
        return True

    def wait_header(
        self,
        call: Call,
        timeout_seconds: float | None,
        error: Exception | None = None,
    ) -> None:
        """Wait until all ranks have announced the call of `post_header`.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        call : Call
            Which call.
        timeout_seconds : float, optional
            How long to wait for late ranks.
        error : Exception, optional
            Why this rank has announced that it failed.

        Raises
        ------
        CollectiveError
            On every rank, if any announced something else, or left the program.
        """
        with self.moving(call), recorded_wait(call.text):
            agreed = self.arrivals.wait(
                self._waiter, self._records, call, timeout_seconds
            )
        self._end_header(call, agreed, error)

    def _end_header(self, call: Call, agreed: bool, error: Exception | None) -> None:
        self.last_call = call
        if error is not None:
            self._raise_disagreement(announce_error(self._rank, call.text, error))
        if not agreed:
            self._raise_disagreement(Announcement(self._rank, 0, call.text))

    def missing(self) -> list[int]:
        """Return the ranks that have not come to the current call.

        Not collective.

        Returns
        -------
        list of int
            ``[-1]`` where it is not known which.
        """
        missing: list[int] = self._records.missing()
        return missing

    def dead(self) -> list[int]:
        """Return the ranks of this node whose processes have died.

        Not collective.

        Returns
        -------
        list of int
            Empty where they cannot be seen from here.
        """
        return self._steps.dead()

    def close(self) -> None:
        """Free what the channel holds.

        Collective over ``topology.replica_comm``.
        """
        if not self.closed:
            self.drain()
            if self._progress is not None:
                self._progress.end()
            self.closed = True
            if self.device_group is not None:
                self.device_group.close()
            self.arrivals.close()
            self.slots.close()
            self._steps.close()
            self._comm.Free()

    def abandon(self) -> None:
        """Let go of what the channel holds on this rank: others have died.

        Not collective. A second call does nothing.
        """
        if not self.closed:
            self.closed = True
            if self.device_group is not None:
                self.device_group.abandon()
            self.deaths.wake()
            kept = self._records, list(self.started), self._patient, self.breaks
            _abandoned.append(kept)
            self.started.clear()
            self.arrivals.close()
            self.slots.close()
            self._steps.close()
