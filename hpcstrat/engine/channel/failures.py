"""Failures of calls: errors that all ranks raise, and calls that are given up.

A rank that fails before it has announced its next call says so in that header, and all
raise there. An error in the midst of a call, or the death of a rank, leaves the other
ranks there: this rank can make no further call, and tells the others, which raise where
they wait, see `hpcstrat.engine.channel.abort_messages`.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from hpcstrat.engine.call_sites import call_site
from hpcstrat.engine.channel.abort_messages import AbortMessages
from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.call_state import Watched
from hpcstrat.engine.channel.disagreement import (
    FAILED,
    LEFT,
    Announcement,
    Failure,
    announce_error,
    explain,
    only_fingerprints_differ,
    same_call,
)
from hpcstrat.engine.topology.survival import is_loss, lost_ranks, revoke
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.errors import (
    CollectiveError,
    HpcstratError,
    OutOfRangeError,
    RankLostError,
)

__all__ = ["Failures", "RankLoss"]

_FAILING = describe_call("failure")
_MEETING = describe_call("meeting after ranks had made different numbers of steps")
_RESUMING = describe_call("going on after an interrupt of all ranks")
_ANNOUNCED = "_hpcstrat_announced"
_NAP_SECONDS = 0.002
# A rank that was woken waits so long for the launcher to tell it who has died.
_TOLD_SECONDS = 2.0


class RankLoss:
    """A channel's knowledge of ranks that have died; ``comm`` is the channel's own."""

    def __init__(self, topology: Topology, comm: Any) -> None:
        self._topology = topology
        self._comm = comm
        # The error that every further call raises.
        self.error: RankLostError | None = None

    def found(self, error: BaseException, what: str) -> RankLostError | None:
        """Return the error to raise where one comes of the death of a rank.

        None for other errors. Wakes the other ranks, where the topology survives a
        loss. ``what`` is the call in which this rank was.
        """
        topology, known = self._topology, set[int]()
        if isinstance(error, RankLostError):
            known.update(error.ranks)
        elif not is_loss(
            topology.mpi, error, self._comm if topology.survives else None
        ):
            return None
        if self.error is not None:
            return self.again(what)
        advice = "start the job again, and restore a checkpoint"
        if topology.survives:
            self.wake()
            known.update(self._told(bool(known)))
            advice = "leave this strategy, and form one of the ranks that are left"
        ranks = sorted(known)
        who = f"the processes of ranks {ranks} have" if ranks else "a rank has"
        text = f"expected all ranks in {what}, found that {who} died; {advice}"
        # Kept without a traceback, whose frames would hold the program's arrays.
        self.error = RankLostError(text, ranks)
        return RankLostError(text, ranks)

    def wake(self) -> None:
        """Make every call of MPI an error on all ranks, where a loss is survived.

        A rank that waits for a living one would not notice the death.
        """
        if self._topology.survives:
            revoke([self._comm])
            self._topology.revoke()

    def again(self, what: str) -> RankLostError:
        """Return an error of the same ranks, for a call after the one that noticed."""
        assert self.error is not None
        ranks = self.error.ranks
        return RankLostError(
            f"expected a strategy of living ranks for {what}, found that of lost ranks "
            f"{list(ranks)}; leave it, and form one of the ranks that are left",
            ranks,
        )

    def _told(self, knows: bool) -> list[int]:
        """Return the dead ranks that the launcher knows, which may come a bit later."""
        deadline = time.monotonic() + _TOLD_SECONDS
        while True:
            found = lost_ranks(self._comm)
            if found or knows or time.monotonic() > deadline:
                return found
            # A communicator of this rank alone drives the progress of all.
            self._topology.mpi.COMM_SELF.Iprobe()
            time.sleep(_NAP_SECONDS)


class Failures:
    """The failures of a channel, on one rank; ``comm`` is the channel's own.

    Collective over ``topology.replica_comm``, as are its calls unless they say
    otherwise.
    """

    # Why no call can be made any more; empty while all is well.
    broken = Watched[str]()
    # Why this rank is leaving sections: no call can be made meanwhile.
    leaving = Watched[Failure | None]()

    def __init__(self, channel: Any, comm: Any) -> None:
        self._channel, self._comm = channel, comm
        self.state = channel.state
        self.broken, self.leaving = "", None
        self._rank: int = comm.rank
        # Whether the rank was in no call when it broke, so that it can still announce
        # its own end.
        self.between_calls = False
        # The number of the last header in which all ranks have learned of an error.
        self.told_at = 0
        # Number of sections that this rank is in.
        self.depth = 0
        self.aborts = AbortMessages(channel.topology, comm)
        self.rank_loss = RankLoss(channel.topology, comm)
        # Whether it looks just now who has left the same call: then no look raises.
        self._resuming = False
        # Whether ranks have told each other different numbers of steps.
        self._apart = False

    # Errors that all ranks raise where one has failed, or ranks differ.

    def refuse(self, call: Call) -> None:
        """Raise why no call can be made, if none can."""
        if self.broken or self._channel.closed:
            if self.rank_loss.error is not None:
                raise self.rank_loss.again(call.text)
            if not self._channel.closed:
                # Others may have to be told yet; an error of MPI tells of dead ones.
                with contextlib.suppress(Exception):
                    self.aborts.look()
            if self.resume(call.text):
                return
            raise CollectiveError(
                f"expected a working strategy for {call.text}, found that "
                f"{self.broken or 'it is closed'}; end the program on every rank"
            )
        if self.leaving is not None:
            raise self.leaving.error

    def settle(
        self, call: Call, timeout_seconds: float | None, carried: Any = None
    ) -> None:
        """Raise what the ranks' different headers mean.

        Where ranks have only something to tell, or only the marks of variables' copies
        differ, and the copies prove to be equal, all ranks agree once more instead.
        """
        channel = self._channel
        place = 0 if channel.wire is not None else channel.rings.next
        announcement = Announcement(self._rank, 0, call.text)
        announcement.digest = call.digest ^ place
        announcement.run_fingerprint = channel.position.run_fingerprint
        announcements = self._gather(announcement)
        error, check = None, channel.position.copy_check
        # A header that tells something differs from the others by that alone.
        goes_on = any(a.notice for a in announcements) and same_call(announcements)
        if only_fingerprints_differ(announcements):
            goes_on = False
            if check is not None:
                with channel.moving(call):
                    error = check.difference(channel.interruptible(self._comm))
                goes_on = error is None
        if not goes_on:
            raise self._conclude(announcements, error or explain(announcements)).error
        channel.agree(call, timeout_seconds, carried)

    def fail(
        self, what: str, error: BaseException, *, leaves: bool = False
    ) -> Failure | None:
        """Tell the other ranks that this one failed; the caller then raises ``error``.

        It is this rank's part of the next call of the others. ``leaves`` says whether
        it leaves a section, not a call only. Returns what all ranks know; None where
        nobody was told.
        """
        channel = self._channel
        if self.broken or channel.closed:
            return None
        told = id(self), channel.num_calls
        if not leaves and getattr(error, _ANNOUNCED, None) == told:
            # On its way up from a call of which all ranks know.
            return None
        announcement = announce_error(self._rank, what, error)
        agreed = channel.announce(_FAILING, 0, FAILED)
        with contextlib.suppress(Exception):
            setattr(error, _ANNOUNCED, (id(self), channel.num_calls))
        # Even where all have failed, that may be at different points.
        failure = self.exchange(announcement)
        if not agreed and not announcement.secondary:
            error.add_note(f"hpcstrat: on the other replicas: {failure.error}")
        return failure

    def exchange(self, announcement: Announcement) -> Failure:
        """Learn from all ranks what they announced, which no call follows."""
        announcements = self._gather(announcement)
        return self._conclude(announcements, explain(announcements))

    def _gather(self, announcement: Announcement) -> list[Announcement]:
        channel, position = self._channel, self._channel.position
        announcement.site = announcement.site or call_site()
        announcement.steps = position.steps
        announcement.depth = self.depth
        announcement.pending = channel.pending.num_separate()
        announcement.notice = notice = channel.notice
        announcements: list[Announcement]
        try:
            announcements = channel.interruptible(self._comm).allgather(announcement)
        except BaseException as error:
            self.interrupted(channel.last_call or _FAILING, error)
            raise
        if channel.notice is notice:
            # Else another one has come meanwhile, in a handler of a signal.
            channel.notice = ""
        channel.noticed |= {a.rank: a.notice for a in announcements if a.notice}
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
        channel, failure = self._channel, Failure(error, announcements)
        channel.rings.restart()
        leavers = [a.rank for a in announcements if a.flags & LEFT]
        if leavers:
            self.broken = f"ranks {leavers} have left the program"
        self.leaving = failure if failure.level <= self.depth else None
        channel.pending.lose(error, all_of_them=self.leaving is not None)
        if failure.loses_calls and not self.broken:
            # Nobody knows which of them the others have started, or will start.
            self.broken = f"several started calls were under way when {error}"
        self.told_at = channel.num_calls
        setattr(error, _ANNOUNCED, (id(self), channel.num_calls))
        return failure

    def meet(self) -> None:
        """Let ranks that are apart count their steps from 0 again.

        Collective after an error that told different numbers of steps, else not. For
        restores and strategies that begin or end, which put all ranks at the same point
        of the program.
        """
        if not self._apart:
            return
        position = self._channel.position
        found, position.steps = position.steps, (0, 0, 0)
        try:
            self._channel.agree(_MEETING)
        except BaseException:
            position.steps = found
            raise
        self._apart = False

    # Calls that this rank, or another one, has left half-made; not collective.

    def leave(self, what: str, error: BaseException, entered: int) -> None:
        """Let the other ranks know of an error that leaves an entry on this one.

        ``entered`` is the channel's ``num_calls`` when it came in.
        """
        channel = self._channel
        if self.broken or channel.closed:
            return
        if self.leaving is not None:
            # Until the section ends, every call raises what ends it.
            if isinstance(error, Exception) and error is not self.leaving.error:
                raise self.leaving.error
            return
        if self.told_at == channel.num_calls > entered:
            return
        if isinstance(error, (StopIteration, OutOfRangeError)):
            # The end of the data, at which all ranks are.
            return
        if isinstance(error, Exception) and channel.num_calls == entered:
            self.fail(what, error)
        elif not isinstance(error, HpcstratError):
            # Errors of our own classes are raised on every rank. Data of calls that go
            # on may lie elsewhere on each from here on.
            point = None if channel.pending else entered
            self.break_off(f"{what} was left", error, point)

    def look_for_death(self, error: BaseException, what: str) -> None:
        """Raise RankLostError where an error of MPI comes of the death of a rank.

        ``what`` is the call in which this rank was.
        """
        loss = self.rank_loss.found(error, what)
        if loss is not None:
            self.broken = "a rank has died"
            raise loss from error

    def interrupted(self, call: Call, error: BaseException) -> None:
        """End all calls: this rank has left one half-made.

        Raises RankLostError if another rank has died.
        """
        self.look_for_death(error, call.text)
        self.between_calls = False
        self.break_off(f"{call.text} was interrupted", error)

    def break_off(
        self, what: str, error: BaseException, entered: int | None = None
    ) -> None:
        """End all calls of this rank, and tell the others; does not wait for them.

        ``entered`` is for a rank that is in no call any more: the ``num_calls`` with
        which it entered the one that it has left.
        """
        if self.broken:
            return
        self.between_calls = entered is not None
        self.broken = f"{what} by {type(error).__name__} on rank {self._rank}"
        if isinstance(error, CollectiveError):
            # Such as of a rank that did not come, for which the others wait, too.
            self.broken += f" ({error})"
        if entered is None:
            self.aborts.tell(self.broken)
        else:
            self.aborts.tell(self.broken, (entered, self._channel.num_calls))

    def look(self) -> None:
        """Look whether another rank has ended all calls; drives MPI's progress.

        Raises CollectiveError if one has, or another thread of this one.
        """
        for_data = self._channel.exchanging is not None
        told = self.aborts.look(self._channel.num_calls, for_data=for_data)
        self.broken = self.broken or told
        if self.broken and not self._resuming and self.rank_loss.error is None:
            raise CollectiveError(
                f"expected every rank to go on, found that {self.broken}; end the "
                "program on every rank"
            )

    def resume(self, what: str) -> bool:
        """Go on where all ranks have left the same call at the same point.

        Collective where this rank left a call between two headers. ``what`` is what it
        is about to do; no data are laid out for it yet.
        """
        if not self.between_calls or not self._all_left(describe_call(what)):
            return False
        # Until all have come, some may look at data that lie where the next ones go.
        self._channel.agree(_RESUMING)
        return True

    def _all_left(self, call: Call) -> bool:
        """Whether all ranks have left the same call at the same point; then go on."""
        channel, broken, self._resuming = self._channel, self.broken, True
        try:
            met: bool = channel.waiter.wait_header(self.aborts, call)
            # A rank that has told once is not asked again.
            self.between_calls = False
            if met:
                self.aborts.forget()
                # An interrupt before a header may have taken a place.
                channel.rings.restart()
                self.broken = ""
        except BaseException as error:
            # The others may have gone on, and wait for this rank in the call.
            self.between_calls, self.broken = False, broken
            self.look_for_death(error, call.text)
            self.aborts.tell(broken)
            raise
        finally:
            self._resuming = False
        return met
