"""Sums and copies of device memory by NCCL, one GPU for each rank.

Calls go to a lane's stream and return at once. The host waits only where NCCL makes its
communicator, which needs every rank: all agree first that they can, and afterwards that
the communicator is made and has summed (`nccl_trial`).

Kernels of NCCL wait on the device for those of the other ranks. So they must never be
in flight together with device memory in MPI, whose copies may wait for the device on
one rank and for a message on another. All device calls of a channel share one lane, and
one generator after the other takes it; a transport that gives device memory to MPI
waits for the lane first (`hpcstrat.engine.gpu.transports.mpi_transport`), and its
messages have ended when its generator goes on to its next kernel.

When a rank dies, the kernels of the others wait for its kernels for ever, and so does
everything that waits for their stream (NCCL user guide, "Fault Tolerance"). Where the
loss of a rank is to be survived, a call therefore does not end before its kernels have:
the wait for them looks for deaths, and `NcclGroup.abandon` then ends them. Elsewhere
the program may be inside of CUDA when the network or another rank fails, and never come
out: `nccl_failure` and `kernels_wait_since` tell the watchdog.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.channel.waitable import (
    EveryRankError,
    Message,
    Waitable,
    WaitSteps,
)
from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.streams import Lane, Mark
from hpcstrat.engine.gpu.transports.nccl_trial import (
    Joining,
    abort_beside,
    described,
)
from hpcstrat.engine.topology.survival import TransportError
from hpcstrat.errors import CollectiveError

__all__ = ["NcclGroup", "kernels_wait_since", "look_at_kernels", "nccl_failure"]

_ADVICE = "set NCCL_DEBUG=INFO to see why"
# Length of the text of a problem that one rank sends the others.
_TEXT_BYTES = 512
# NCCL has no complex numbers: each is a pair of floats.
_TYPES = {
    "int32": ("NCCL_INT32", 1),
    "uint32": ("NCCL_UINT32", 1),
    "int64": ("NCCL_INT64", 1),
    "uint64": ("NCCL_UINT64", 1),
    "float16": ("NCCL_FLOAT16", 1),
    "bfloat16": ("NCCL_BFLOAT16", 1),
    "float32": ("NCCL_FLOAT32", 1),
    "float64": ("NCCL_FLOAT64", 1),
    "complex64": ("NCCL_FLOAT32", 2),
    "complex128": ("NCCL_FLOAT64", 2),
    "uint8": ("NCCL_UINT8", 1),
}
# ncclAvg, from NCCL 2.10 on: each value is divided first, so that no sum overflows.
_AVERAGE = 4
_ID_NUMBERS = 128

# The groups of this process whose communicators were made.
_connected: set[weakref.ref[NcclGroup]] = set()


class NcclEnding:
    """The end of calls, as a step of a call; ``check`` raises where NCCL has failed."""

    def __init__(self, done: Any, check: Callable[[], None]) -> None:
        self.agreed: Callable[[], bool] = done.agreed
        self._check = check

    def missing(self) -> list[int]:
        """Return ``[-1]`` until the calls have ended; raise where NCCL has failed."""
        if self.agreed():
            return []
        self._check()
        return [-1]


class NcclGroup:
    """The ranks of a communicator, in NCCL; with None for a single rank.

    ``comm`` is used in `connect` only. Each sum names its lane; everything else runs on
    ``lane``, in the order of the calls. ``survives`` says that the loss of a rank is to
    be survived.
    """

    def __init__(
        self, mpi: Any, comm: Any, lane: Any, *, survives: bool = False
    ) -> None:
        self._mpi = mpi
        self._mpi_comm = comm
        self._lane = lane
        self.survives = survives
        self._nccl: Any = None
        self._comm: Any = None
        # Recorded behind each call; `look_at_kernels` takes it.
        self._last: Mark | None = None
        self._watched: Mark | None = None
        self.waits_since = math.inf
        # NCCL's communicator is not freed while another thread asks about it.
        self._lock = threading.Lock()
        # Whether the program knows that it has failed.
        self._told = False
        self.rank: int = 0 if comm is None else comm.rank
        self.size: int = 1 if comm is None else comm.size

    def connect(self, limit_seconds: float = math.inf) -> WaitSteps:
        """Make the communicator and try it.

        Collective over ``comm``. ``limit_seconds`` is how long a rank waits for others.
        Raises EveryRankError on every rank, if one cannot.
        """
        unique, problem = np.zeros(_ID_NUMBERS + 1, np.int16), ""
        try:
            self._nccl = library.nccl()
            if self._nccl is None:
                raise CollectiveError(
                    "CuPy found no NCCL library (pip install nvidia-nccl-cu12 or "
                    "-cu13, whichever the driver's CUDA is)"
                )
            if self.rank == 0:
                identity = self._nccl.get_unique_id()
                unique[:] = *identity, isinstance(identity, bytes)
        except Exception as error:
            problem = described(error)
        # Agreed before any rank is inside of NCCL, where it might wait for ever.
        yield from self._raise_on_all(problem)
        if self.size > 1:
            yield Message(self._mpi_comm.Ibcast(unique, 0))
        # CuPy's identity is bytes, or in older versions a tuple of C's chars.
        *numbers, plain = unique.tolist()
        identity = bytes(numbers) if plain else tuple(numbers)
        joining = Joining(self._nccl, identity, self.rank, self.size, limit_seconds)
        try:
            yield joining
            for problem in joining.problems():
                yield from self._raise_on_all(problem)
        except BaseException:
            # A rank may have died meanwhile; nobody else knows the communicator yet.
            joining.give_up()
            raise
        self._comm = joining.keep()
        _connected.add(weakref.ref(self, _connected.discard))

    def _raise_on_all(self, problem: str) -> WaitSteps:
        if self.size > 1:
            problem = yield from _error_on_any_rank(self._mpi, self._mpi_comm, problem)
        if problem:
            raise EveryRankError(
                f"expected NCCL to join {self.size} ranks, found on one of them: "
                f"{problem}; {_ADVICE}"
            )

    def all_reduce(self, sums: Sequence[tuple[Any, Any, bool]], lane: Lane) -> None:
        """Sum contiguous arrays over the ranks, or average them, on a lane.

        Collective over ``comm``; waits for nobody. Each array comes with its result,
        which may be the same memory, and with whether that is the average. Raises
        CollectiveError on this rank, if NCCL says so, as all calls here do.
        """

        def call() -> None:
            for values, result, averages in sums:
                (kind, count), stream = self._kind(values), lane.stream.ptr
                op = _AVERAGE if averages else self._nccl.NCCL_SUM
                source, target = values.data.ptr, result.data.ptr
                self._comm.allReduce(source, target, count, kind, op, stream)

        self._grouped(call, lane)

    def all_gather(self, parts: Sequence[Any]) -> None:
        """Give every rank the parts of an array, of which each rank has one, in place.

        Collective over ``comm``; waits for nobody. The parts lie one behind the other;
        rank ``r`` has part ``r``. They may differ in length, or be empty.
        """

        def call() -> None:
            if len({part.size for part in parts}) == 1:
                kind, count = self._kind(parts[0])
                own, first = parts[self.rank].data.ptr, parts[0].data.ptr
                stream = self._lane.stream.ptr
                self._comm.allGather(own, first, count, kind, stream)
            else:
                for root, part in enumerate(parts):
                    self._send(part, root)

        self._grouped(call, self._lane)

    def broadcast(self, arrays: Sequence[Any], root: int) -> None:
        """Give every rank the contiguous arrays of ``root``, in place.

        Collective over ``comm``; waits for nobody.
        """

        def call() -> None:
            for array in arrays:
                self._send(array, root)

        self._grouped(call, self._lane)

    def _send(self, array: Any, root: int) -> None:
        kind, count = self._kind(array)
        if count:
            address, stream = array.data.ptr, self._lane.stream.ptr
            self._comm.broadcast(address, address, count, kind, root, stream)

    def _kind(self, array: Any) -> tuple[int, int]:
        """Return NCCL's type of an array, and how many elements of it there are."""
        name, factor = _TYPES[array.dtype.name]
        return getattr(self._nccl, name), array.size * factor

    def _grouped(self, call: Callable[[], None], lane: Lane) -> None:
        """Make calls on a lane, which NCCL joins."""
        self._check()
        try:
            self._nccl.groupStart()
            try:
                call()
            finally:
                # Also after an error: a group left open would swallow all later calls.
                self._nccl.groupEnd()
            with self._lock:
                self._last = (self._last or Mark()).record(lane.stream)
        except Exception as error:
            self._told = True
            raise TransportError(
                f"expected NCCL to take a call, found {described(error)}; {_ADVICE}"
            ) from error

    def _check(self) -> None:
        """Raise the failure of earlier calls, if there is one."""
        problem = self.failure()
        if problem:
            self._told = True
            raise TransportError(f"expected NCCL to go on, found {problem}; {_ADVICE}")

    def failure(self) -> str:
        """Return the failure of earlier calls as text; never blocks. For any thread."""
        # Another thread frees it, or asks already: there is nothing to wait for.
        if not self._lock.acquire(blocking=False):
            return ""
        try:
            if self._comm is not None:
                self._comm.check_async_error()
        except Exception as error:
            return described(error)
        finally:
            self._lock.release()
        return ""

    def look_at_kernels(self) -> None:
        """Set `waits_since` to when calls began that have not ended; may block."""
        while True:
            if self._watched is None:
                with self._lock:
                    self._watched, self._last = self._last, None
                if self._watched is None:
                    break
                self.waits_since = time.monotonic()
            if not self._watched.passed():
                return
            self._watched = None
        self.waits_since = math.inf

    def ended(self) -> WaitSteps:
        """Wait until all earlier calls have ended, if ranks may be lost.

        Otherwise it does nothing: streams wait, and the host does not.
        """
        if self.survives:
            yield NcclEnding(self._lane.done(), self._check)

    def abandon(self) -> None:
        """Give up what is in flight, and the communicator: ranks may have died."""
        with self._lock:
            comm, self._comm = self._comm, None
        abort_beside(comm)

    def close(self) -> None:
        """Free the communicator; the lane's work must have ended.

        Collective over ``comm``, since NCCL may wait for the other ranks.
        """
        with self._lock:
            if self._comm is not None:
                self._comm.destroy()
                self._comm = None


