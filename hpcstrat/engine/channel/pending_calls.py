"""Calls that are started now and awaited later."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.disagreement import FAILED, Announcement, announce_error
from hpcstrat.engine.channel.waitable import Waitable, WaitSteps, exhaust
from hpcstrat.engine.observe.timeline import active, recorded_wait
from hpcstrat.errors import HpcstratError, RankLostError, TopologyError

__all__ = ["PendingCall", "PendingCalls"]

_PAUSE_SECONDS = 1e-4
# On the core on which its rank computes: between hosts of one core each both hid as
# much, and each look costs.
_SHARED_PAUSE_SECONDS = 1e-3


class PendingCall:
    """A reduction that goes on while the program computes.

    Several may be under way. They end in the order in which they were started; every
    call of the strategy takes them further, and a call that waits lets them end first.

    Parameters
    ----------
    channel : Channel or None
        Carries the headers; None where nothing is to be awaited.
    call : Call
        The call.
    steps : WaitSteps
        The algorithm.
    result : tree
        What holds the result at the end.
    timeout_seconds : float, optional
        How long the header waits for late ranks.
    join : callable, optional
        Called in each thread that awaits the result, once it is known: lets the
        thread's stream on a GPU wait for it.
    part : bool
        Whether it is part of a larger call, such as a backward pass, that no rank goes
        on with once a part has failed: those not yet announced are then dropped.
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
        part: bool = False,
    ) -> None:
        self.call = call
        self.part = part
        self._join = join
        # Name in timelines that tells this rank's started calls apart.
        self.mark = ""
        self._channel = channel
        self._steps = steps
        self._result = result
        self._timeout_seconds = timeout_seconds
        self._run = 0 if channel is None else channel.position.step_fingerprint
        # The part of the call that comes next; says whether it has been passed.
        self._advance = self._post
        self._awaited: Waitable | None = None
        self._done = channel is None
        self._error: BaseException | None = None
        # Error of this rank before the header, which then tells the others.
        self._own_error: Exception | None = None
        if channel is None:
            exhaust(steps)
            return
        try:
            channel.pending.start(self)
        except BaseException as error:
            self._lose(error)
            raise

    def test(self) -> bool:
        """Take the reduction further, and say whether it has ended.

        Logically collective over the strategy's replicas: when each rank calls it, and
        how often, does not matter.

        Returns
        -------
        bool
            Whether `wait` returns, or raises, at once.
        """
        if not self._done:
            self._channel.pending.progress()
        return self._done

    def wait(self) -> Any:
        """Return the result, once all replicas have contributed to it.

        Collective over the strategy's replicas. A second call returns the same.

        Returns
        -------
        tree
            As the call that waits would have returned.

        Raises
        ------
        CollectiveError
            If another replica made another call. On every replica.
        """
        while not self._done:
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
        """Take the reduction further, and say whether it has ended; for the channel.

        Collective over the strategy's replicas. For the library's own modules.
        """
        try:
            while not self._done:
                if not self._advance(waits):
                    return False
        except BaseException as error:
            # The rank that waits for it raises this, in the same place as the others.
            try:
                self._channel.failures.look_for_death(error, self.call.text)
            except RankLostError as loss:
                self.end(loss)
            self.end(self._own_error or error)
            self._lose(error)
            if not isinstance(error, Exception):
                raise
        return True

    def _lose(self, error: BaseException) -> None:
        """End all calls, unless the other ranks know of the error."""
        failures = self._channel.failures
        known = failures.told_at == self._channel.num_calls
        if not isinstance(error, HpcstratError) and not known:
            failures.interrupted(self.call, error)

    def end(self, error: BaseException) -> None:
        """Let `wait` raise an error, for there will be no result; for the channel.

        For the library's own modules.
        """
        if not self._done:
            self._error = error
            self._done = True

    def _post(self, waits: bool) -> bool:
        del waits
        header: Any = None
        try:
            header = next(self._steps)
        except Exception as error:
            self._own_error = error
        self._channel.failures.refuse(self.call)
        flags = 0 if self._own_error is None else FAILED
        carried = None if header is None else header.carried
        self._channel.post(self.call, self._run, flags, carried)
        self._advance = self._agree
        return True

    def _agree(self, waits: bool) -> bool:
        channel, call, error = self._channel, self.call, self._own_error
        if waits:
            with channel.moving(call), recorded_wait(call.text):
                agreed = channel.wait_header(call, self._timeout_seconds)
        else:
            agreed = channel.poll_header(call)
        if agreed is None:
            return False
        if error is not None or not agreed:
            # All ranks come here, as their headers differ.
            told = Announcement(channel.topology.replica_id, 0, call.text)
            if error is not None:
                told = announce_error(told.rank, call.text, error)
            raise channel.failures.exchange(told).error
        self._advance = self._move
        return True

    def _move(self, waits: bool) -> bool:
        with self._channel.moving(self.call):
            if self._awaited is not None:
                if waits:
                    self._channel.wait(self._awaited, self.call)
                elif not self._awaited.agreed():
                    return False
            self._awaited = next(self._steps, None)
            self._done = self._awaited is None
        return True

    def __repr__(self) -> str:
        """Show the call, and whether it is complete."""
        return (
            f"<{type(self).__name__} {self.call.text}, "
            f"{'complete' if self._done else 'under way'}>"
        )


