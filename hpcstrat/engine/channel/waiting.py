"""Waiting for other ranks.

A rank spins for a moment, and then naps and drives MPI's progress, so that signals are
served, and the death of a process is seen. It learns how long to spin: where cores are
short, the rank that spins may hold the core that the awaited one needs. The watchdog's
thread reads for what a rank waits, and says who is late.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.headers import SegmentHeaders
from hpcstrat.engine.channel.waitable import Waitable
from hpcstrat.engine.observe.arrivals import Arrivals
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.errors import CollectiveError, RankLostError

__all__ = ["Spin", "Waiter", "Waiting"]

_QUICK_LOOKS = 20
_LOOKS_BETWEEN_CLOCKS = 10
# Looks of the kernel take some 25 ns each.
_KERNEL_LOOKS_PER_SECOND = 4e7
_MOST_KERNEL_LOOKS = 4000
_MOST_SPIN_SECONDS = 0.001
_LEAST_SPIN_SECONDS = 2e-5
_SHORTEST_NAP_SECONDS = 2e-5
# A nap makes a wait longer by at most this share of the time waited so far.
_NAP_SHARE = 1 / 32
_LONGEST_NAP_SECONDS = 0.001
# Values in a header between workers travel at 1 Gbit/s or more. A rank takes no nap, in
# which the wire might stand still, while it waits for at most these bytes.
_WIRE_BYTES_PER_SECOND = 1.25e8
_MOST_TRAVELING_BYTES = 256 << 10
_LIMIT_SECONDS = 1800.0
# When, before the end, the watchdog looks once more who is late, and how long a rank
# waits for what it finds.
_LEAD_SECONDS = 8.0
_VERDICT_SECONDS = 10.0


class Spin:
    """The time of looking before the first nap.

    As the Linux kernel's KVM polls for a halted processor
    (https://docs.kernel.org/virt/kvm/halt-polling.html): longer after a wait that
    looking on would have covered, shorter after one that was longer than any spin.
    """

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = _MOST_SPIN_SECONDS

    def learn(self, waited_seconds: float) -> None:
        """Take note of a wait that took longer than the spin, which it includes."""
        if waited_seconds < _MOST_SPIN_SECONDS:
            self.seconds = min(2 * self.seconds, _MOST_SPIN_SECONDS)
        else:
            self.seconds = max(self.seconds / 2, _LEAST_SPIN_SECONDS)


@dataclass(slots=True, eq=False)
class Waiting:
    """One wait of a rank; times are of the machine's monotonic clock."""

    call: Call
    start: float
    thread: int
    # Whether it has come to the end of the program.
    leaves: bool = False
    # The call's own limit, where it has one.
    timeout_seconds: float | None = None
    # When the watchdog last found out who is late.
    looked_at: float = -math.inf
    # The ranks that it found.
    late: Sequence[int] = ()
    # Until when one of them at least had announced that it would be slow.
    patient_until: float = -math.inf
    # Until when a report may be on its way, which the wait must not cut off.
    held_until: float = -math.inf

    def begin(self, slow_until: float = -math.inf) -> float:
        """Return from when on the seconds of warning and limit count.

        Not before any rank's announced slowness is over; ``slow_until`` is the waiting
        rank's own.
        """
        return max(self.start, self.patient_until, slow_until)

    def last_look(self, limit_seconds: float, slow_until: float = -math.inf) -> float:
        """Return when the watchdog looks once more, some seconds before the end."""
        lead = min(_LEAD_SECONDS, limit_seconds / 2)
        return self.begin(slow_until) + limit_seconds - lead


class Waiter:
    """Waits for the other ranks of a channel.

    ``look`` drives MPI's progress, and raises where another rank has ended all calls;
    ``steps`` knows the processes of this worker; ``arrivals`` counts the waits;
    ``state`` tells the kernel how often to look.
    """

    def __init__(
        self,
        topology: Topology,
        look: Callable[[], None],
        steps: SegmentHeaders,
        arrivals: Arrivals,
        state: Any,
    ) -> None:
        self._look, self._steps, self._arrivals = look, steps, arrivals
        self._state = state
        # How long this rank waits, where a call has no limit of its own.
        self.limit_seconds = _LIMIT_SECONDS
        # The wait that is under way, once it takes longer than a moment.
        self.waiting: Waiting | None = None
        # Whether a watchdog looks at it.
        self.watched = False
        # Until when this rank had announced that it would be slow.
        self.slow_until = -math.inf
        # Ranks that were missing at the last look.
        self.late: list[int] = []
        # Interval between looks for dead processes; survivors of a loss are in a hurry.
        self._look_seconds = 0.05 if topology.survives else 1.0
        self._spin = Spin()
        self._on_wire = topology.num_workers > 1
        # A rank that spins keeps the awaited one from running where they share a core.
        self._shares_cores = topology.worker_comm.size > topology.num_cores
        # Number of looks that a caller may make before it calls `wait`.
        self.quick_looks = 1 if self._shares_cores else _QUICK_LOOKS
        state.looks = self._looks_of_kernel()

    def _looks_of_kernel(self) -> int:
        if self._shares_cores:
            return self.quick_looks
        looks = int(self._spin.seconds * _KERNEL_LOOKS_PER_SECOND)
        return min(looks, _MOST_KERNEL_LOOKS)

    def wait_header(
        self, awaited: Waitable, call: Call, timeout_seconds: float | None = None
    ) -> bool:
        """Wait for the headers of late ranks, as `wait` does, and count it."""
        start = self._arrivals.begin(call.text)
        try:
            self.late = awaited.missing() if self._arrivals.looks_early else []
            return self.wait(awaited, call, timeout_seconds)
        finally:
            self._arrivals.end(start, call.text, self.late)

    def wait_data(self, awaited: Waitable, call: Call) -> bool:
        """Wait for data, as `wait` does, and count it."""
        start = time.perf_counter()
        try:
            return self.wait(awaited, call)
        finally:
            self._arrivals.count_data(start, call.text)

    def wait(
        self, awaited: Waitable, call: Call, timeout_seconds: float | None = None
    ) -> bool:
        """Wait for other ranks; return whether all have announced the same.

        Collective over ``topology.replica_comm``, or over the ranks awaited. The job's
        own limit stands for ``timeout_seconds``. Raises CollectiveError if a rank does
        not come in time, or its process has died.
        """
        agreed, start = awaited.agreed, time.monotonic()
        traveling = 0.0
        if self._on_wire and call.nbytes <= _MOST_TRAVELING_BYTES:
            traveling = call.nbytes / _WIRE_BYTES_PER_SECOND
        while time.monotonic() < start + traveling + self._spin.seconds:
            for _ in range(_LOOKS_BETWEEN_CLOCKS):
                if agreed():
                    return True
                if self._shares_cores:
                    os.sched_yield()
        outer, self.waiting = self.waiting, Waiting(call, start, threading.get_ident())
        self.waiting.timeout_seconds = timeout_seconds
        try:
            return self._nap(awaited, self.waiting)
        finally:
            self.waiting = outer
            self._spin.learn(time.monotonic() - start - traveling)
            self._state.looks = self._looks_of_kernel()

    def _nap(self, awaited: Waitable, waiting: Waiting) -> bool:
        """Wait, while others may need the processor."""
        look_at = waiting.start + self._look_seconds
        while True:
            late = awaited.missing()
            if not late:
                return bool(awaited.agreed())
            self.late = late
            now = time.monotonic()
            if now > look_at:
                look_at = now + self._look_seconds
                self._check_alive(waiting.call)
            if now > waiting.start + (waiting.timeout_seconds or self.limit_seconds):
                self.check_limit(waiting)
            self._look()
            nap = max((now - waiting.start) * _NAP_SHARE, _SHORTEST_NAP_SECONDS)
            time.sleep(min(nap, _LONGEST_NAP_SECONDS))

    def check_limit(self, waiting: Waiting) -> None:
        """End a wait that has taken longer than its limit, by CollectiveError.

        Late ranks may have been slow in agreement: then not before that is over, too.
        """
        now, limit = time.monotonic(), self.limit_seconds
        advice = "see what they do, or raise "
        if waiting.timeout_seconds:
            limit, advice = waiting.timeout_seconds, advice + "timeout_seconds"
        else:
            advice += "limit_seconds"
            end = waiting.begin(self.slow_until) + limit
            looked = waiting.looked_at >= waiting.last_look(limit, self.slow_until)
            unclear = not looked or now < waiting.held_until
            if now < end or (self.watched and unclear and now < end + _VERDICT_SECONDS):
                return
        late = list(waiting.late or self.late)
        raise CollectiveError(
            f"expected all ranks in {waiting.call.text} within {limit:g} s, found that "
            f"{_some(late)} did not come; {advice}",
            [rank for rank in late if rank >= 0],
        )

    def _check_alive(self, call: Call) -> None:
        dead = self._steps.dead()
        if dead:
            raise RankLostError(
                f"expected all ranks in {call.text}, found that the processes of ranks "
                f"{dead} have died; look for their last output",
                dead,
            )


def _some(late: Sequence[int]) -> str:
    return f"ranks {list(late)}" if late and -1 not in late else "other ranks"
