"""The channel of a topology: the header of every collective call, and its data.

Before any data is sent, each rank posts a header: its sequence number, the steps that
it has made, the hash of the call, and flags. The ranks continue only if the headers of
all ranks are equal. If not, every rank raises, see `hpcstrat.engine.channel.failures`;
without headers, MPI would deadlock or return wrong numbers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.call_state import CallState, Position, Watched
from hpcstrat.engine.channel.disagreement import LEFT, NOTICE
from hpcstrat.engine.channel.failures import Failures
from hpcstrat.engine.channel.headers import SegmentHeaders, make_kernel
from hpcstrat.engine.channel.interruptible import InterruptibleComm
from hpcstrat.engine.channel.pending_calls import PendingCalls
from hpcstrat.engine.channel.shared_rings import SharedRings
from hpcstrat.engine.channel.waitable import (
    EveryRankError,
    HeaderPayload,
    Waitable,
    WaitSteps,
)
from hpcstrat.engine.channel.waiting import Waiter, Waiting
from hpcstrat.engine.channel.wire_headers import WireHeaders, make_worker_values
from hpcstrat.engine.observe.arrivals import Arrivals
from hpcstrat.engine.observe.timeline import active
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.errors import CollectiveError

__all__ = ["Channel", "ClosedChannel"]

_NO_CALL = describe_call("an exchange")
_LEAVING = describe_call("leaving the program")

# Buffers that MPI may still write to after the death of a rank; never freed.
_abandoned: list[Any] = []


class Channel:
    """The object that makes the collective calls of a topology of several replicas.

    The constructor and the methods are collective over ``topology.replica_comm``,
    unless a method says otherwise.
    """

    closed = Watched[bool]()
    # A function, or None, that waits until other threads, such as XLA's, have carried
    # out the calls that the program made before. Each call of this channel first calls
    # this function, so that calls are made in the program's order.
    elsewhere = Watched[Callable[[], None] | None]()
    # A text for the other ranks, such as a signal that this rank has received. The
    # header of the next blocking call has a flag for it. The ranks then exchange their
    # notices (see `noticed`), and continue the call.
    notice = Watched[str]()

    def __init__(self, topology: Topology, *, native: bool = True) -> None:
        self.topology = topology
        # The compiled kernel that sums in this worker's memory, or None if some rank
        # does not have it. The kernel also holds the state of the calls.
        in_worker = None
        # True if ranks can read each other's arrays, for large calls that move data.
        self.reads_memory = False
        if native:
            in_worker, self.reads_memory = make_kernel(topology)
        values = make_worker_values(topology, native=native)
        self.kernel = in_worker or (values and values.kernel)
        self.state: Any = self.kernel or CallState()
        self.closed, self.elsewhere, self.notice = False, None, ""
        self.noticed: dict[int, str] = {}
        # The call whose data this rank exchanges now.
        self.exchanging: Call | None = None
        self.position = Position(self.state)
        self.pending = PendingCalls(self)
        # The `DeviceGroup`, made at the first call with arrays on GPUs.
        self.device_group: Any = None
        self._comm = topology.duplicate()
        self._interruptible: dict[int, InterruptibleComm] = {}
        self.failures = Failures(self, self._comm)
        self.steps = SegmentHeaders(topology, in_worker)
        self.rings = SharedRings(topology, self.state)
        self.arrivals = Arrivals(topology, self._comm, lambda: self.num_calls)
        self.waiter = Waiter(topology, self.failures.look, self.steps, self.state)
        # Headers between workers, which also contain the values of small reductions.
        self.wire: WireHeaders | None = None
        if topology.num_workers > 1:
            made = self._comm, self.steps, self.rings, values
            self.wire = WireHeaders(topology, *made)
        self.headers: SegmentHeaders | WireHeaders = self.wire or self.steps
        active.channels.append(self)

    @property
    def num_calls(self) -> int:
        """Number of headers posted so far; the same on all ranks at the same point."""
        return int(self.state.num_calls)

    @property
    def last_call(self) -> Call | None:
        """The last call for which the headers of all ranks have arrived."""
        last: Call | None = self.state.last_call
        return last

    def may_repeat(self) -> bool:
        """Return whether the kernel may make calls without Python code.

        The flag ``attention`` is cleared before the tests, see `Watched`.
        """
        state, failures = self.state, self.failures
        state.attention = False
        failed = failures.broken or failures.leaving is not None or self.closed
        tells = self.notice or active.recorder is not None
        if failed or tells or self.pending or self.elsewhere is not None:
            state.attention = True
        return not state.attention

    # Blocking calls: a header, then an exchange of data.

    def drive(
        self, steps: WaitSteps, call: Call, timeout_seconds: float | None = None
    ) -> None:
        """Run all steps of an algorithm, and wait in each of them."""
        if self.pending:
            # End the started calls first: their data use the same rings.
            self.pending.drain()
        self.agree(call, timeout_seconds, next(steps))
        self.advance(steps, call, waits=True)

    def agree(
        self,
        call: Call,
        timeout_seconds: float | None = None,
        carried: HeaderPayload | None = None,
    ) -> None:
        """Post a header, and return once every rank has posted the same header.

        Raises CollectiveError on every rank if a rank announced another call or left
        the program. If a rank reported an error, all ranks without their own error
        raise ReplicaError. The values ``carried`` are sent in the header.
        """
        flags = NOTICE if self.notice else 0
        recorder: Any = active.recorder
        start = recorder and recorder.enter(call.text)
        try:
            agreed = self.announce(call, flags, timeout_seconds, carried)
        finally:
            if recorder is not None:
                about: dict[str, Any] = {"how": call.how} if call.how else {}
                about |= {"call": call.text, "bytes": call.nbytes}
                about |= {"sequence": self.num_calls, "channel": self.arrivals.number}
                recorder.agreed(call.text, about, start)
        if not agreed or flags:
            self.failures.settle(call, timeout_seconds, carried)

    def announce(
        self,
        call: Call,
        flags: int = 0,
        timeout_seconds: float | None = None,
        carried: HeaderPayload | None = None,
    ) -> bool:
        """Post a header, wait for all ranks' headers, and return whether all agree."""
        failures = self.failures
        failures.refuse(call)
        if self.pending:
            self.pending.drain()
            failures.refuse(call)
        try:
            self.post(call, self.state.run_fingerprint, flags, carried)
            return self.wait_header(call, timeout_seconds)
        except BaseException as error:
            failures.interrupted(call.text, error)
            raise

    # Headers without data.

    def post(
        self,
        call: Call,
        run: int,
        flags: int = 0,
        carried: HeaderPayload | None = None,
    ) -> None:
        """Post the header of a call, with flags; does not wait.

        ``run`` is the position's ``step_fingerprint``, or for a blocking call the
        state's ``run_fingerprint``.
        """
        self.state.num_calls += 1
        if self.wire is None:
            # Include the ring's next place in the hash: it differs between ranks if one
            # rank was interrupted between the copy into a place and the header.
            self.steps.post(run, call.digest ^ self.rings.next, flags)
        else:
            # `WireHeaders` compares the next places inside each worker only.
            self.wire.post(self.num_calls, run, call.digest, flags, carried)

    def poll_header(self, call: Call) -> bool | None:
        """Return whether all ranks' headers are equal; None while some are missing."""
        headers = self.headers
        if not headers.agreed() and headers.missing():
            self.failures.look()
            return None
        self.state.last_call = call
        return headers.agreed()

    def wait_header(self, call: Call, timeout_seconds: float | None) -> bool:
        """Wait for the headers of all ranks, and return whether all are equal."""
        agreed, found = self.headers.agreed, True
        for _ in range(self.waiter.quick_looks):
            if agreed():
                break
        else:
            waiter, arrivals = self.waiter, self.arrivals
            start = arrivals.begin(call.text)
            try:
                waiter.late = self.headers.missing() if arrivals.looks_early else []
                found = waiter.wait(self.headers, call, timeout_seconds)
            finally:
                arrivals.end(start, call.text, waiter.late)
        self.state.last_call = call
        return found

    # Exchanges of data.

    @contextlib.contextmanager
    def moving(self, call: Call) -> Iterator[InterruptibleComm]:
        """Return a context manager for the exchange of data that follows `agree`.

        Not collective. The value of ``as`` is an InterruptibleComm of all replicas.
        After an error inside the block no further call can be made, because the other
        ranks still wait in this call, unless it is an EveryRankError.
        """
        recorder = active.recorder
        if recorder is not None:
            recorder.enter_data(call.text)
        outer, self.exchanging = self.exchanging, call
        # This count shows the watchdog that the rank makes progress.
        self.topology.moves += 1
        try:
            yield self.interruptible(self.topology.replica_comm)
        except EveryRankError as error:
            self.failures.told_at = self.num_calls
            raise ValueError(*error.args) from error.__cause__
        except BaseException as error:
            self.failures.interrupted(call.text, error)
            raise
        finally:
            self.exchanging = outer
            if recorder is not None:
                recorder.leave_data(call.text)

    def advance(
        self,
        steps: WaitSteps,
        call: Call,
        awaited: Waitable | None = None,
        *,
        waits: bool,
    ) -> Waitable | None:
        """Continue an exchange of data after ``awaited``; return what it awaits next.

        Returns None at the end of the exchange. Does not wait unless ``waits``.
        """
        with self.moving(call):
            if awaited is None:
                awaited = next(steps, None)
            while awaited is not None:
                if waits:
                    self.wait(awaited, call)
                elif not awaited.agreed():
                    self.failures.look()
                    break
                awaited = next(steps, None)
        return awaited

    def interruptible(self, comm: Any) -> InterruptibleComm:
        """Return the InterruptibleComm of ``comm``; not collective."""
        found = self._interruptible.get(comm.handle)
        if found is None:
            found = InterruptibleComm(comm, self.topology.mpi, self._await)
            self._interruptible[comm.handle] = found
        return found

    def _await(self, message: Waitable) -> None:
        self.wait(message, self.exchanging or self.last_call or _NO_CALL)

    def step(self, call: Call) -> Waitable:
        """Notify this worker's ranks that this rank has reached a call's next step.

        Collective over ``topology.worker_comm``. Returns what to wait for.
        """
        self.steps.post(0, call.digest ^ self.rings.next, 0)
        self.topology.moves += 1
        return self.steps

    def wait(self, awaited: Waitable, call: Call) -> None:
        """Wait in a call for ``awaited``, a step of the worker's ranks or a message.

        Raises CollectiveError if ``awaited`` is late, or if a rank's process has died.
        """
        agreed = awaited.agreed
        self.topology.moves += 1
        for _ in range(self.waiter.quick_looks):
            if agreed():
                return
        start = time.perf_counter()
        try:
            found = self.waiter.wait(awaited, call)
        finally:
            self.arrivals.count_data(start, call.text)
        if not found:
            raise CollectiveError(
                f"expected every rank in the same step of {call.text}, found a step of "
                "another call; end the program on every rank"
            )

    def forget_done(self) -> None:
        """Release arrays of started calls that GPUs have finished; not collective."""
        if self.device_group is not None:
            with self.pending.lock:
                self.device_group.lane.forget_done()

    # The end of the program, and of the channel.

    def post_leave(self) -> None:
        """Announce that this rank ends the program; waits only for started calls."""
        with contextlib.suppress(Exception):
            self.pending.drain()
        # Restart, because an interrupted call may have taken a place on this rank only.
        self.rings.restart()
        self.post(_LEAVING, 0, LEFT)
        begun = time.monotonic(), threading.get_ident()
        self.waiter.waiting = Waiting(self.waiter, _LEAVING, *begun, leaves=True)

    def poll_leave(self) -> str | None:
        """Return a text on ranks that made another call instead of leaving the program.

        Returns "" if all ranks leave, and None while headers of ranks are missing.
        Raises CollectiveError if ranks do not arrive in time.
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
        try:
            return str(self.failures.exchange(_LEAVING.text, flags=LEFT).error)
        except CollectiveError as error:
            return str(error)

    def close(self) -> None:
        """Free the communicator and the memory of this channel."""
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
        """Release this rank's resources after other ranks have died; not collective."""
        if self.closed:
            return
        self.closed = True
        if self.device_group is not None:
            self.device_group.abandon()
        self.topology.revoke()
        _abandoned.append((self.headers, list(self.pending)))
        self.pending.clear()
        self._let_go()

    def _let_go(self) -> None:
        active.channels.remove(self)
        for holder in (self.arrivals, self.rings, self.steps):
            holder.close()


class ClosedChannel:
    """A channel whose calls all raise CollectiveError; no method is collective."""

    broken, closed, elsewhere = "", True, None

    def __init__(self) -> None:
        self.state = CallState()
        # ``run`` counts its steps even after the strategy is closed.
        self.position = Position(self.state)
        self.pending = PendingCalls(self)
        # This object also stands in for the channel's `Failures`.
        self.failures = self

    @property
    def topology(self) -> Any:
        """Raise CollectiveError: the communicators have been freed."""
        self.refuse(describe_call("a call"))

    rings = device_group = topology

    def refuse(self, call: Call, *_: Any) -> NoReturn:
        """Raise CollectiveError, because the strategy is closed."""
        raise CollectiveError(
            f"expected an open strategy for {call.text}, found one that is closed; "
            "create a new one"
        )

    agree = refuse

    def fail(self, *_: Any) -> None:
        """Do nothing: there are no other ranks to notify, and no arrays to release."""

    forget_done = fail
