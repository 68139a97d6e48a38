"""The loop in which a rank waits for other ranks.

A waiting rank spins for a moment. After that, the rank alternates short sleeps with
looks, so that MPI progresses, signals are handled, and the death of a process is
noticed. If it waits for records of its worker's ranks, the last of these records ends
the sleep, see `hpcstrat.engine.channel.headers`. The spin time is adapted, because a
spinning rank may occupy the core that the awaited rank needs. If ranks share cores, a
rank offers its core to other processes after each look, and sleeps only after 0.1 ms:
a barrier of four ranks on two cores takes 5 us, and 36 us if they sleep at once. The
watchdog's thread reports the late ranks of each wait.
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
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.errors import CollectiveError, RankLostError

__all__ = ["Spin", "Waiter", "Waiting"]

_QUICK_LOOKS = 20
_LOOKS_BETWEEN_CLOCKS = 10
# Each look of the kernel takes about 25 ns.
_KERNEL_LOOKS_PER_SECOND = 4e7
_MOST_LOOKS = 4000
_MOST_SPIN_SECONDS = 0.001
_LEAST_SPIN_SECONDS = 2e-5
_SHORTEST_NAP_SECONDS = 2e-5
# A sleep is at most this share of the time waited so far. It may be longer if the
# awaited rank wakes the sleeping rank.
_NAP_SHARE = 1 / 32
_WOKEN_NAP_SHARE = 1 / 2
_LONGEST_NAP_SECONDS = 0.001
# If ranks share cores: how often the kernel looks; for how long a rank looks after that
# before its first sleep, if the awaited rank ends this sleep; and the first sleep.
_SHARED_LOOKS = 100
_SHARED_SPIN_SECONDS = 5e-5
_FIRST_NAP_SECONDS = 0.0005
# Expect that values in a header between workers are sent at 1 Gbit/s or more. Up to 256
# KiB, a rank does not sleep in this time, which might stop the transfer.
_WIRE_BYTES_PER_SECOND = 1.25e8
_MOST_TRAVELING_BYTES = 256 << 10
# The same for the data of a message, of any size.
_MOVED_BYTES_PER_SECOND = 1e9
_LIMIT_SECONDS = 1800.0
# The watchdog looks for late ranks again ``_LEAD_SECONDS`` before the limit. A rank
# waits for the result of this look up to ``_VERDICT_SECONDS`` past the limit.
_LEAD_SECONDS = 8.0
_VERDICT_SECONDS = 10.0


class Spin:
    """The time for which a rank spins before its first sleep, adapted to its waits.

    As in the halt polling of Linux's KVM, it grows after a wait that a longer
    spin would have covered, and shrinks after a wait longer than any spin
    (https://docs.kernel.org/virt/kvm/halt-polling.html).
    """

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = _MOST_SPIN_SECONDS

    def learn(self, waited_seconds: float) -> None:
        """Adapt the spin time after a wait of ``waited_seconds``, spin included."""
        if waited_seconds < _MOST_SPIN_SECONDS:
            self.seconds = min(2 * self.seconds, _MOST_SPIN_SECONDS)
        else:
            self.seconds = max(self.seconds / 2, _LEAST_SPIN_SECONDS)


@dataclass(slots=True, eq=False)
class Waiting:
    """One wait of a rank; times are readings of ``time.monotonic``."""

    waiter: Waiter
    call: Call
    start: float
    thread: int
    # True if the rank waits at the end of the program.
    leaves: bool = False
    # The call's own time limit, if it has one.
    timeout_seconds: float | None = None
    # Time at which the watchdog last looked for late ranks.
    looked_at: float = -math.inf
    # The late ranks that the watchdog found.
    late: Sequence[int] = ()
    # Time until which at least one late rank had announced that it would be slow.
    patient_until: float = -math.inf
    # Time until which the watchdog may still write a report, so the wait must not end.
    held_until: float = -math.inf

    @property
    def begin(self) -> float:
        """The time from which warnings and limits are counted.

        Time for which late ranks, and the waiting rank, are slow does not count.
        """
        return max(self.start, self.patient_until, self.waiter.slow_until)

    @property
    def last_look(self) -> float:
        """The time at which the watchdog must look for late ranks again."""
        limit = self.waiter.limit_seconds
        return self.begin + limit - min(_LEAD_SECONDS, limit / 2)


class Waiter:
    """The object by which a channel waits for other ranks.

    ``look`` drives MPI's progress, and raises if another rank has ended all calls.
    ``state.looks`` sets how often the kernel looks before it returns.
    """

    def __init__(
        self,
        topology: Topology,
        look: Callable[[], None],
        steps: SegmentHeaders,
        state: Any,
    ) -> None:
        self._look, self._steps, self._state = look, steps, state
        # The ranks in the job, which errors name.
        self._job_ranks = topology.job_ranks
        # The time limit of waits in calls without a limit of their own.
        self.limit_seconds = _LIMIT_SECONDS
        # The present wait, if it has taken longer than the spin.
        self.waiting: Waiting | None = None
        # True if a watchdog observes ``waiting``.
        self.watched = False
        # Time until which this rank has announced that it is slow.
        self.slow_until = -math.inf
        # Ranks that were missing at the last look.
        self.late: list[int] = []
        # Interval between looks for dead processes; short if the topology survives the
        # loss of ranks, for a fast recovery.
        self._look_seconds = 0.05 if topology.survives else 1.0
        self._spin = Spin()
        self._on_wire = topology.num_workers > 1
        # True if ranks share cores: spinning then delays the awaited rank.
        self._shares_cores = topology.shares_cores
        # Number of times a caller looks before it calls `wait`.
        self.quick_looks = 1 if self._shares_cores else _QUICK_LOOKS
        self._set_looks_of_kernel()

    def _set_looks_of_kernel(self) -> None:
        looks = min(int(self._spin.seconds * _KERNEL_LOOKS_PER_SECOND), _MOST_LOOKS)
        if self._shares_cores:
            looks = _SHARED_LOOKS
        self._state.yields = self._shares_cores
        self._state.looks = 0 if self._on_wire else looks

    def wait(
        self, awaited: Waitable, call: Call, timeout_seconds: float | None = None
    ) -> bool:
        """Wait for other ranks, and return whether all have announced the same call.

        Collective over the awaited ranks. Raises CollectiveError if a rank does not
        arrive within the limit, or if its process has died.
        """
        agreed, start, spin = awaited.agreed, time.monotonic(), self._spin.seconds
        traveling = awaited.nbytes / _MOVED_BYTES_PER_SECOND
        if self._on_wire and call.nbytes <= _MOST_TRAVELING_BYTES:
            traveling = max(traveling, call.nbytes / _WIRE_BYTES_PER_SECOND)
        # True if the arrival of ``awaited`` ends this rank's sleep.
        wakes = awaited is self._steps and self._steps.wakes
        if wakes and self._shares_cores:
            spin = min(spin, _SHARED_SPIN_SECONDS)
        while time.monotonic() < start + traveling + spin:
            for _ in range(_LOOKS_BETWEEN_CLOCKS):
                if agreed():
                    return True
                if self._shares_cores:
                    os.sched_yield()
        if wakes and self._shares_cores:
            self._steps.sleep(_FIRST_NAP_SECONDS)
            if agreed():
                return True
        waiting = Waiting(self, call, start, threading.get_ident())
        waiting.timeout_seconds = timeout_seconds
        outer, self.waiting = self.waiting, waiting
        try:
            return self._nap(awaited, waiting, wakes)
        finally:
            self.waiting = outer
            self._spin.learn(time.monotonic() - start - traveling)
            self._set_looks_of_kernel()

    def _nap(self, awaited: Waitable, waiting: Waiting, wakes: bool) -> bool:
        """Wait with sleeps between the looks, so that other processes can run."""
        look_at = waiting.start + self._look_seconds
        share = _WOKEN_NAP_SHARE if wakes else _NAP_SHARE
        sleep: Callable[[float], None] = self._steps.sleep if wakes else time.sleep
        while late := awaited.missing():
            self.late, now = late, time.monotonic()
            if now > look_at:
                look_at = now + self._look_seconds
                dead = self._steps.dead()
                if dead:
                    names = [self._job_ranks[rank] for rank in dead]
                    raise RankLostError(
                        f"expected all ranks in {waiting.call.text}, found that the "
                        f"processes of ranks {names} have died; look for their last "
                        "output",
                        dead,
                    )
            self.check_limit(waiting)
            self._look()
            nap = max((now - waiting.start) * share, _SHORTEST_NAP_SECONDS)
            sleep(min(nap, _LONGEST_NAP_SECONDS))
        return bool(awaited.agreed())

    def check_limit(self, waiting: Waiting) -> None:
        """Raise CollectiveError if a wait has taken longer than its limit.

        If the call has no limit of its own, time for which ranks have announced that
        they are slow does not count.
        """
        now, limit, argument = time.monotonic(), self.limit_seconds, "limit_seconds"
        if waiting.timeout_seconds:
            limit, argument = waiting.timeout_seconds, "timeout_seconds"
            end = waiting.start + limit
        else:
            end = waiting.begin + limit
            unclear = waiting.looked_at < waiting.last_look or now < waiting.held_until
            if self.watched and unclear:
                end += _VERDICT_SECONDS
        if now < end:
            return
        missing = waiting.late or self.late
        late = [self._job_ranks[rank] for rank in missing if rank >= 0]
        raise CollectiveError(
            f"expected all ranks in {waiting.call.text} within {limit:g} s, found that "
            f"{f'ranks {late}' if late else 'other ranks'} did not come; see what they "
            f"do, or raise {argument}",
            late,
        )
