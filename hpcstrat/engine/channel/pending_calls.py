"""Pending calls: reductions and gathers that are started now and awaited later."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.disagreement import FAILED
from hpcstrat.engine.channel.entries import is_inner, refuse_inner
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps, exhaust
from hpcstrat.engine.observe.timeline import active, recorded_wait
from hpcstrat.errors import HpcstratError, TopologyError

__all__ = ["PendingCall", "PendingCalls"]

_PAUSE_SECONDS = 1e-4
# Used if the progress thread shares a core with the computation. On hosts with one
# core, this pause overlapped as much communication as the short pause.
_SHARED_PAUSE_SECONDS = 1e-3


class PendingCall:
    """A started reduction or gather, which continues while the program computes.

    Several calls may be under way, and end in the order of their starts. Every further
    call of the strategy advances them; a blocking call first waits for their end.

    Parameters
    ----------
    channel : Channel or None
        The channel that posts the header; None for a single replica.
    call : Call
        The description of the call.
    steps : WaitSteps
        The algorithm.
    result : tree
        The arrays that contain the result at the end.
    timeout_seconds : float, optional
        How long to wait for the headers of late ranks.
    join : callable, optional
        Called at the end in each thread that waits for the result; makes the thread's
        current CUDA stream wait for the result.
    in_pass : bool
        Whether this call is part of a larger call, such as a backward pass, which no
        rank continues once a part has failed. After this failure, parts that have not
        posted their headers are dropped.
    """

    def __init__(
        self,
        channel: Any,
        call: Call,
        steps: WaitSteps,
        result: Any,
        timeout_seconds: float | None = None,
        *,
        join: Callable[[], None] | None = None,
        in_pass: bool = False,
    ) -> None:
        self.call, self.in_pass = call, in_pass
        # Name in timelines that identifies this call among the started calls.
        self.mark = ""
        self._channel, self._result, self._join = channel, result, join
        self._done = channel is None
        self._error: BaseException | None = None
        if channel is None:
            exhaust(steps)
            return
        self._stages = _make(channel, call, steps, timeout_seconds)
        next(self._stages)
        try:
            channel.pending.start(self)
        except BaseException as error:
            self._lose(error)
            raise

    def test(self) -> bool:
        """Advance the call without waiting, and return whether it has ended.

        Logically collective over the strategy's replicas, but each rank may call it at
        any time and any number of times.

        Returns
        -------
        bool
            Whether the call has ended, so that `wait` does not block.
        """
        if not self._done:
            refuse_inner("test() of a started call")
            self._channel.pending.progress()
        return self._done

    def wait(self) -> Any:
        """Wait until all replicas have contributed, and return the result.

        Collective over the strategy's replicas. A second call returns the same result.

        Returns
        -------
        tree
            The result, as the blocking call would have returned it.

        Raises
        ------
        CollectiveError
            On every replica, if another replica made a different call.
        """
        while not self._done:
            refuse_inner("wait() of a started call")
            try:
                self._channel.pending.drain(self)
            except BaseException as error:
                self._lose(error)
                raise
        if self._error is not None:
            raise self._error
        if self._join is not None:
            self._join()
        return self._result

    def advance(self, waits: bool) -> bool:
        """Advance the call, or wait for its end; return whether it has ended.

        Collective over the strategy's replicas. For the library's own modules.
        """
        try:
            if not self._done:
                self._stages.send(waits)
                return False
        except StopIteration:
            self._done = True
        except BaseException as error:
            # Keep the error: `wait` raises it, at the same point on all ranks.
            loss = self._channel.failures.loss(error, self.call.text)
            self.end(loss or error)
            self._lose(error)
            if not isinstance(error, Exception):
                raise
        return True

    def _lose(self, error: BaseException) -> None:
        """End all calls of all ranks, unless the other ranks know of the error."""
        failures = self._channel.failures
        alone = is_inner(error) or not isinstance(error, HpcstratError)
        if alone and failures.told_at != self._channel.num_calls:
            failures.interrupted(self.call.text, error)

    def end(self, error: BaseException) -> None:
        """Let `wait` raise ``error``; for the library's own modules."""
        if not self._done:
            self._error, self._done = error, True

    def __repr__(self) -> str:
        """Show the call, and whether it is complete or under way."""
        return (
            f"<{type(self).__name__} {self.call.text}, "
            f"{'complete' if self._done else 'under way'}>"
        )