class PendingCalls(deque[PendingCall]):
    """The calls of a channel that have been started and have not ended, in order.

    Every call of the channel asks whether there are any: a deque says it at once.
    """

    def __init__(self, channel: Any) -> None:
        super().__init__()
        self._channel = channel
        self._thread: threading.Thread | None = None
        self._started, self._ends = threading.Event(), False
        # Held by the thread that takes them further: the program's or the progress one.
        self.lock = threading.RLock()

    def start(self, started: PendingCall) -> None:
        """Take a call whose end is not awaited; it goes on in every later call.

        Collective over ``topology.replica_comm``; does not wait.
        """
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
        """Do what can be done for them without waiting; not collective."""
        self.drain(waits=False)

    def drain(self, last: PendingCall | None = None, *, waits: bool = True) -> None:
        """Wait for their end, up to ``last``; their handles keep their errors.

        Collective over ``topology.replica_comm``.
        """
        with self.lock:
            while self:
                first = self[0]
                if not first.advance(waits):
                    return
                # An error may have emptied the queue.
                if self and self[0] is first:
                    self.popleft()
                    if active.recorder is not None:
                        active.recorder.ended(first)
                if first is last:
                    return

    def num_separate(self) -> int:
        """Return how many there are, all parts of larger calls taken as one."""
        return sum(not one.part for one in self) + any(one.part for one in self)

    def lose(self, error: BaseException, *, all_of_them: bool) -> None:
        """Let go of parts that have not been announced, since one failed; or of all."""
        lost = list(self) if all_of_them else [o for o in list(self)[1:] if o.part]
        for one in lost:
            one.end(error)
            self.remove(one)

    # A thread that takes them further while the program computes.

    def use_thread(self, enter: Callable[[], object]) -> None:
        """Take them further in a thread, too, which calls ``enter`` first.

        Collective over ``topology.replica_comm``. Raises TopologyError on every rank if
        MPI was not started for threads on one of them. A second call does nothing.
        """
        self._channel.agree(describe_call("use of a progress thread"))
        topology = self._channel.topology
        mpi, comm = topology.mpi, topology.replica_comm
        if not all(comm.allgather(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)):
            raise TopologyError(
                "expected MPI with THREAD_MULTIPLE for a progress thread, found it "
                "started with less; create this strategy first, or start MPI "
                "accordingly"
            )
        if self._thread is None:
            pause = _SHARED_PAUSE_SECONDS if topology.cores_each < 2 else _PAUSE_SECONDS
            self._thread = threading.Thread(
                target=self._progress_in_thread,
                args=(enter, pause),
                name="hpcstrat-progress",
                daemon=True,
            )
            self._thread.start()

    def _progress_in_thread(self, enter: Callable[[], object], pause: float) -> None:
        """Make MPI calls only while a started call is under way.

        The main thread then makes none of its own: a call of the strategy first lets
        them end.
        """
        nap = threading.Event()
        while not self._ends:
            self._started.wait()
            self._started.clear()
            enter()
            while self and not self._ends:
                self.progress()
                nap.wait(pause)

    def end_thread(self) -> None:
        """End the thread, where there is one; not collective."""
        if self._thread is not None:
            self._ends = True
            self._started.set()
            self._thread.join()
