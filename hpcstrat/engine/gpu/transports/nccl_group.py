"""Sums and copies of GPU memory by NCCL, with one GPU for each rank.

Calls are enqueued on a lane's stream, and return immediately. The host waits only while
NCCL creates its communicator, which needs every rank: the ranks agree first that all
can create it, and afterwards that it exists and has computed correct sums
(`nccl_trial`).

NCCL kernels wait on the GPU for the kernels of other ranks. Therefore, an NCCL kernel
must never be in flight together with an MPI message of GPU memory, because this may
deadlock: on one rank, the message's copy waits for the NCCL kernel to end; on another
rank, the NCCL kernel is launched only after the message. All GPU calls of a channel
share one lane, which only one call uses at a time. A transport that passes GPU memory
to MPI first waits for the lane (`hpcstrat.engine.gpu.transports.mpi_transport`), and
launches its next kernel only after its messages have ended.

When a rank dies, the kernels of the other ranks wait for its kernels forever, and all
work that waits for their streams hangs, too (NCCL user guide, "Fault Tolerance"). If
the job must survive the loss of a rank, a call therefore waits for its kernels: this
wait detects dead ranks, and `NcclGroup.abandon` then ends the kernels. In other jobs,
the program may hang inside of a CUDA call when the network or another rank fails. The
watchdog detects such a hang by `nccl_failure` and `kernels_wait_since`.
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
# Maximum length of an error text that one rank sends to the other ranks.
_TEXT_BYTES = 512
# NCCL has no complex types, so a complex number is passed as two floats.
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
# ncclAvg (since NCCL 2.10) divides each value before the sum, so no sum overflows.
_AVERAGE = 4
_ID_NUMBERS = 128

# The groups of this process whose communicators have been created.
_connected: set[weakref.ref[NcclGroup]] = set()


class NcclEnding(Waitable):
    """A step that waits for the end of NCCL calls; ``check`` raises NCCL's errors."""

    def __init__(self, done: Any, check: Callable[[], None]) -> None:
        self._done, self._check = done, check

    def agreed(self) -> bool:
        """Return whether the calls have ended."""
        return bool(self._done.agreed())

    def missing(self) -> list[int]:
        """Return ``[-1]`` until the calls have ended; raise if NCCL has failed."""
        if self.agreed():
            return []
        self._check()
        return [-1]


