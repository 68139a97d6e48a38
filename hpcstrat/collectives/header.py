"""The agreement of all ranks at the start of every collective call.

Before any data moves, each rank announces a record: its sequence number, how often it
has entered ``run``, the digest of the call, and flags. Only when the records of all
ranks are equal does any rank go on; a difference is an error on every rank, where MPI
itself would give wrong numbers or wait for ever. A rank that has failed, or leaves the
program, announces that in the same way.

`hpcstrat.collectives.records` says where the records lie.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from hpcstrat.collectives.call import Call, call_site, describe_call
from hpcstrat.collectives.disagreement import FAILED, LEFT, Announcement, explain
from hpcstrat.collectives.progress import ProgressThread, check_progress_thread
from hpcstrat.collectives.records import SegmentRecords, WireRecords
from hpcstrat.collectives.slots import Slots
from hpcstrat.collectives.started import Started
from hpcstrat.collectives.waiting import Waiter, late_ranks
from hpcstrat.errors import CollectiveError
from hpcstrat.topology import Topology

__all__ = ["Channel", "EveryRankError"]

_FAILING = describe_call("failure")
_LEAVING = describe_call("leaving the program")
_ANNOUNCED = "_hpcstrat_announced"


class EveryRankError(Exception):
    """A ValueError in the exchange of data that every rank raises in the same place."""


class Channel:
    """Carries the headers of one topology's calls.

    Collective over ``topology.replica_comm``.

    Parameters
    ----------
    topology : Topology
        At least two replicas.

    Attributes
    ----------
    run_index : int
        How often this rank has entered ``run``; part of every header, so that a call
        left out in one step is noticed in the next.
    broken : str
        Why no call can be made any more; empty while all is well.
    slots : Slots
        Shared memory of the worker's ranks, for data.
    started : deque of Started
        Calls that have been started and have not ended, in order.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.run_index = 0
        self.broken = ""
        self.closed = False
        self._sequence = 0
        self._comm = topology.replica_comm.Dup()
        self._rank = self._comm.rank
        self._steps = SegmentRecords(topology)
        self._records: Any = (
            self._steps
            if topology.num_workers == 1
            else WireRecords(topology, self._comm)
        )
        self.slots = Slots(topology)
        self.started: deque[Started] = deque()
        self._progress: ProgressThread | None = None
        self._lock = threading.RLock()
        self._waiter = Waiter(topology, self._comm, self._steps)

    def agree(self, call: Call, timeout_seconds: float | None = None) -> None:
        """Return once every rank has announced the same call.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        call : Call
            What this rank is about to do.
        timeout_seconds : float, optional
            How long to wait for late ranks.

        Raises
        ------
        CollectiveError
            On every rank, if any announced something else, or left the program.
        ReplicaError
            On every rank that did not fail, if another announced that it had.
        """
        if not self._announce(self.run_index, call, 0, timeout_seconds):
            self._raise_disagreement(Announcement(self._rank, 0, call.text))

    def fail(self, what: str, error: BaseException) -> None:
        """Tell the other ranks that this one failed; the caller then raises ``error``.

        Collective over ``topology.replica_comm``: it is this rank's part of the next
        call of the others.

        Parameters
        ----------
        what : str
            What this rank was doing.
        error : BaseException
            Why it cannot go on.
        """
        if self.broken or self.closed:
            return
        if getattr(error, _ANNOUNCED, None) == (id(self), self._sequence):
            # On its way up from a call of which all ranks know.
            return
        announcement = Announcement(self._rank, FAILED, what)
        announcement.reason = _reason(error)
        if type(error).__module__ == "builtins":
            announcement.kind = type(error)
        with contextlib.suppress(Exception):
            setattr(error, _ANNOUNCED, (id(self), self._sequence + 1))
        if not self._announce(0, _FAILING, FAILED, None):
            try:
                self._raise_disagreement(announcement)
            except CollectiveError as others:
                error.add_note(f"hpcstrat: on the other replicas: {others}")
        else:
            # All have failed, perhaps at different points.
            self.run_index = max(self._comm.allgather(self.run_index))
            self.slots.restart()

    def post_leave(self) -> None:
        """Announce that this rank ends the program; waits for started calls only.

        Collective over ``topology.replica_comm`` where there are started calls.
        """
        with contextlib.suppress(Exception):
            self.drain()
        self._sequence += 1
        self._records.post(0, _LEAVING.digest, LEFT)

    def poll_leave(self) -> str | None:
        """Look whether all ranks have answered `post_leave`.

        Not collective until the ranks differ, then collective over ``replica_comm``.

        Returns
        -------
        str or None
            None while ranks are missing; empty when all are leaving; else what the
            others did instead.
        """
        if self._records.missing():
            self._comm.Iprobe()
            return None
        if self._records.agreed():
            return ""
        announcement = Announcement(self._rank, LEFT, "left the program")
        try:
            self._raise_disagreement(announcement)
        except CollectiveError as error:
            return str(error)
        return ""

    def step(self, call: Call) -> Any:
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
        return self._steps

    def wait(self, awaited: Any, call: Call) -> None:
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
        for _ in range(self._waiter.quick_looks):
            if agreed():
                return
        if not self._waiter.wait(awaited, call, None):
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
        with self._lock:
            self.started.append(started)
            self.progress()
        if self._progress is not None:
            self._progress.wake()

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

    def use_progress_thread(self) -> None:
        """Take started calls further in a thread from now on.

        Collective over ``topology.replica_comm``. A second call does nothing.

        Raises
        ------
        TopologyError
            If MPI was not started for threads, or a rank has no second core. On every
            rank.
        """
        self.agree(describe_call("use of a progress thread"))
        check_progress_thread(self.topology)
        if self._progress is None:
            self._progress = ProgressThread(self)

    def post_header(self, call: Call, run: int) -> None:
        """Announce a started call; does not wait.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        call : Call
            Which call.
        run : int
            ``run_index`` when it was started.
        """
        self._refuse_if_broken(call)
        self._sequence += 1
        self._records.post(run, self._marked(call), 0)

    def header_came(self, call: Call) -> bool:
        """Look whether all ranks have announced the call of `post_header`.

        Not collective until the ranks differ, then collective over ``replica_comm``.

        Parameters
        ----------
        call : Call
            Which call.

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
        if records.agreed():
            return True
        if records.missing():
            self._comm.Iprobe()
            return False
        if not records.agreed():
            self._raise_disagreement(Announcement(self._rank, 0, call.text))
        return True

    def wait_header(self, call: Call, timeout_seconds: float | None) -> None:
        """Wait until all ranks have announced the call of `post_header`.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        call : Call
            Which call.
        timeout_seconds : float, optional
            How long to wait for late ranks.

        Raises
        ------
        CollectiveError
            On every rank, if any announced something else, or left the program.
        """
        with self.moving(call):
            agreed = self._waiter.wait(self._records, call, timeout_seconds)
        if not agreed:
            self._raise_disagreement(Announcement(self._rank, 0, call.text))

    def late(self) -> str:
        """Say which ranks have not come to the current call.

        Not collective.

        Returns
        -------
        str
            Such as ``ranks [1, 3]``.
        """
        return late_ranks(self._records)

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
            self.slots.close()
            self._steps.close()
            self._comm.Free()

    @contextlib.contextmanager
    def moving(self, call: Call) -> Iterator[None]:
        """Surround the exchange of data that follows `agree`.

        Not collective. An error in it leaves the other ranks in the call: no further
        call can be made, and the end of this rank ends the job, unless it is an
        EveryRankError, which becomes a ValueError.

        Parameters
        ----------
        call : Call
            Which call.

        Yields
        ------
        None
            Nothing.
        """
        try:
            yield
        except EveryRankError as error:
            raise ValueError(*error.args) from error.__cause__
        except BaseException:
            self.interrupted(call)
            raise

    def interrupted(self, call: Call) -> None:
        """Take note that this rank has left a call half-made.

        Not collective.

        Parameters
        ----------
        call : Call
            Which call.
        """
        self.broken = f"{call.text} was interrupted on this rank"

    def _announce(
        self, run: int, call: Call, flags: int, timeout_seconds: float | None
    ) -> bool:
        self._refuse_if_broken(call)
        if self.started:
            self.drain()
            self._refuse_if_broken(call)
        try:
            self._sequence += 1
            records = self._records
            records.post(run, self._marked(call), flags)
            agreed: Callable[[], bool] = records.agreed
            for _ in range(self._waiter.quick_looks):
                if agreed():
                    return True
            return self._waiter.wait(records, call, timeout_seconds)
        except BaseException:
            self.interrupted(call)
            raise

    def _marked(self, call: Call) -> int:
        """Return what ranks compare: the call, and the place of its data.

        An interrupt before a header leaves a rank's ring a place ahead.
        """
        if self._records is self._steps:
            return call.digest ^ self.slots.next
        # Each worker has its own rings; its steps compare them.
        return call.digest

    def _refuse_if_broken(self, call: Call) -> None:
        if self.broken or self.closed:
            raise CollectiveError(
                f"expected a working strategy for {call.text}, found that "
                f"{self.broken or 'it is closed'}; end the program on every rank"
            )

    def _raise_disagreement(self, announcement: Announcement) -> None:
        announcement.site = call_site()
        announcement.run_index = self.run_index
        announcement.pending = len(self.started)
        announcements: list[Announcement] = self._comm.allgather(announcement)
        # From here on all ranks are at the same point again, and look at no data.
        self.slots.restart()
        self.run_index = max(a.run_index for a in announcements)
        leavers = [a.rank for a in announcements if a.flags & LEFT]
        if leavers:
            self.broken = f"ranks {leavers} have left the program"
        disagreement = explain(announcements)
        if max(a.pending for a in announcements) > 1 and not self.broken:
            # Nobody knows which of them the others have started, or will start.
            self.broken = f"several started calls were under way when {disagreement}"
        setattr(disagreement, _ANNOUNCED, (id(self), self._sequence))
        raise disagreement


def _reason(error: BaseException) -> str:
    """Describe an error, whose class may be a program's own and faulty."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
