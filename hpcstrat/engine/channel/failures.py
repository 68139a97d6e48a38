"""Failures of calls: errors that all ranks raise, and errors that end all calls.

If a rank fails before it has posted the header of its next call, it reports the failure
in this header, and all ranks raise there. If a rank fails after the header of a call,
it can make no further call, but the other ranks still wait in this call. So the failed
rank sends abort messages to the other ranks, which then raise an error, see
`hpcstrat.engine.channel.abort_messages`.

Sections are parts of a program that all ranks leave together, with or without an error.
A strategy with ``on_error="raise"`` makes a section of each ``run``, each merged
function, and other code of the program between two calls. At the end of a section, all
ranks learn whether any rank has failed in it. Sections can be nested. A rank that fails
sends the number of sections that it is still in. The other ranks then leave their inner
sections down to this number, even if the program catches the exception, so that all
ranks are at the same point again.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from hpcstrat.engine.call_sites import call_site
from hpcstrat.engine.channel.abort_messages import NOWHERE, AbortMessages, Point
from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.call_state import Watched
from hpcstrat.engine.channel.disagreement import (
    FAILED,
    LEFT,
    Announcement,
    Failure,
    announce_error,
    differing,
)
from hpcstrat.engine.channel.entries import is_inner, refuse_inner
from hpcstrat.engine.channel.waitable import LengthsDifferError
from hpcstrat.engine.topology.survival import is_loss, lost_ranks
from hpcstrat.errors import (
    CollectiveError,
    HpcstratError,
    OutOfRangeError,
    RankLostError,
)

__all__ = ["Failures", "Section"]

_FAILING = describe_call("failure")
_MEETING = describe_call("meeting after ranks had made different numbers of steps")
_RESUMING = describe_call("going on after an interrupt of all ranks")
_ANNOUNCED = "_hpcstrat_announced"
_LEAVE = "leave this strategy, and make a new one of the remaining ranks"
_NAP_SECONDS = 0.002
# How long a rank that learns of a death waits for the launcher to report the dead rank.
_REPORT_SECONDS = 2.0


class Failures:
    """The failures of a channel on one rank; ``comm`` is the channel's communicator.

    Methods are collective over ``topology.replica_comm``, unless they say otherwise.
    """

    # The reason why no call can be made any more; empty if calls can be made.
    broken = Watched[str]()
    # The failure because of which this rank leaves sections; None if it leaves none.
    # While it is set, no call can be made.
    leaving = Watched[Failure | None]()

    def __init__(self, channel: Any, comm: Any) -> None:
        self._channel, self._comm = channel, comm
        self.state = channel.state
        self.broken, self.leaving = "", None
        # This rank's number in the job, which errors name.
        self.rank: int = channel.topology.job_ranks[comm.rank]
        # The number of the last header by which all ranks have learned of an error.
        self.told_at = 0
        # Number of sections that this rank is in.
        self.depth = 0
        self.aborts = AbortMessages(channel.topology, comm)
        # The dead ranks that this rank knew when it first found that ranks are dead.
        self.lost: tuple[int, ...] | None = None
        # True if the ranks have announced different numbers of steps.
        self._apart = False

    # Errors that all ranks raise if one has failed, or if their headers differ.

    def refuse(self, call: Call) -> None:
        """Raise an error with the reason, if no call can be made."""
        if self.broken or self._channel.closed:
            if self.lost is not None:
                raise self._lost_before(call.text)
            if not self._channel.closed:
                # Pass on abort messages. MPI may raise here if ranks have died.
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
        """Raise the error that explains how the ranks' headers differ.

        All ranks instead post the header once more if headers differ only because ranks
        have notices, or because of fingerprints of copies that a comparison finds to be
        equal. Raises LengthsDifferError if only the lengths differ that ranks expect.
        """
        channel = self._channel
        announcement = Announcement(self.rank, 0, call.text)
        announcement.digest = call.digest ^ call.lengths
        announcement.lengths = call.lengths
        announcement.place = 0 if channel.wire is not None else channel.rings.next
        announcement.run_fingerprint = channel.state.run_fingerprint
        announcements = self._gather(announcement)
        found = differing(announcements)
        # If the lengths differ, the places may differ, too.
        same_call = {"lengths", "place"} if "lengths" in found else set[str]()
        if found - same_call - {"run_fingerprint"}:
            raise self._conclude(announcements).error
        # A notice sets a flag in the header; this flag may be the only difference.
        error, goes_on = None, any(a.notice for a in announcements)
        if "run_fingerprint" in found:
            check = channel.position.copy_check
            if check is not None:
                with channel.moving(call):
                    error = check.difference(channel.interruptible(self._comm))
            goes_on = check is not None and error is None
        if "lengths" in found and error is None:
            channel.rings.restart()
            self.told_at = channel.num_calls
            raise LengthsDifferError(call)
        if not goes_on:
            raise self._conclude(announcements, error).error
        channel.agree(call, timeout_seconds, carried)

    def fail(
        self, what: str, error: BaseException, *, leaves: bool = False
    ) -> Failure | None:
        """Notify the other ranks of this rank's failure; the caller raises ``error``.

        The report is a header that is compared with the other ranks' next header. If
        ``leaves`` is true, this rank leaves a section, not only a call. Returns the
        failure as all ranks know it, or None if nothing was sent.
        """
        channel = self._channel
        if self.broken or channel.closed:
            return None
        told = id(self), channel.num_calls
        if not leaves and getattr(error, _ANNOUNCED, None) == told:
            # All ranks already know of this error, from the call that raised it.
            return None
        # Make the announcement first: other ranks wait for it after the header.
        announcement = announce_error(self.rank, what, error)
        agreed = channel.announce(_FAILING, FAILED)
        # Exchange announcements even if all ranks have failed: they may have failed at
        # different points of the program.
        failure = self._conclude(self._gather(announcement))
        with contextlib.suppress(Exception):
            setattr(error, _ANNOUNCED, (id(self), channel.num_calls))
        if not agreed and not announcement.secondary:
            error.add_note(f"hpcstrat: on the other replicas: {failure.error}")
        return failure

    def exchange(
        self, what: str, error: BaseException | None = None, flags: int = 0
    ) -> Failure:
        """Announce a call, or this rank's error in it; return what all ranks found."""
        own = Announcement(self.rank, flags, what)
        if error is not None:
            own = announce_error(self.rank, what, error)
        return self._conclude(self._gather(own))

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
            self.interrupted((channel.last_call or _FAILING).text, error)
            raise
        if channel.notice is notice:
            # The notice was sent. If a signal handler has set another notice meanwhile,
            # keep the new notice for the next header.
            channel.notice = ""
        channel.noticed |= {
            r: a.notice for r, a in enumerate(announcements) if a.notice
        }
        # Keep the step counts, and reset only the fingerprint to them: ranks with
        # different counts are not at the same point, even after a caught error.
        if len({(a.flags, a.text) for a in announcements}) > 1:
            # The ranks were in different calls, and may continue after the error. Count
            # a backward pass of some ranks on all, so that their next passes match.
            most = max(a.steps[2] for a in announcements)
            for one in announcements:
                one.steps = (*one.steps[:2], most)
            position.backward_index = most
            position.num_meetings += 1
        self._apart = len({a.steps for a in announcements}) > 1
        self.state.run_fingerprint = position.step_fingerprint
        return announcements

    def _conclude(
        self, announcements: list[Announcement], error: CollectiveError | None = None
    ) -> Failure:
        """Store and return the failure that ends a call, whose data no rank reads."""
        channel, failure = self._channel, Failure(announcements, error)
        error = failure.error
        channel.rings.restart()
        leavers = [a.rank for a in announcements if a.flags & LEFT]
        if leavers:
            self.broken = f"ranks {leavers} have left the program"
        self.leaving = failure if failure.level <= self.depth else None
        channel.pending.lose(error, all_of_them=self.leaving is not None)
        if failure.loses_calls and not self.broken:
            # This rank cannot know which of the calls the other ranks have started.
            self.broken = f"several started calls were under way when {error}"
        self.told_at = channel.num_calls
        setattr(error, _ANNOUNCED, (id(self), channel.num_calls))
        return failure

    def meet(self) -> None:
        """Reset the step counts if an error has found that ranks differ in them.

        Call it when all ranks are at the same point of the program: in a restore, and
        when another strategy begins or ends.
        """
        position = self._channel.position
        position.num_meetings += 1
        if not self._apart:
            return
        found, position.steps = position.steps, (0, 0, 0)
        try:
            self._channel.agree(_MEETING)
        except BaseException:
            position.steps = found
            raise
        self._apart = False

    # Calls that this rank or another rank has left before their end; not collective.

    def leave(self, what: str, error: BaseException, entered: int) -> None:
        """Report to the other ranks an error by which this rank leaves an entry.

        ``entered`` is the channel's ``num_calls`` when the entry began.
        """
        channel = self._channel
        if self.broken or channel.closed:
            return
        if self.leaving is not None:
            # Until this rank has left its section, every call raises ``leaving.error``.
            if isinstance(error, Exception) and error is not self.leaving.error:
                raise self.leaving.error
            return
        if self.told_at == channel.num_calls > entered:
            return
        if isinstance(error, (StopIteration, OutOfRangeError)):
            # All ranks reach the end of a dataset in the same call.
            return
        if isinstance(error, Exception) and channel.num_calls == entered:
            self.fail(what, error)
        elif is_inner(error) or not isinstance(error, HpcstratError):
            # Errors of the library's own classes are raised on every rank. If there are
            # pending calls, the ranks cannot resume, because their rings may differ;
            # nor if this rank has counted a header, but not posted it.
            number, wire = channel.num_calls, channel.wire
            resumes = not channel.pending and (wire is None or wire.has_posted(number))
            self.interrupted(what, error, (entered, number) if resumes else NOWHERE)

    def loss(self, error: BaseException, what: str) -> RankLostError | None:
        """Return a RankLostError if the death of a rank caused ``error``, else None.

        After a loss, no further call can be made, and the waits of the other ranks end,
        too. ``what`` is the call in which this rank was.
        """
        topology, known = self._channel.topology, set[int]()
        comm = self._comm if topology.survives else None
        if isinstance(error, RankLostError):
            known.update(error.ranks)
        elif not is_loss(topology.mpi, error, comm):
            return None
        if self.lost is not None:
            found = self._lost_before(what)
        else:
            advice = "start the job again, and restore a checkpoint"
            if topology.survives:
                # Otherwise a rank that waits for a living rank would not notice the
                # death.
                topology.revoke()
                known.update(lost_ranks(self._comm) if known else self._reported())
                advice = _LEAVE
            ranks = sorted(known)
            names = [topology.job_ranks[rank] for rank in ranks]
            who = f"the processes of ranks {names} have" if ranks else "a rank has"
            text = f"expected all ranks in {what}, found that {who} died; {advice}"
            self.lost, found = tuple(ranks), RankLostError(text, ranks)
        self.broken, found.__cause__ = "a rank has died", error
        return found

    def _lost_before(self, what: str) -> RankLostError:
        """Return an error for a later call that names the same dead ranks."""
        ranks = self.lost or ()
        names = [self._channel.topology.job_ranks[rank] for rank in ranks]
        return RankLostError(
            f"expected a strategy of living ranks for {what}, found one with the lost "
            f"ranks {names}; {_LEAVE}",
            ranks,
        )

    def _reported(self) -> list[int]:
        """Wait until the launcher reports dead ranks, and return these."""
        deadline = time.monotonic() + _REPORT_SECONDS
        while not (found := lost_ranks(self._comm)) and time.monotonic() < deadline:
            # A probe on COMM_SELF drives the progress of all MPI communication.
            self._channel.topology.mpi.COMM_SELF.Iprobe()
            time.sleep(_NAP_SECONDS)
        return found

    def interrupted(
        self, what: str, error: BaseException, point: Point = NOWHERE
    ) -> None:
        """End all calls of all ranks, because this rank has left a call before its end.

        Raises RankLostError if another rank has died. Between two headers, this rank
        may `resume` at this ``point`` of the program.
        """
        loss = self.loss(error, what)
        if loss is not None:
            raise loss
        if self.broken:
            return
        text = f"{what} was interrupted by {type(error).__name__} on rank {self.rank}"
        if isinstance(error, CollectiveError):
            # Include the error's message, such as which rank did not arrive in time:
            # the other ranks wait for that rank, too.
            text += f" ({error})"
        self.broken = text
        self.aborts.tell(text, point)

    def look(self) -> None:
        """Raise CollectiveError if another rank or thread has ended all calls.

        Drives MPI's progress.
        """
        for_data = self._channel.exchanging is not None
        told = self.aborts.look(self._channel.num_calls, for_data=for_data)
        self.broken = self.broken or told
        if self.broken and not self.aborts.may_resume and self.lost is None:
            raise CollectiveError(
                f"expected every rank to go on, found that {self.broken}; end the "
                "program on every rank"
            )

    def resume(self, what: str) -> bool:
        """Continue if all ranks have left the same call at the same point.

        Returns whether calls are possible again. ``what`` names the next call, which
        must not have copied data into the rings yet.
        """
        if not self.aborts.may_resume:
            return False
        channel, broken, call = self._channel, self.broken, describe_call(what)
        try:
            met: bool = channel.waiter.wait(self.aborts, call)
            if met:
                self.aborts.forget()
                # A call that was left before its header may have taken a place.
                channel.rings.restart()
                self.broken = ""
        except BaseException as error:
            self.broken = broken
            loss = self.loss(error, what)
            if loss is not None:
                raise loss from error
            # Notify the other ranks, which may have resumed and wait for this rank.
            self.aborts.tell(broken)
            raise
        if met:
            # Wait for all ranks: some may still read places that are overwritten next.
            channel.agree(_RESUMING)
        else:
            self.aborts.tell(broken)
        return met