def nccl_failure() -> str:
    """Say what has failed in a communicator of this process; its kernels never end.

    Never blocks; for any thread. Empty where nothing has failed, or where the program
    has seen the error, as it does in groups that wait for the end of their calls.
    """
    return next(filter(None, (group.failure() for group in _unaware())), "")


def look_at_kernels() -> None:
    """Look whether calls of this process have ended, for `kernels_wait_since`.

    In a thread of its own: it blocks where another thread, which waits for a kernel,
    holds CUDA's context.
    """
    for group in _unaware():
        # A device that has failed raises in the program's own calls, too.
        with contextlib.suppress(Exception):
            group.look_at_kernels()


def kernels_wait_since() -> float:
    """Return since when calls have not ended, as last seen; infinity if all have."""
    return min((group.waits_since for group in _unaware()), default=math.inf)


def _unaware() -> list[NcclGroup]:
    """Return the groups whose program does not wait for the end of its calls."""
    groups = [reference() for reference in list(_connected)]
    return [g for g in groups if g is not None and not (g.survives or g._told)]


def _error_on_any_rank(
    mpi: Any, comm: Any, problem: str
) -> Generator[Waitable, None, str]:
    """Return the problem of the last rank that has one, the same on all ranks.

    Collective over ``comm``. ``problem`` is this rank's, empty where there is none.
    """
    last = np.array([comm.rank if problem else -1], np.int64)
    yield Message(comm.Iallreduce(mpi.IN_PLACE, last, op=mpi.MAX))
    if last[0] < 0:
        return ""
    text = np.zeros(_TEXT_BYTES, np.uint8)
    own = problem.encode(errors="replace")[:_TEXT_BYTES]
    if last[0] == comm.rank:
        text[: len(own)] = np.frombuffer(own, np.uint8)
    yield Message(comm.Ibcast(text, int(last[0])))
    return text.tobytes().rstrip(b"\0").decode(errors="replace")