def _make(
    channel: Any, call: Call, steps: WaitSteps, timeout_seconds: float | None
) -> Generator[None, bool]:
    """Make a call; each ``yield`` returns whether to wait from then on."""
    run, carried, failed = channel.position.step_fingerprint, HEADER, None
    waits = yield
    try:
        carried = next(steps)
    except Exception as error:
        failed = error
    channel.failures.refuse(call)
    channel.post(call, run, 0 if failed is None else FAILED, carried)
    while (agreed := channel.poll_header(call)) is None:
        if waits:
            with channel.moving(call), recorded_wait(call.text):
                agreed = channel.wait_header(call, timeout_seconds)
            break
        waits = yield
    if failed is not None or not agreed:
        # All ranks reach this point: a FAILED flag, too, makes the headers unequal.
        ended = channel.failures.exchange(call.text, failed).error
        raise ended if failed is None else failed
    awaited = channel.advance(steps, call, waits=waits)
    while awaited is not None:
        waits = yield
        awaited = channel.advance(steps, call, awaited, waits=waits)


class PendingCalls(deque[PendingCall]):
    """The started calls of a channel that have not ended, in the order of their starts.

    This is a deque, so that every call can test quickly for started calls. A progress
    thread may advance them while the program computes. Meanwhile the main thread
    exchanges no data of its own, because each call first ends the started calls.
    """

    def __init__(self, channel: Any) -> None:
        super().__init__()
        self._channel = channel
        self._thread: threading.Thread | None = None
        self._started, self._ends = threading.Event(), False
        # Held by the thread that advances the calls: main thread or progress thread.
        self.lock = threading.RLock()
        # The ID of the thread that advances the calls now, or 0.
        self.thread = 0

    def start(self, started: PendingCall) -> None:
        """Add a started call, which every later call of the channel advances."""
        self._channel.failures.refuse(started.call)
        if active.recorder is not None:
            active.recorder.started(started)
        with self.lock:
            self.append(started)
            self._channel.state.attention = True
            self.progress()
        if self._thread is not None:
            self._started.set()

    def progress(self) -> None:
        """Advance the started calls without waiting; not collective."""
        self.drain(waits=False)

    def drain(self, last: PendingCall | None = None, *, waits: bool = True) -> None:
        """End the started calls in order, up to and including ``last``.

        Collective over ``topology.replica_comm``. If ``waits`` is false, only advance
        the calls. Errors are kept in the PendingCall objects, whose `wait` raises them.
        """
        with self.lock:
            outer, self.thread = self.thread, threading.get_ident()
            try:
                while self:
                    first = self[0]
                    if not first.advance(waits):
                        break
                    # An error may have removed calls from this queue.
                    if self and self[0] is first:
                        self.popleft()
                        if active.recorder is not None:
                            active.recorder.ended(first)
                    if first is last:
                        break
            finally:
                self.thread = outer

    def num_separate(self) -> int:
        """Return the number of started calls, counting all parts together as one."""
        return sum(not one.in_pass for one in self) + any(one.in_pass for one in self)

    def lose(self, error: BaseException, *, all_of_them: bool) -> None:
        """End started calls with ``error``: all, or parts without a posted header."""
        lost = list(self) if all_of_them else [o for o in list(self)[1:] if o.in_pass]
        for one in lost:
            one.end(error)
            self.remove(one)

    def use_thread(self, enter: Callable[[], object]) -> None:
        """Start a progress thread, unless there is one; collective over the replicas.

        The thread calls ``enter`` each time before it advances calls. Raises
        TopologyError on every rank if a rank's MPI lacks THREAD_MULTIPLE.
        """
        self._channel.agree(describe_call("use of a progress thread"))
        topology = self._channel.topology
        mpi, comm = topology.mpi, topology.replica_comm
        if not all(comm.allgather(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)):
            raise TopologyError(
                "expected MPI with THREAD_MULTIPLE for a progress thread, found a "
                "lower level; create this strategy before MPI starts, or start MPI "
                "with MPI_THREAD_MULTIPLE"
            )
        if self._thread is None:
            pause = _SHARED_PAUSE_SECONDS if topology.cores_each < 2 else _PAUSE_SECONDS
            target, name = self._progress_in_thread, "hpcstrat-progress"
            self._thread = threading.Thread(
                target=target, args=(enter, pause), name=name, daemon=True
            )
            self._thread.start()

    def _progress_in_thread(self, enter: Callable[[], object], pause: float) -> None:
        """Advance started calls in a loop; make no MPI calls while there are none."""
        nap = threading.Event()
        while not self._ends:
            self._started.wait()
            self._started.clear()
            enter()
            while self and not self._ends:
                self.progress()
                nap.wait(pause)

    def end_thread(self) -> None:
        """End the progress thread, if there is one; not collective."""
        if self._thread is not None:
            self._ends = True
            self._started.set()
            self._thread.join()
