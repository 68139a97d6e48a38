"""Creates an NCCL communicator and tests its first sums, in a separate thread.

A new communicator may not work. Since 2.22, NCCL connects the ranks at the first call
of each of its algorithms (``NCCL_RUNTIME_CONNECT``). Therefore, a small /dev/shm, an
unreachable network or a broken link between two GPUs causes a failure only in the first
sum: an error on one rank, a call or a kernel that never ends on the other ranks
(github.com/NVIDIA/nccl/issues/2190), or wrong numbers. For this reason, the trial
computes and checks sums of three sizes, which use different algorithms and protocols,
before any sum of the program. Algorithms that these sums do not use, such as gathers
over many nodes, are connected later.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import numpy as np

from hpcstrat.engine.channel.waitable import Waitable
from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.device_memory import plain_memory
from hpcstrat.engine.gpu.streams import Mark
from hpcstrat.engine.typing import Array

__all__ = ["Joining", "abort_beside", "described"]

# Time limit for joining: many times the time that thousands of ranks need.
_JOIN_SECONDS = 300.0
# Time limit of the sums, counted from the time at which this rank has joined; all ranks
# join at about the same time.
_TRIAL_SECONDS = 60.0
_TRIAL_BYTES = (4, 1 << 20, 64 << 20)
_POLL_SECONDS = 1e-3
_JOIN_ADVICE = "see NCCL_SOCKET_IFNAME, by which it is told the network interface"
_SUM_ADVICE = (
    "look at the size of /dev/shm, and try NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 or "
    "NCCL_IB_DISABLE=1, each of which closes one way between GPUs"
)


class Joining(Waitable):
    """A step of a call: the creation and the trial of an NCCL communicator.

    The communicator is created on the current device. The trial ends with `keep` or
    `give_up`, after every rank knows the results of all ranks. The ranks of a node must
    abort at the same time, because a rank must not free memory that the kernel of
    another rank still reads. An NCCL call may never return, and the memory that it uses
    must not be freed while it runs. Therefore, only the thread that made the call
    aborts, after the call has returned; the call returns if another rank aborts. If all
    ranks wait in such calls, threads and memory stay until the processes end.
    """

    def __init__(
        self, nccl: Any, identity: Any, rank: int, size: int, limit_seconds: float
    ) -> None:
        self._nccl, self._identity = nccl, identity
        self._rank, self._size = rank, size
        self._device = 0
        self._made: Any = None
        self._problem = ""
        self._doing, self._advice = f"joined {size} ranks", _JOIN_ADVICE
        # Both limits expire before the wait for other ranks times out with an error.
        self._limit_seconds = min(_JOIN_SECONDS, limit_seconds / 2)
        self._trial_seconds = min(_TRIAL_SECONDS, limit_seconds / 4)
        self._begun = time.monotonic()
        self._ended, self._decided = threading.Event(), threading.Event()
        self._kept = False
        thread = threading.Thread(target=self._run, name="hpcstrat-nccl", daemon=True)
        try:
            self._device = library.current_gpu()
            thread.start()
        except Exception as error:
            # `NcclGroup.connect` reports the problem to ranks that may wait in NCCL.
            self._problem = described(error)
            self._ended.set()

    def _run(self) -> None:
        try:
            library.use(self._device)
            make = self._nccl.NcclCommunicator
            self._made = make(self._size, self._identity, self._rank)
            self._advice, self._limit_seconds = _SUM_ADVICE, self._trial_seconds
            self._begun = time.monotonic()
            for nbytes in _TRIAL_BYTES:
                if not self._decided.is_set():
                    self._doing = f"summed {nbytes} bytes"
                    self._sum(nbytes)
        except Exception as error:
            self._problem = described(error)
        self._ended.set()
        self._decided.wait()
        if not self._kept:
            abort_quietly(self._made)

    def _sum(self, nbytes: int) -> None:
        """Sum known values over the ranks, on a new stream, and check the result."""
        import cupy

        nccl, stream = self._nccl, cupy.cuda.Stream(non_blocking=True)
        # Use small integers, whose float32 sums are exact for up to 66,000 ranks.
        values = np.resize(np.arange(251, dtype=np.float32), nbytes // 4)
        own = values + np.float32(self._rank % 7)
        ranks = np.float32(sum(rank % 7 for rank in range(self._size)))
        memory = plain_memory(nbytes).view(np.float32)
        memory.data.copy_from_host_async(own.ctypes.data, nbytes, stream)
        address = memory.data.ptr
        self._made.allReduce(
            *(address, address, own.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
        )
        mark = Mark().record(stream)
        while not mark.passed():
            if self._decided.wait(_POLL_SECONDS):
                # Abort before the memory is freed: freeing waits for the kernel.
                abort_quietly(self._made)
            self._made.check_async_error()
        # Copy only now: a copy to memory that is not page-locked blocks the host.
        _compare(memory.get(stream=stream), values * np.float32(self._size) + ranks)

    def agreed(self) -> bool:
        """Return whether the trial has ended, or has exceeded its time limit."""
        return self._ended.is_set() or (
            time.monotonic() > self._begun + self._limit_seconds
        )

    def problems(self) -> tuple[str, str]:
        """Return the error and the timeout of this rank as texts, after `agreed`.

        A text is empty if there is no such problem. The ranks compare errors first,
        because an error of one rank causes timeouts on other ranks.
        """
        if self._ended.is_set():
            return self._problem, ""
        return "", (
            f"NCCL has not {self._doing} within {self._limit_seconds:g} s "
            f"({self._advice})"
        )

    def keep(self) -> Any:
        """Keep and return the communicator, because no rank has a problem."""
        self._kept = True
        self._decided.set()
        return self._made

    def give_up(self) -> None:
        """Let the thread abort the communicator, after all ranks know the problem."""
        self._decided.set()


def _compare(found: Array, expected: Array) -> None:
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        first = int(wrong[0])
        raise ArithmeticError(
            f"a sum of {found.nbytes} bytes is wrong in {wrong.size} places: at "
            f"{first} it is {found[first]:g}, not {expected[first]:g}"
        )


def abort_quietly(comm: Any) -> None:
    """Abort a communicator and its calls, ignoring errors."""
    if comm is not None:
        with contextlib.suppress(Exception):
            comm.abort()


def abort_beside(comm: Any) -> None:
    """Call `abort_quietly` in a new thread, without waiting for it.

    An abort may wait for the other ranks. It also waits for kernels of other
    communicators on this device, which may have to be aborted, too
    (github.com/NVIDIA/nccl/pull/564).
    """
    threading.Thread(
        target=abort_quietly, args=(comm,), name="hpcstrat-nccl-abort", daemon=True
    ).start()


def described(error: Exception) -> str:
    """Return an NCCL error as text."""
    # Name the type: CuPy raises KeyError for NCCL errors without a known message.
    return f"{type(error).__name__}: {error}"
