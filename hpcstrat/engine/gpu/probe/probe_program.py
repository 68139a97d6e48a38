"""The trial program of `hpcstrat.engine.gpu.probe.probe`, which may crash.

``python -m hpcstrat.engine.gpu.probe.probe_program --skip OPERATIONS FOLDER`` runs on
two ranks, or on one rank that sends to itself. The trial program never runs in the
process of a user's program.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.device_memory import plain_memory
from hpcstrat.engine.gpu.library import Gpu
from hpcstrat.engine.gpu.probe.outcome import OPERATIONS

__all__ = ["library_version", "main"]

_SIZES = (8, 64 << 10, 4 << 20)
# Time limit of one operation with one size. A process whose launcher was killed ends
# after this time at the latest.
_LIMIT_SECONDS = 20.0
# The operations that a single process tries: it exchanges messages with itself.
_ALONE = ("sendrecv", "exchange")


class _TrialRank:
    """One rank of the trial."""

    def __init__(self, mpi: Any, folder: Path) -> None:
        self._mpi = mpi
        self._comm = mpi.COMM_WORLD
        self._rank = self._comm.rank
        self._peer = self._comm.size - 1 - self._rank
        # If a wrong launcher starts two processes with rank 0, mode "x" stops one.
        self._out = (folder / f"rank-{self._rank}.jsonl").open("x")
        self._fault = (folder / f"rank-{self._rank}.fault").open("w")
        faulthandler.enable(self._fault)
        self._runtime: Any = None

    def say(self, **line: Any) -> None:
        """Write a line of JSON that is kept if the process crashes later."""
        self._out.write(json.dumps(line) + "\n")
        # After the flush, the line is safe, even if the next operation crashes.
        self._out.flush()

    def greet(self, gpu: Gpu | None, problem: str) -> bool:
        """Write this rank's MPI version and GPU; return whether each rank has a GPU."""
        version = self._mpi.Get_library_version().strip("\0 \n")
        if gpu is None:
            self.say(hello=version, problem=problem)
        else:
            self._runtime = library.load().cuda.runtime
            self.say(hello=version, gpu=gpu.identity)
        return not any(self._comm.allgather(problem))

    def run(self, skipped: set[str]) -> None:
        """Try all operations with all sizes."""
        names = OPERATIONS if self._comm.size == 2 else _ALONE
        for name in names:
            if name in skipped:
                continue
            for nbytes in _SIZES:
                faulthandler.dump_traceback_later(
                    _LIMIT_SECONDS, exit=True, file=self._fault
                )
                self._comm.Barrier()
                self.say(operation=name, bytes=nbytes)
                try:
                    reason = getattr(self, f"_{name}")(nbytes)
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                self.say(operation=name, bytes=nbytes, ok=not reason, reason=reason)
                if reason:
                    # Abort, because the other rank may still wait in the operation.
                    self._comm.Abort(3)
            self.say(finished=name)
        self.say(done=True)
        # Set the limit again, because MPI_Finalize may hang, too.
        faulthandler.dump_traceback_later(_LIMIT_SECONDS, exit=True, file=self._fault)

    def _pattern(self, nbytes: int, rank: int) -> np.ndarray[Any, Any]:
        """Return the values that a rank sends: small integers as float32."""
        count = np.arange(nbytes // 4, dtype=np.int64)
        return ((count * 7 + rank * 13) % 251).astype(np.float32)

    def _device(self, values: np.ndarray[Any, Any]) -> Any:
        """Return new GPU memory that contains these values; the copy has ended."""
        memory, runtime = plain_memory(values.nbytes), self._runtime
        target, source = memory.data.ptr, values.ctypes.data
        runtime.memcpy(target, source, values.nbytes, runtime.memcpyHostToDevice)
        runtime.deviceSynchronize()
        return memory

    def _message(self, memory: Any) -> list[Any]:
        """Return an mpi4py message for GPU memory."""
        buffer = self._mpi.buffer.fromaddress(memory.data.ptr, memory.nbytes)
        return [buffer, memory.nbytes // 4, self._mpi.FLOAT]

    def _compare(self, memory: Any, expected: np.ndarray[Any, Any]) -> str:
        """Return the first difference of GPU memory from expected values, as text."""
        seen, runtime = np.empty_like(expected), self._runtime
        runtime.deviceSynchronize()
        target, source = seen.ctypes.data, memory.data.ptr
        runtime.memcpy(target, source, seen.nbytes, runtime.memcpyDeviceToHost)
        return _difference(seen, expected)

    # The operations; each method returns an error text, or an empty string.

    def _send(self, nbytes: int) -> str:
        if self._rank == 0:
            memory = self._device(self._pattern(nbytes, 0))
            self._comm.Send(self._message(memory), dest=1)
            return ""
        seen = np.zeros(nbytes // 4, np.float32)
        self._comm.Recv(seen, source=0)
        return _difference(seen, self._pattern(nbytes, 0))

    def _receive(self, nbytes: int) -> str:
        if self._rank == 0:
            self._comm.Send(self._pattern(nbytes, 0), dest=1)
            return ""
        memory = self._device(np.zeros(nbytes // 4, np.float32))
        self._comm.Recv(self._message(memory), source=0)
        return self._compare(memory, self._pattern(nbytes, 0))

    def _pair(self, nbytes: int) -> tuple[Any, Any]:
        """Return GPU memory to send from, and GPU memory to receive into."""
        own = self._device(self._pattern(nbytes, self._rank))
        return own, self._device(np.zeros(nbytes // 4, np.float32))

    def _sendrecv(self, nbytes: int) -> str:
        own, other = self._pair(nbytes)
        sent, received, peer = self._message(own), self._message(other), self._peer
        self._comm.Sendrecv(sent, peer, 0, received, peer, 0)
        return self._compare(other, self._pattern(nbytes, peer))

    def _exchange(self, nbytes: int) -> str:
        own, other = self._pair(nbytes)
        requests = [
            self._comm.Irecv(self._message(other), source=self._peer),
            self._comm.Isend(self._message(own), dest=self._peer),
        ]
        self._mpi.Request.Waitall(requests)
        return self._compare(other, self._pattern(nbytes, self._peer))

    def _broadcast(self, nbytes: int) -> str:
        memory = self._device(self._pattern(nbytes, self._rank))
        self._comm.Bcast(self._message(memory), root=0)
        return self._compare(memory, self._pattern(nbytes, 0))

    def _allreduce(self, nbytes: int) -> str:
        own, total = self._pair(nbytes)
        self._comm.Allreduce(self._message(own), self._message(total))
        expected = np.zeros(nbytes // 4, np.float32)
        for rank in range(self._comm.size):
            expected += self._pattern(nbytes, rank)
        return self._compare(total, expected)


def _difference(seen: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> str:
    if np.array_equal(seen, expected):
        return ""
    index = int(np.flatnonzero(seen != expected)[0])
    return f"element {index} is {seen[index]}, not {expected[index]},"


def library_version() -> str:
    """Return the MPI library's version text without initializing MPI.

    On some login nodes, loading the library ends the Python process.
    """
    return str(_mpi().Get_library_version()).strip("\0 \n")


def _mpi() -> Any:
    """Load the MPI library without initializing MPI."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI


def _take_gpu() -> tuple[Gpu | None, str]:
    """Make a GPU current; return the GPU, or None and the error."""
    try:
        library.load()
        gpus = library.visible_gpus()
        gpu = gpus[(launch_from_environment().local_rank or 0) % len(gpus)]
        library.use(gpu.index)
        plain_memory(max(_SIZES))
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return gpu, ""


def main(arguments: list[str] | None = None) -> int:
    """Run the trial; return the exit status.

    Collective over all ranks of the trial.
    """
    parser = argparse.ArgumentParser(prog="hpcstrat.engine.gpu.probe.probe_program")
    parser.add_argument("--skip", default="")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("folder", nargs="?")
    options = parser.parse_args(arguments)
    if options.version:
        sys.stdout.write(library_version())
        return 0
    # Write no core file, because a crash of this process is expected.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    mpi = _mpi()
    faulthandler.dump_traceback_later(3 * _LIMIT_SECONDS, exit=True)
    # MPI may look for a CUDA context when it starts: create one before, as a job does.
    taken = _take_gpu()
    mpi.Init()
    trial = _TrialRank(mpi, Path(options.folder))
    if not trial.greet(*taken):
        mpi.Finalize()
        return 2
    trial.run(set(options.skip.split(",")))
    mpi.Finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