class Section:
    """A context manager that all ranks leave together; the exit is collective.

    An exception that is not an ``Exception``, such as KeyboardInterrupt, is not
    reported to the other ranks, because it is meant to end the program.
    """

    __slots__ = ("_channel", "_steps", "_timeout_seconds", "_what")

    def __init__(
        self, channel: Any, what: str, timeout_seconds: float | None = None
    ) -> None:
        self._channel, self._what = channel, what
        self._timeout_seconds = timeout_seconds

    def __enter__(self) -> None:
        """Enter the section; not collective."""
        refuse_inner(self._what)
        self._channel.failures.depth += 1
        self._steps = self._channel.position.steps

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Leave the section, and raise the error of any rank on all ranks."""
        channel, failures = self._channel, self._channel.failures
        if channel.elsewhere is not None:
            channel.elsewhere()
        tells = error is None or isinstance(error, Exception)
        try:
            if tells and channel.pending and not failures.broken:
                # Drain before reducing ``depth``: a failure still ends this section.
                channel.pending.drain()
        finally:
            failures.depth -= 1
        failure: Failure | None = failures.leaving
        if failure is not None and failure.level > failures.depth:
            failures.leaving = None
            # The ranks may have made different numbers of steps in the section.
            channel.position.steps = self._steps
            # A refused call may have taken a place in the ring of this rank only.
            channel.rings.restart()
        if not tells:
            return
        if failure is None and error is not None:
            channel.position.steps = self._steps
            failure = failures.fail(self._what, error, leaves=True)
        elif failure is None:
            call = describe_call(f"end of {self._what}")
            try:
                channel.agree(call, self._timeout_seconds)
            except CollectiveError:
                channel.position.steps = self._steps
                raise
        if failure is not None:
            raised = failure.instead_of(error)
            if raised is not error:
                raise raised
