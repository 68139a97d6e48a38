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

    Not collective.

    Parameters
    ----------
    rank : int
        This rank.
    size : int
        How many there are.
    keys : sequence of hashable
        Under which each rank has a shared mark.

    Attributes
    ----------
    memory : cupy.ndarray of shape (n,) or None
        Bytes of this rank's window.
    addresses : list of int
        Where the windows of all ranks lie in this process; empty while they are closed.
    """

    def __init__(self, rank: int, size: int, keys: Sequence[Any]) -> None:
        self.memory: Any = None
        self.addresses: list[int] = []
        self._rank, self._size, self._keys = rank, size, keys
        self._spare: Any = None
        self._own: dict[Any, Mark] = {}
        self._others: dict[tuple[int, Any], ForeignMark] = {}

    def allocate(self, nbytes: int) -> None:
        """Allocate the next window, beside the one that is open.

        Not collective.

        Parameters
        ----------
        nbytes : int
            How much is needed at least.

        Raises
        ------
        cupy.cuda.runtime.CUDARuntimeError
            If there is not as much.
        """
        if self._spare is None or self._spare.nbytes < nbytes:
            self._spare = None
            self._spare = shareable_memory(nbytes)

    def described(self) -> tuple[Array, str]:
        """Return what the other ranks need to open the next window.

        Not collective.

        Returns
        -------
        ndarray of shape (n,)
            Bytes, as many on each rank; all of them zero where there is a problem.
        str
            What went wrong; empty if nothing did.
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
        """Open the next windows of all ranks; this rank's becomes the current one.

        Not collective. No window is open; `close` closes them also after a failure.

        Parameters
        ----------
        records : ndarray of shape (ranks, n)
            What each rank has described. A rank without handles is left out.

        Returns
        -------
        str
            What went wrong; empty if nothing did.
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
        """Record a mark of this rank.

        Not collective.

        Parameters
        ----------
        key : hashable
            Which.
        stream : cupy.cuda.Stream
            At the end of what it has been given so far.
        """
        self._own[key].record(stream)

    def join(self, rank: int, key: Any, stream: Any) -> None:
        """Let a stream wait for a mark of a rank; for this rank's own it does not.

        Not collective; the host does not wait.

        Parameters
        ----------
        rank : int
            Whose.
        key : hashable
            Which.
        stream : cupy.cuda.Stream
            On which this rank's own mark was recorded, too.
        """
        if rank != self._rank:
            self._others[rank, key].join(stream)

    def close(self) -> None:
        """Close the windows and marks of the other ranks; no work uses them any more.

        Not collective. A second call does nothing.
        """
        for mark in self._others.values():
            mark.close()
        self._others.clear()
        for rank, address in enumerate(self.addresses):
            if address and rank != self._rank:
                close_memory(address)
        self.addresses = []

    def free(self) -> None:
        """Free this rank's window, which all other ranks have closed.

        Not collective.
        """
        self.memory = None

    def abandon(self) -> None:
        """Let go of everything, without freeing what others may read.

        Not collective.
        """
        # Another rank may have opened the next window already.
        _abandoned.append((self.memory, self._spare, self._own))
        self.memory, self._spare = None, None
        self._own, self._others, self.addresses = {}, {}, []
