"""Memory and events of a rank's GPU that the other ranks of its node open (CUDA IPC).

What a process has opened of another one it must close before that one frees it (CUDA
Runtime API, cudaIpcGetMemHandle): `Windows.close` on all ranks comes before
`Windows.free` on any. Which rank calls what when is the caller's to see to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.gpu.device_memory import (
    close_memory,
    memory_handle,
    open_memory,
    shareable_memory,
)
from hpcstrat.gpu.streams import ForeignMark, Mark
from hpcstrat.typing import Array

__all__ = ["Windows"]

_HANDLE_BYTES = 64

# What other processes may still read after a death.
_abandoned: list[Any] = []


class Windows:
    """The windows of all ranks of a node, as one of them knows them.

    Each rank has a shared mark for each of ``keys``.
    """

    def __init__(self, rank: int, size: int, keys: Sequence[Any]) -> None:
        # Bytes of this rank's window, and where those of all ranks lie in this process;
        # no addresses while they are closed.
        self.memory: Any = None
        self.addresses: list[int] = []
        self._rank, self._size, self._keys = rank, size, keys
        self._spare: Any = None
        self._own: dict[Any, Mark] = {}
        self._others: dict[tuple[int, Any], ForeignMark] = {}

    def allocate(self, nbytes: int) -> None:
        """Allocate the next window, of at least ``nbytes``, beside the open one."""
        if self._spare is None or self._spare.nbytes < nbytes:
            # The old goes before the new comes: there may not be room for both.
            self._spare = None
            self._spare = shareable_memory(nbytes)

    def described(self) -> tuple[Array, str]:
        """Return what opens the next window on other ranks, and what went wrong.

        As many bytes on each rank; all of them zero where there is a problem, so that
        the ranks can exchange them first and raise together.
        """
        nbytes = (1 + len(self._keys)) * _HANDLE_BYTES
        handles = []
        try:
            handles.append(memory_handle(self._spare))
            for key in self._keys:
                if key not in self._own:
                    self._own[key] = Mark(shared=True)
                handles.append(self._own[key].handle())
        except Exception as error:
            return np.zeros(nbytes, np.uint8), str(error)
        return np.frombuffer(b"".join(handles), np.uint8), ""

    def open(self, records: Array) -> str:
        """Open the next windows of all ranks; return what went wrong.

        This rank's becomes the current one. No window is open before; `close` closes
        them also after a failure. Row ``r`` is what rank ``r`` has described; one of
        zeros is left out.
        """
        self.memory, self._spare = self._spare, None
        self.addresses = [0] * self._size
        self.addresses[self._rank] = self.memory.data.ptr
        for rank, record in enumerate(records):
            if rank == self._rank or not record.any():
                continue
            handles = [row.tobytes() for row in record.reshape(-1, _HANDLE_BYTES)]
            try:
                self.addresses[rank] = open_memory(handles[0])
                for key, handle in zip(self._keys, handles[1:], strict=True):
                    self._others[rank, key] = ForeignMark(handle)
            except Exception as error:
                return f"{error} (rank {rank} of its worker)"
        return ""

    def record(self, key: Any, stream: Any) -> None:
        """Record a mark of this rank at the end of a stream's work so far."""
        self._own[key].record(stream)

    def join(self, rank: int, key: Any, stream: Any) -> None:
        """Let a stream wait for a mark of a rank; for this rank's own it does not."""
        # The stream has recorded this rank's own mark, and runs in order.
        if rank != self._rank:
            self._others[rank, key].join(stream)

    def close(self) -> None:
        """Close the windows and marks of the other ranks; no work uses them any more.

        A second call does nothing.
        """
        for mark in self._others.values():
            mark.close()
        self._others.clear()
        for rank, address in enumerate(self.addresses):
            if address and rank != self._rank:
                close_memory(address)
        self.addresses = []

    def free(self) -> None:
        """Free this rank's window, which all other ranks have closed."""
        self.memory = None

    def abandon(self) -> None:
        """Let go of everything, without freeing what others may read."""
        # Another rank may have opened the next window already.
        _abandoned.append((self.memory, self._spare, self._own))
        self.memory, self._spare = None, None
        self._own, self._others, self.addresses = {}, {}, []
