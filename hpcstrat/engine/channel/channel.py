"""The channel of a topology: the header of every collective call, and what follows it.

Before any data moves, each rank announces a header: its sequence number, the steps that
it has made, the digest of the call, and flags. Only when the headers of all ranks are
equal does any rank go on; a difference is an error on every rank, where MPI itself
would give wrong numbers or wait for ever. A rank that has failed, or leaves the
program, announces that in the same way.

An error in the midst of a call leaves the other ranks there: this rank can make no
further call, tells the others so, see `hpcstrat.engine.channel.abort_messages`, and
they raise where they wait.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hpcstrat.engine.call_sites import call_site
from hpcstrat.engine.channel.abort_messages import AbortMessages
from hpcstrat.engine.channel.arrivals import Arrivals
from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.disagreement import (
    FAILED,
    LEFT,
    NOTICE,
    Announcement,
    announce_error,
    explain,
    only_fingerprints_differ,
    same_call,
)
from hpcstrat.engine.channel.headers import SegmentHeaders
from hpcstrat.engine.channel.interruptible import InterruptibleComm
from hpcstrat.engine.channel.kernel_headers import KernelHeaders, make_kernel
from hpcstrat.engine.channel.pending_calls import PendingCalls
from hpcstrat.engine.channel.position import Position
from hpcstrat.engine.channel.progress import check_progress_thread
from hpcstrat.engine.channel.rank_loss import RankLoss
from hpcstrat.engine.channel.sections import Failure, Sections
from hpcstrat.engine.channel.shared_rings import SharedRings
from hpcstrat.engine.channel.waitable import (
    HEADER,
    EveryRankError,
    HeaderPayload,
    Waitable,
    WaitSteps,
)
from hpcstrat.engine.channel.waiting import Waiter, Waiting
from hpcstrat.engine.channel.wire_headers import WireHeaders
from hpcstrat.engine.observe.timeline import active, recorded_wait
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.errors import CollectiveError

__all__ = ["Channel"]

_NO_CALL = describe_call("an exchange")
_FAILING = describe_call("failure")
_LEAVING = describe_call("leaving the program")
_MEETING = describe_call("meeting after ranks had made different numbers of steps")
_RESUMING = describe_call("going on after an interrupt of all ranks")
_ANNOUNCED = "_hpcstrat_announced"

# Buffers that MPI may still write to after a death, until it gives up these calls.
_abandoned: list[Any] = []


class Channel:
    """Carries one topology's calls, of at least two replicas.

    Collective over ``topology.replica_comm``, as are its calls unless they say
    otherwise.
    """

    def __init__(self, topology: Topology, *, native: bool = True) -> None:
        self.topology = topology
        # Why no call can be made any more; empty while all is well.
        self.broken = ""
        self.closed = False
        # Whether the rank was in no call when it broke, so that it can still announce
        # its own end.
        self.between_calls = False
        # Whether it looks just now who has left the same call: then no look raises.
        self._meets = False
        # Number of headers so far; the same on all ranks at the same point.
        self.num_calls = 0
        # The last of them in which all ranks have learned of an error.
        self.told_at = 0
        # The thread that is in a call, and the name of the outermost one, see
        # hpcstrat.engine.channel.entries.
        self.running: tuple[int, str] | None = None
        # The last call to which all ranks have come, and the one whose data this rank
        # moves now.
        self.last_call: Call | None = None
        self.exchanging: Call | None = None
        self.position = Position()
        # Waits for calls that the program has made before, but that other threads, such
        # as XLA's, still carry out; they come first. None where there are no such.
        self.elsewhere: Callable[[], None] | None = None
        # This rank's notice to the others, such as a signal that it got: the next
        # header of a call that waits carries it, and it ends nothing. The notices
        # of all ranks are the same on all after each call.
        self.notice = ""
        self.noticed: dict[int, str] = {}
        # Ranks have told each other different numbers of steps.
        self._apart = False
        self.sections = Sections()
        self.pending = PendingCalls(self)
        # Made at the first call with arrays on GPUs, see device_group.
        self.device_group: Any = None
        self._comm = topology.duplicate()
        self._rank: int = self._comm.rank
        self._interruptible: dict[int, InterruptibleComm] = {}
        self.aborts = AbortMessages(topology, self._comm)
        self.rank_loss = RankLoss(topology, self._comm)
        # The kernel that sums in this worker's memory, where all its ranks have it.
        self.kernel = make_kernel(topology) if native else None
        self.steps = (
            SegmentHeaders(topology)
            if self.kernel is None
            else KernelHeaders(topology, self.kernel)
        )
        self.rings = SharedRings(topology, self.kernel)
        self.waiter = Waiter(topology, self.look, self.steps)
        self.arrivals = Arrivals(topology, self._comm, lambda: self.num_calls)
        self._headers: Any = self.steps
        # Headers between workers, which carry the values of small reductions.
        self.wire: WireHeaders | None = None
        if topology.num_workers > 1:
            self.wire = WireHeaders(topology, self._comm, self.steps, self.rings)
            self._headers = self.wire

    # Calls that wait: a header, then an exchange of data.

    def drive(
        self, steps: WaitSteps, call: Call, timeout_seconds: float | None = None
    ) -> None:
        """Make a call: what an algorithm does before the header, that, and the rest.

        `PendingCall` does the same without waiting.
        """
        if self.pending:
            # Their headers came first, and their data use the same places.
            self.pending.drain()
        header = next(steps)
        assert header is HEADER
        self.agree(call, timeout_seconds)
        with self.moving(call):
            for awaited in steps:
                self.wait(awaited, call)

    def agree(self, call: Call, timeout_seconds: float | None = None) -> None:
        """Return once every rank has announced the same call.

        ``timeout_seconds`` is how long to wait for late ranks. Raises CollectiveError
        on every rank, if any announced something else or left the program; and
        ReplicaError on every rank that did not fail, if another did.
        """
        flags = NOTICE if self.notice else 0
        if active.recorder is None:
            mark = self.position.run_fingerprint
            agreed = self._announce(mark, call, flags, timeout_seconds)
        else:
            agreed = self._announce_recorded(call, flags, timeout_seconds)
        if not agreed or flags:
            self.settle(call, timeout_seconds)

    def agree_on(
        self, values: HeaderPayload, call: Call, timeout_seconds: float | None
    ) -> None:
        """Do as `agree`, and let values travel in the header between workers."""
        wire: Any = self.wire
        wire.carried = values
        try:
            self.agree(call, timeout_seconds)
        finally:
            wire.carried = None

    def is_plain(self) -> bool:
        """Whether a call is nothing but a header, and no timeline is recorded."""
        return not (
            self.broken
            or self.closed
            or self.pending
            or self.notice
            or self.sections.failure is not None
            or active.recorder is not None
        )

    def _announce(
        self, run: int, call: Call, flags: int, timeout_seconds: float | None
    ) -> bool:
        if self.broken or self.closed or self.sections.failure is not None:
            self.refuse_if_broken(call)
        if self.pending:
            self.pending.drain()
            self.refuse_if_broken(call)
        try:
            self.num_calls += 1
            headers = self._headers
            mark = call.digest
            if headers is self.steps:
                mark ^= self.rings.next
            headers.post(run, mark, flags)
            agreed = headers.agreed
            for _ in range(self.waiter.quick_looks):
                if agreed():
                    self.last_call = call
                    return True
            came = self.arrivals.wait(self.waiter, headers, call, timeout_seconds)
            self.last_call = call
            return came
        except BaseException as error:
            self.interrupted(call, error)
            raise

    def _announce_recorded(
        self, call: Call, flags: int, timeout_seconds: float | None
    ) -> bool:
        """Announce a call where a timeline is recorded."""
        recorder: Any = active.recorder
        start = recorder.enter(call.text)
        try:
            mark = self.position.run_fingerprint
            return self._announce(mark, call, flags, timeout_seconds)
        finally:
            about = {
                "call": call.text,
                "bytes": call.nbytes,
                "sequence": self.num_calls,
                "channel": self.arrivals.number,
            }
            if call.how:
                about["how"] = call.how
            recorder.agreed(call.text, about, start)

    def _marked(self, call: Call) -> int:
        """Return what ranks compare: the call, and the place of its data.

        An interrupt before a header leaves a rank's ring a place ahead.
        """
        if self._headers is self.steps:
            return call.digest ^ self.rings.next
        # Each worker has its own rings; its steps compare them.
        return call.digest

    def settle(self, call: Call, timeout_seconds: float | None) -> None:
        """Raise what the ranks' different headers mean.

        Where ranks have only something to tell, or only the marks of variables' copies
        differ, and the copies prove to be equal, all ranks agree once more instead.
        """
        announcement = Announcement(self._rank, 0, call.text)
        announcement.digest = self._marked(call)
        announcement.run_fingerprint = self.position.run_fingerprint
        announcements = self._gather(announcement)
        error, check = None, self.position.copy_check
        # A header that tells something differs from the others by that alone.
        goes_on = any(a.notice for a in announcements) and same_call(announcements)
        if only_fingerprints_differ(announcements):
            goes_on = False
            if check is not None:
                with self.moving(call):
                    error = check.difference(self.interruptible(self._comm))
                goes_on = error is None
        if goes_on:
            self.agree(call, timeout_seconds)
            return
        raise self._conclude(announcements, error or explain(announcements)).error

    @contextlib.contextmanager
    def moving(self, call: Call) -> Iterator[InterruptibleComm]:
        """Surround the exchange of data that follows `agree`; gives all replicas.

        Not collective. An error in it leaves the other ranks in the call: no further
        call can be made, and the end of this rank ends the job, unless it is an
        EveryRankError, which becomes a ValueError.
        """
        recorder = active.recorder
        if recorder is not None:
            recorder.enter_data(call.text)
        outer, self.exchanging = self.exchanging, call
        # The watchdog sees by it that the rank is alive.
        self.topology.moves += 1
        try:
            yield self.interruptible(self.topology.replica_comm)
        except EveryRankError as error:
            self.told_at = self.num_calls
            raise ValueError(*error.args) from error.__cause__
        except BaseException as error:
            self.interrupted(call, error)
            raise
        finally:
            self.exchanging = outer
            if recorder is not None:
                recorder.leave_data(call.text)

    def interruptible(self, comm: Any) -> InterruptibleComm:
        """Return a communicator whose calls end where another rank ends all calls.

        Not collective. The same one each time for the same ``comm``.
        """
        found = self._interruptible.get(comm.handle)
        if found is None:
            found = InterruptibleComm(comm, self.topology, self._await)
            self._interruptible[comm.handle] = found
        return found

    def _await(self, message: Waitable) -> None:
        call = self.exchanging or self.last_call or _NO_CALL
        self.arrivals.wait_data(self.waiter, message, call)

    def step(self, call: Call) -> Waitable:
        """Tell this worker's ranks that this one has come to the next step of a call.

        Collective over ``topology.worker_comm``. For `wait`: to be done when all have
        come.
        """
        self.steps.post(0, call.digest ^ self.rings.next, 0)
        self.topology.moves += 1
        return self.steps

    def wait(self, awaited: Waitable, call: Call) -> None:
        """Wait for a step of a worker's ranks, or a message, in a call.

        Raises CollectiveError if it does not come in time, or a process has died.
        """
        agreed = awaited.agreed
        self.topology.moves += 1
        for _ in range(self.waiter.quick_looks):
            if agreed():
                return
        if not self.arrivals.wait_data(self.waiter, awaited, call):
            raise CollectiveError(
                f"expected every rank in the same step of {call.text}, found "
                "another call's; end the program on every rank"
            )

    # Headers of started calls.

    def post_header(
        self,
        call: Call,
        run: int,
        carried: HeaderPayload | None = None,
        *,
        failed: bool = False,
    ) -> None:
        """Announce a started call, or that this rank cannot make it; does not wait.

        ``run`` is the position's ``step_fingerprint`` when it was started;
        ``carried`` travels in the header.
        """
        self.refuse_if_broken(call)
        self.num_calls += 1
        mark, flags = self._marked(call), FAILED if failed else 0
        if carried is None:
            self._headers.post(run, mark, flags)
            return
        wire: Any = self.wire
        wire.carried = carried
        try:
            wire.post(run, mark, flags)
        finally:
            wire.carried = None

    def header_came(self, call: Call, error: Exception | None = None) -> bool:
        """Look whether all ranks have announced the call of `post_header`.

        Not collective until the ranks differ, then collective over ``replica_comm``.
        ``error`` is why this rank has announced that it failed. Raises CollectiveError
        on every rank, if any announced something else, or left the program.
        """
        headers = self._headers
        if not headers.agreed() and headers.missing():
            self.look()
            return False
        self._end_header(call, headers.agreed(), error)
        return True

    def wait_header(
        self,
        call: Call,
        timeout_seconds: float | None,
        error: Exception | None = None,
    ) -> None:
        """Wait for what `header_came` looks for; raises as that does."""
        with self.moving(call), recorded_wait(call.text):
            agreed = self.arrivals.wait(
                self.waiter, self._headers, call, timeout_seconds
            )
        self._end_header(call, agreed, error)

    def _end_header(self, call: Call, agreed: bool, error: Exception | None) -> None:
        self.last_call = call
        if error is not None:
            raise self._exchange(announce_error(self._rank, call.text, error)).error
        if not agreed:
            raise self._exchange(Announcement(self._rank, 0, call.text)).error

    def missing(self) -> list[int]:
        """Return the ranks that have not come to the current call; not collective.

        ``[-1]`` where it is not known which.
        """
        return list(self._headers.missing())

    def dead(self) -> list[int]:
        """Return the ranks of this node whose processes have died; not collective.

        Empty where they cannot be seen from here.
        """
        return self.steps.dead()

    def forget_done(self) -> None:
        """Let go of the arrays of started calls that GPUs have done; not collective."""
        if self.device_group is not None:
            with self.pending.lock:
                self.device_group.lane.forget_done()

    def use_progress_thread(self, enter: Callable[[], object]) -> None:
        """Take started calls further in a thread, which calls ``enter`` first.

        Raises TopologyError on every rank if MPI was not started for threads.
        """
        self.agree(describe_call("use of a progress thread"))
        check_progress_thread(self.topology)
        self.pending.use_thread(enter)

    # Errors that all ranks raise where one has failed, or ranks differ.

    def meet(self) -> None:
        """Let ranks that are apart count their steps from 0 again.

        Collective after an error that told different numbers of steps, else not. For
        restores and strategies that begin or end, which put all ranks at the same point
        of the program.
        """
        if not self._apart:
            return
        position = self.position
        found = position.steps
        position.steps = (0, 0, 0)
        try:
            self.agree(_MEETING)
        except BaseException:
            position.steps = found
            raise
        self._apart = False

    def fail(
        self, what: str, error: BaseException, *, leaves: bool = False
    ) -> Failure | None:
        """Tell the other ranks that this one failed; the caller then raises ``error``.

        It is this rank's part of the next call of the others. ``leaves`` says whether
        it leaves a section, not a call only. Returns what all ranks know; None where
        nobody was told.
        """
        if self.broken or self.closed:
            return None
        told = id(self), self.num_calls
        if not leaves and getattr(error, _ANNOUNCED, None) == told:
            # On its way up from a call of which all ranks know.
            return None
        announcement = announce_error(self._rank, what, error)
        agreed = self._announce(0, _FAILING, FAILED, None)
        with contextlib.suppress(Exception):
            setattr(error, _ANNOUNCED, (id(self), self.num_calls))
        # Even where all have failed, that may be at different points.
        failure = self._exchange(announcement)
        if not agreed and not announcement.secondary:
            error.add_note(f"hpcstrat: on the other replicas: {failure.error}")
        return failure

    def _exchange(self, announcement: Announcement) -> Failure:
        """Learn from all ranks what they announced."""
        announcements = self._gather(announcement)
        return self._conclude(announcements, explain(announcements))

    def _gather(self, announcement: Announcement) -> list[Announcement]:
        position = self.position
        announcement.site = announcement.site or call_site()
        announcement.steps = position.steps
        announcement.depth = self.sections.depth
        announcement.pending = self.pending.num_separate()
        announcement.notice = notice = self.notice
        announcements: list[Announcement]
        try:
            announcements = self.interruptible(self._comm).allgather(announcement)
        except BaseException as error:
            self.interrupted(self.last_call or _FAILING, error)
            raise
        if self.notice is notice:
            # Else another one has come meanwhile, in a handler of a signal.
            self.notice = ""
        self.noticed |= {a.rank: a.notice for a in announcements if a.notice}
        # Hashes begin anew. The steps stay what they are: ranks that have not made
        # equally many are not at the same point, whatever the program catches.
        if len({(a.flags, a.text) for a in announcements}) > 1:
            # Ranks that were in different calls know it, and so may go on: of those in
            # a backward, and others, the next backwards belong together.
            most = max(a.steps[2] for a in announcements)
            for one in announcements:
                one.steps = (*one.steps[:2], most)
            position.backward_index = most
        self._apart = len({a.steps for a in announcements}) > 1
        position.run_fingerprint = position.step_fingerprint
        return announcements

    def _conclude(
        self, announcements: list[Announcement], error: CollectiveError
    ) -> Failure:
        """Take note of what ends the call; no rank looks at its data any more."""
        self.rings.restart()
        leavers = [a.rank for a in announcements if a.flags & LEFT]
        if leavers:
            self.broken = f"ranks {leavers} have left the program"
        failure = Failure(error, announcements)
        if self.sections.unwind(failure):
            for started in self.pending:
                started.end(failure.error)
            self.pending.clear()
        self.pending.drop_parts(failure.error)
        if failure.loses_calls and not self.broken:
            # Nobody knows which of them the others have started, or will start.
            self.broken = f"several started calls were under way when {failure.error}"
        self.told_at = self.num_calls
        setattr(failure.error, _ANNOUNCED, (id(self), self.num_calls))
        return failure

    # The end of a channel on which no call can be made any more.

    def refuse_if_broken(self, call: Call) -> None:
        if self.broken or self.closed:
            if self.rank_loss.error is not None:
                raise self.rank_loss.again(call.text)
            if not self.closed:
                # Others may have to be told yet; an error of MPI tells of dead ones.
                with contextlib.suppress(Exception):
                    self.aborts.look()
            if self.resume(call.text):
                return
            raise CollectiveError(
                f"expected a working strategy for {call.text}, found that "
                f"{self.broken or 'it is closed'}; end the program on every rank"
            )
        if self.sections.failure is not None:
            raise self.sections.failure.error

    def look_for_death(self, error: BaseException, what: str) -> None:
        """Raise RankLostError where an error of MPI comes of the death of a rank.

        Not collective. ``what`` is what this rank was doing.
        """
        loss = self.rank_loss.found(error, what)
        if loss is not None:
            self.broken = "a rank has died"
            raise loss from error

    def interrupted(self, call: Call, error: BaseException) -> None:
        """End all calls: this rank has left one half-made.

        Not collective. Raises RankLostError if another rank has died.
        """
        self.look_for_death(error, call.text)
        self.between_calls = False
        self.break_off(f"{call.text} was interrupted", error)

    def look(self) -> None:
        """Look whether another rank has ended all calls; drives MPI's progress.

        Not collective. Raises CollectiveError if one has, or another thread of this
        one.
        """
        for_data = self.exchanging is not None
        told = self.aborts.look(self.num_calls, for_data=for_data)
        if told and not self.broken:
            self.broken = told
        if self.broken and not self._meets and self.rank_loss.error is None:
            raise CollectiveError(
                f"expected every rank to go on, found that {self.broken}; end the "
                "program on every rank"
            )

    def break_off(
        self, what: str, error: BaseException, entered: int | None = None
    ) -> None:
        """End all calls of this rank, and tell the others; does not wait for them.

        Not collective. ``entered`` is for a rank that is in no call any more: the
        ``num_calls`` with which it entered the one that it has left.
        """
        if not self.broken:
            self.between_calls = entered is not None
            self.broken = f"{what} by {type(error).__name__} on rank {self._rank}"
            if isinstance(error, CollectiveError):
                # Such as of a rank that did not come, for which the others wait, too.
                self.broken += f" ({error})"
            if entered is None:
                self.aborts.tell(self.broken)
            else:
                self.aborts.tell(self.broken, (entered, self.num_calls))

    def resume(self, what: str) -> bool:
        """Go on where all ranks have left the same call at the same point.

        ``what`` is what this rank is about to do; no data are laid out for it yet.
        """
        if not self.between_calls or not self._met(describe_call(what)):
            return False
        # Until all have come, some may look at data that lie where the next ones go.
        self.agree(_RESUMING)
        return True

    def _met(self, call: Call) -> bool:
        """Whether all ranks have left the same call at the same point; then go on.

        False where they have not: nobody goes on.
        """
        broken, self._meets = self.broken, True
        try:
            met = self.arrivals.wait(self.waiter, self.aborts, call, None)
            # A rank that has told once is not asked again.
            self.between_calls = False
            if met:
                self.aborts.forget()
                # An interrupt before a header may have taken a place.
                self.rings.restart()
                self.broken = ""
        except BaseException as error:
            # The others may have gone on, and wait for this rank in the call.
            self.between_calls, self.broken = False, broken
            self.look_for_death(error, call.text)
            self.aborts.tell(broken)
            raise
        finally:
            self._meets = False
        return met

    # The end.

    def post_leave(self) -> None:
        """Announce that this rank ends the program; waits for started calls only."""
        with contextlib.suppress(Exception):
            self.pending.drain()
        self.num_calls += 1
        self._headers.post(0, _LEAVING.digest, LEFT)
        now, thread = time.monotonic(), threading.get_ident()
        self.waiter.waiting = Waiting(_LEAVING, now, thread, leaves=True)

    def poll_leave(self) -> str | None:
        """Look whether all ranks have answered `post_leave`.

        Not collective until the ranks differ, then collective over ``replica_comm``.
        Returns None while ranks are missing; empty when all are leaving; else what the
        others did instead. Raises CollectiveError if they do not come in time.
        """
        late, waiting = self._headers.missing(), self.waiter.waiting
        if late:
            self.waiter.late = late
            self.aborts.look()
            if waiting is not None:
                self.waiter.check_limit(waiting)
            return None
        self.waiter.waiting = None
        if self._headers.agreed():
            return ""
        announcement = Announcement(self._rank, LEFT, "left the program")
        try:
            return str(self._exchange(announcement).error)
        except CollectiveError as error:
            return str(error)

    def close(self) -> None:
        """Free what the channel holds."""
        if not self.closed:
            self.pending.drain()
            self.pending.end_thread()
            self.closed = True
            if self.device_group is not None:
                self.device_group.close()
            self._let_go()
            if self.wire is not None:
                self.wire.close()
            self._comm.Free()

    def abandon(self) -> None:
        """Let go of what the channel holds on this rank: others have died.

        Not collective. A second call does nothing.
        """
        if not self.closed:
            self.closed = True
            if self.device_group is not None:
                self.device_group.abandon()
            self.rank_loss.wake()
            _abandoned.append((self._headers, list(self.pending)))
            self.pending.clear()
            self._let_go()

    def _let_go(self) -> None:
        """Let go of the shared memory."""
        for holder in (self.arrivals, self.rings, self.steps):
            holder.close()