class NcclGroup:
    """An NCCL communicator over the ranks of ``comm`` (None for a single rank).

    ``comm`` is used in `connect` only. A sum runs on the lane that is passed to
    `all_reduce`; all other calls run on ``lane``, in the order of the calls.
    ``survives`` is True if the job must survive the loss of a rank.
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
        # The mark after the last call; `look_at_kernels` moves it to ``_watched``.
        self._last: Mark | None = None
        self._watched: Mark | None = None
        self.waits_since = math.inf
        # Held so that no thread frees NCCL's communicator while another thread uses it.
        self._lock = threading.Lock()
        # True if an error of this group has been raised in the program.
        self._told = False
        self.rank: int = 0 if comm is None else comm.rank
        self.size: int = 1 if comm is None else comm.size

    def connect(self, limit_seconds: float = math.inf) -> WaitSteps:
        """Create the NCCL communicator, and run its trial.

        Collective over ``comm``. A rank waits at most ``limit_seconds`` for other
        ranks. Raises EveryRankError on every rank if a rank fails.
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
        # Agree that no rank has failed: NCCL would wait forever for a failed rank.
        yield from self._raise_on_all(problem)
        if self.size > 1:
            yield Message(self._mpi_comm.Ibcast, unique, 0)
        # CuPy returns the NCCL id as bytes, or in older versions as a tuple of C chars.
        *numbers, plain = unique.tolist()
        identity = bytes(numbers) if plain else tuple(numbers)
        joining = Joining(self._nccl, identity, self.rank, self.size, limit_seconds)
        try:
            yield joining
            for problem in joining.problems():
                yield from self._raise_on_all(problem)
        except BaseException:
            # A rank may have died. Abort here: no other object has the communicator.
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

    def all_reduce(
        self,
        sums: Sequence[tuple[Any, Any, bool]],
        lane: Lane,
        function: np.ufunc = np.add,
    ) -> None:
        """Sum or average contiguous arrays over the ranks, on a lane.

        Collective over ``comm``; does not wait. Each tuple in ``sums`` is: the array to
        reduce, the array for the result (may be the same memory), and whether to
        average instead of sum. With ``numpy.maximum`` as ``function`` the result is the
        maximum. Like the other calls, this call raises CollectiveError on this rank if
        NCCL reports an error.
        """
        usual = self._nccl.NCCL_SUM if function is np.add else self._nccl.NCCL_MAX

        def call() -> None:
            for values, result, averages in sums:
                (kind, count), stream = self._kind(values), lane.stream.ptr
                op = _AVERAGE if averages else usual
                source, target = values.data.ptr, result.data.ptr
                self._comm.allReduce(source, target, count, kind, op, stream)

        self._grouped(call, lane)

    def all_gather(self, parts: Sequence[Any]) -> None:
        """Gather the parts of an array on all ranks, in place; each rank has one part.

        Collective over ``comm``; does not wait. The parts are consecutive in memory;
        rank ``r`` has part ``r``. Parts may have different lengths, or be empty.
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
        """Copy the contiguous arrays of rank ``root`` to all ranks, in place.

        Collective over ``comm``; does not wait.
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
        """Return NCCL's type for an array, and the number of elements of that type."""
        name, factor = _TYPES[array.dtype.name]
        return getattr(self._nccl, name), array.size * factor

    def _grouped(self, call: Callable[[], None], lane: Lane) -> None:
        """Make NCCL calls on a lane as one NCCL group, which NCCL launches together."""
        self._check()
        try:
            self._nccl.groupStart()
            try:
                call()
            finally:
                # End the group after errors, too: an open group holds back later calls.
                self._nccl.groupEnd()
            with self._lock:
                self._last = (self._last or Mark()).record(lane.stream)
        except Exception as error:
            self._told = True
            raise TransportError(
                f"expected NCCL to take a call, found {described(error)}; {_ADVICE}"
            ) from error

    def _check(self) -> None:
        """Raise TransportError if earlier calls have failed."""
        problem = self.failure()
        if problem:
            self._told = True
            raise TransportError(f"expected NCCL to go on, found {problem}; {_ADVICE}")

    def failure(self) -> str:
        """Return the error of earlier calls as text; never blocks, in any thread."""
        # Do not wait for another thread that frees or checks the communicator.
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
        """Set `waits_since` to the time since which calls are unfinished; may block."""
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
        """Wait until all earlier calls have ended, but only if ``survives`` is true."""
        if self.survives:
            yield NcclEnding(self._lane.done(), self._check)

    def abandon(self) -> None:
        """Abort the communicator and its calls, because ranks may have died."""
        with self._lock:
            comm, self._comm = self._comm, None
        abort_beside(comm)

    def close(self) -> None:
        """Free the communicator; all work of the lane must have ended.

        Collective over ``comm``, because NCCL may wait for the other ranks.
        """
        with self._lock:
            if self._comm is not None:
                self._comm.destroy()
                self._comm = None


def nccl_failure() -> str:
    """Return the error of a failed communicator, whose kernels will never end.

    Never blocks; any thread may call this function. Returns an empty string if nothing
    has failed, or if the program itself receives the error, because its groups wait for
    the end of their calls.
    """
    return next(filter(None, (group.failure() for group in _unaware())), "")


def look_at_kernels() -> None:
    """Check whether calls of this process have ended, for `kernels_wait_since`.

    Call this function in a separate thread, because it blocks while another thread that
    waits for a kernel holds the CUDA context.
    """
    for group in _unaware():
        # Ignore errors: the program's own calls raise the error of a failed GPU, too.
        with contextlib.suppress(Exception):
            group.look_at_kernels()


def kernels_wait_since() -> float:
    """Return since when NCCL calls are unfinished; infinity if all have ended."""
    return min((group.waits_since for group in _unaware()), default=math.inf)


def _unaware() -> list[NcclGroup]:
    """Return the groups in which the program would not notice an error."""
    groups = [reference() for reference in list(_connected)]
    return [g for g in groups if g is not None and not (g.survives or g._told)]


def _error_on_any_rank(
    mpi: Any, comm: Any, problem: str
) -> Generator[Waitable, None, str]:
    """Return, on all ranks, the problem of the highest rank that has a problem.

    Collective over ``comm``. ``problem`` is this rank's error text; empty if none.
    """
    last = np.array([comm.rank if problem else -1], np.int64)
    yield Message(comm.Iallreduce, mpi.IN_PLACE, last, mpi.MAX)
    if last[0] < 0:
        return ""
    text = np.zeros(_TEXT_BYTES, np.uint8)
    own = problem.encode(errors="replace")[:_TEXT_BYTES]
    if last[0] == comm.rank:
        text[: len(own)] = np.frombuffer(own, np.uint8)
    yield Message(comm.Ibcast, text, int(last[0]))
    return text.tobytes().rstrip(b"\0").decode(errors="replace")
