"""The making of an NCCL communicator and its first sums, in a thread of their own.

A communicator that was made is not yet one that works. From 2.22 on, NCCL connects the
ranks at the first call of each of its algorithms (``NCCL_RUNTIME_CONNECT``), so that a
small /dev/shm, a network that leads nowhere or a broken way between two GPUs shows in
the first sum: as an error on one rank, as a call or a kernel that does not end on the
others (github.com/NVIDIA/nccl/issues/2190), or as wrong numbers. Sums of three sizes,
which take different algorithms and protocols, are therefore made and compared before
any of the program's. Algorithms that these do not take, such as those of gathers over
many nodes, connect later.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import numpy as np

from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.device_memory import plain_memory
from hpcstrat.engine.gpu.streams import Mark
from hpcstrat.engine.typing import Array

__all__ = ["Joining", "abort_beside", "described"]

# Many times as long as thousands of ranks need.
_JOIN_SECONDS = 300.0
# From when this rank has joined; all ranks join at about the same time.
_TRIAL_SECONDS = 60.0
_TRIAL_BYTES = (4, 1 << 20, 64 << 20)
_POLL_SECONDS = 1e-3
_JOIN_ADVICE = "see NCCL_SOCKET_IFNAME, by which it is told the network interface"
_SUM_ADVICE = (
    "look at the size of /dev/shm, and try NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 or "
    "NCCL_IB_DISABLE=1, each of which closes one way between GPUs"
)


class Joining:
    """The making of a communicator and its trial; can be awaited as a step of a call.

    It is made on the device that is current here. It ends with `keep` or `give_up`,
    when every rank knows the result of each: the ranks of a node abort at the same
    time, as none may free memory that another's kernel still reads. A call of NCCL may
    not return, and its memory must not be freed meanwhile. So only the thread that made
    the call aborts, when the call returns, as it does when another rank aborts. Where
    all ranks wait in such calls, threads and memory stay until the processes end.
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
        # Both end before the wait for the other ranks does, which would be an error.
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
            # `NcclGroup.connect` tells the other ranks, which may be waiting in NCCL.
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
        """Sum over the ranks on a stream that nobody else uses, and compare."""
        import cupy

        nccl, stream = self._nccl, cupy.cuda.Stream(non_blocking=True)
        # Whole numbers, whose sums are exact for 66,000 ranks.
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
                # Before the memory is freed, which waits for the kernel.
                abort_quietly(self._made)
            self._made.check_async_error()
        # Only now, as a copy to memory that is not page-locked holds the host.
        _compare(memory.get(stream=stream), values * np.float32(self._size) + ranks)

    def agreed(self) -> bool:
        """Return whether the trial has ended, or is given up."""
        return self._ended.is_set() or (
            time.monotonic() > self._begun + self._limit_seconds
        )

    def missing(self) -> list[int]:
        """Return ``[-1]`` until the trial has ended: the ranks are not known."""
        return [] if self.agreed() else [-1]

    def problems(self) -> tuple[str, str]:
        """Say what failed on this rank, and what took too long, once `agreed`.

        Empty texts for neither. A failure comes first, since it makes others late.
        """
        if self._ended.is_set():
            return self._problem, ""
        return "", (
            f"NCCL has not {self._doing} within {self._limit_seconds:g} s "
            f"({self._advice})"
        )

    def keep(self) -> Any:
        """Return the communicator, when no rank has a problem."""
        self._kept = True
        self._decided.set()
        return self._made

    def give_up(self) -> None:
        """Have the communicator aborted, when all ranks know of the problem of one."""
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
    """Abort a communicator and its calls; does not raise."""
    if comm is not None:
        with contextlib.suppress(Exception):
            comm.abort()


def abort_beside(comm: Any) -> None:
    """Call `abort_quietly` in a thread, without waiting for it.

    An abort may need the other ranks, and waits for kernels of other communicators on
    this device, which may have to be aborted, too (github.com/NVIDIA/nccl/pull/564).
    """
    threading.Thread(
        target=abort_quietly, args=(comm,), name="hpcstrat-nccl-abort", daemon=True
    ).start()


def described(error: Exception) -> str:
    """Return an error of NCCL as text."""
    # CuPy has no text for some of NCCL's errors, and raises KeyError then.
    return f"{type(error).__name__}: {error}"
