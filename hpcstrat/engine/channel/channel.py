"""The channel of a topology: the header of every collective call, and its data.

Before any data moves, each rank announces a header: its sequence number, the steps that
it has made, the digest of the call, and flags. Only when the headers of all ranks are
equal does any rank go on; a difference is an error on every rank, see
`hpcstrat.engine.channel.failures`, where MPI itself would give wrong numbers or wait
for ever.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.call_state import CallState, Watched
from hpcstrat.engine.channel.disagreement import LEFT, NOTICE, Announcement
from hpcstrat.engine.channel.failures import Failures
from hpcstrat.engine.channel.headers import KernelHeaders, SegmentHeaders, make_kernel
from hpcstrat.engine.channel.interruptible import InterruptibleComm
from hpcstrat.engine.channel.pending_calls import PendingCalls
from hpcstrat.engine.channel.position import Position
from hpcstrat.engine.channel.shared_rings import SharedRings
from hpcstrat.engine.channel.waitable import (
    EveryRankError,
    HeaderPayload,
    HeaderStep,
    Waitable,
    WaitSteps,
)
from hpcstrat.engine.channel.waiting import Waiter, Waiting
from hpcstrat.engine.channel.wire_headers import WireHeaders
from hpcstrat.engine.observe.arrivals import Arrivals
from hpcstrat.engine.observe.timeline import active
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.errors import CollectiveError

__all__ = ["Channel"]

_NO_CALL = describe_call("an exchange")
_LEAVING = describe_call("leaving the program")

# Buffers that MPI may still write to after a death, until it gives up these calls.
_abandoned: list[Any] = []


class Channel:
    """Carries one topology's calls, of at least two replicas.

    Collective over ``topology.replica_comm``, as are its calls unless they say
    otherwise.
    """

    closed = Watched[bool]()
    # Waits for calls that the program has made before, but that other threads, such as
    # XLA's, still carry out; they come first. None where there are no such.
    elsewhere = Watched[Callable[[], None] | None]()
    # This rank's notice to the others, such as a signal that it got: the next header
    # of a call that waits carries it, and it ends nothing. The notices of all ranks are
    # the same on all after each call.
    notice = Watched[str]()

    def __init__(self, topology: Topology, *, native: bool = True) -> None:
        self.topology = topology
        # The kernel that sums in this worker's memory, where all its ranks have it; it
        # reads and writes the state of the calls.
        self.kernel = make_kernel(topology) if native else None
        self.state: Any = CallState() if self.kernel is None else self.kernel
        self.closed, self.elsewhere, self.notice = False, None, ""
        active.channels.add(self)
        # The call whose data this rank moves now.
        self.exchanging: Call | None = None
        self.position = Position(self.state)
        self.noticed: dict[int, str] = {}
        self.pending = PendingCalls(self)
        # Made at the first call with arrays on GPUs.
        self.device_group: Any = None
        self._comm = topology.duplicate()
        self._interruptible: dict[int, InterruptibleComm] = {}
        self.failures = Failures(self, self._comm)
        self.steps = (
            SegmentHeaders(topology)
            if self.kernel is None
            else KernelHeaders(topology, self.kernel)
        )
        self.rings = SharedRings(topology, self.state)
        self.arrivals = Arrivals(topology, self._comm, lambda: self.num_calls)
        self.waiter = Waiter(
            topology, self.failures.look, self.steps, self.arrivals, self.state
        )
        # Headers between workers, which carry the values of small reductions.
        self.wire: WireHeaders | None = None
        if topology.num_workers > 1:
            self.wire = WireHeaders(topology, self._comm, self.steps, self.rings)
        self.headers: SegmentHeaders | WireHeaders = self.wire or self.steps

    @property
    def num_calls(self) -> int:
        """Number of headers so far; the same on all ranks at the same point."""
        return int(self.state.num_calls)

    @property
    def last_call(self) -> Call | None:
        """The last call to which all ranks have come."""
        last: Call | None = self.state.last_call
        return last

    def may_repeat(self) -> bool:
        """Whether the kernel may make calls alone: nothing is out of the ordinary.

        The flag is lowered before anything is looked at, see `Watched`: what changes
        meanwhile raises it again, and the next call looks once more.
        """
        state, failures = self.state, self.failures
        state.attention = False
        failed = failures.broken or failures.leaving is not None or self.closed
        tells = self.notice or active.recorder is not None
        if failed or tells or self.pending or self.elsewhere is not None:
            state.attention = True
        return not state.attention

    # Calls that wait: a header, then an exchange of data.

    def drive(
        self, steps: WaitSteps, call: Call, timeout_seconds: float | None = None
    ) -> None:
        """Take an algorithm to its end; `PendingCall` does the same without waiting."""
        if self.pending:
            # Their headers came first, and their data use the same places.
            self.pending.drain()
        header = next(steps)
        assert isinstance(header, HeaderStep)
        self.agree(call, timeout_seconds, header.carried)
        with self.moving(call):
            for awaited in steps:
                self.wait(awaited, call)

    def agree(
        self,
        call: Call,
        timeout_seconds: float | None = None,
        carried: HeaderPayload | None = None,
    ) -> None:
        """Return once every rank has announced the same call.

        ``timeout_seconds`` is how long to wait for late ranks; ``carried`` travels in
        the header between workers. Raises CollectiveError on every rank, if any
        announced something else or left the program; and ReplicaError on every rank
        that did not fail, if another did.
        """
        flags = NOTICE if self.notice else 0
        if active.recorder is None:
            mark = self.position.run_fingerprint
            agreed = self.announce(call, mark, flags, timeout_seconds, carried)
        else:
            recorder: Any = active.recorder
            start = recorder.enter(call.text)
            try:
                mark = self.position.run_fingerprint
                agreed = self.announce(call, mark, flags, timeout_seconds, carried)
            finally:
                recorder.agreed(call.text, self._described(call), start)
        if not agreed or flags:
            self.failures.settle(call, timeout_seconds, carried)

    def _described(self, call: Call) -> dict[str, Any]:
        """Return what timelines say about a call."""
        about: dict[str, Any] = {"how": call.how} if call.how else {}
        about |= {"call": call.text, "bytes": call.nbytes, "sequence": self.num_calls}
        return about | {"channel": self.arrivals.number}

    def announce(
        self,
        call: Call,
        run: int,
        flags: int = 0,
        timeout_seconds: float | None = None,
        carried: HeaderPayload | None = None,
    ) -> bool:
        """Post a header, and wait for those of all ranks; whether all are the same."""
        failures = self.failures
        if failures.broken or self.closed or failures.leaving is not None:
            failures.refuse(call)
        if self.pending:
            self.pending.drain()
            failures.refuse(call)
        try:
            self.post(call, run, flags, carried)
            agreed = self.headers.agreed
            for _ in range(self.waiter.quick_looks):
                if agreed():
                    self.state.last_call = call
                    return True
            return self.wait_header(call, timeout_seconds)
        except BaseException as error:
            failures.interrupted(call, error)
            raise

    # Headers alone.

    def post(
        self,
        call: Call,
        run: int,
        flags: int = 0,
        carried: HeaderPayload | None = None,
    ) -> None:
        """Announce a call, or what the flags say; does not wait.

        ``run`` is the position's ``step_fingerprint``, or its ``run_fingerprint`` for a
        call that waits; ``carried`` travels in the header.
        """
        self.state.num_calls += 1
        if self.wire is None:
            # An interrupt before a header leaves a rank's ring a place ahead.
            self.steps.post(run, call.digest ^ self.rings.next, flags)
        else:
            # Each worker has its own rings; its steps compare them.
            self.wire.post(run, call.digest, flags, carried)

    def poll_header(self, call: Call) -> bool | None:
        """Look whether all ranks have announced the same; None while some are missing.

        Not collective.
        """
        headers = self.headers
        if not headers.agreed() and headers.missing():
            self.failures.look()
            return None
        self.state.last_call = call
        return headers.agreed()

    def wait_header(self, call: Call, timeout_seconds: float | None) -> bool:
        """Wait for the headers of all ranks; whether all have announced the same."""
        came = self.waiter.wait_header(self.headers, call, timeout_seconds)
        self.state.last_call = call
        return came

    # Data.

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
            self.failures.told_at = self.num_calls
            raise ValueError(*error.args) from error.__cause__
        except BaseException as error:
            self.failures.interrupted(call, error)
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
        self.waiter.wait_data(message, call)

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
        if not self.waiter.wait_data(awaited, call):
            raise CollectiveError(
                f"expected every rank in the same step of {call.text}, found "
                "another call's; end the program on every rank"
            )

    def forget_done(self) -> None:
        """Release arrays of started calls that GPUs have finished; not collective."""
        if self.device_group is not None:
            with self.pending.lock:
                self.device_group.lane.forget_done()

    # The end.

    def post_leave(self) -> None:
        """Announce that this rank ends the program; waits for started calls only."""
        with contextlib.suppress(Exception):
            self.pending.drain()
        # An interrupt may have taken a place in the rings, which no data follow now.
        self.rings.restart()
        self.post(_LEAVING, 0, LEFT)
        now, thread = time.monotonic(), threading.get_ident()
        self.waiter.waiting = Waiting(_LEAVING, now, thread, leaves=True)

    def poll_leave(self) -> str | None:
        """Return what other ranks did instead of leaving; empty where all leave.

        None while ranks are missing. Not collective until the ranks differ, then
        collective over ``replica_comm``. CollectiveError if ranks do not come in time.
        """
        late, waiting = self.headers.missing(), self.waiter.waiting
        if late:
            self.waiter.late = late
            self.failures.aborts.look()
            if waiting is not None:
                self.waiter.check_limit(waiting)
            return None
        self.waiter.waiting = None
        if self.headers.agreed():
            return ""
        announcement = Announcement(self._comm.rank, LEFT, "left the program")
        try:
            return str(self.failures.exchange(announcement).error)
        except CollectiveError as error:
            return str(error)

    def close(self) -> None:
        """Free what the channel holds."""
        if self.closed:
            return
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
        if self.closed:
            return
        self.closed = True
        if self.device_group is not None:
            self.device_group.abandon()
        self.failures.rank_loss.wake()
        _abandoned.append((self.headers, list(self.pending)))
        self.pending.clear()
        self._let_go()

    def _let_go(self) -> None:
        for holder in (self.arrivals, self.rings, self.steps):
            holder.close()
