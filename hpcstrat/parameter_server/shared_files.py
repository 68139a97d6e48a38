"""Arrays in memory of a server that other processes of the node can read.

The arrays are in anonymous files (memfd), which other processes open by ``/proc`` and
which end with the server's process. In front of each array is its version, a number
that is odd during a write. If a reader finds the same even version before and after its
copy, the copy has no half-made update. This works only if stores become visible in
program order, as on x86-64; on other processors servers send values in messages.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcstrat.engine.typing import Array

_HEAD_BYTES = 64
_POOL_BYTES = 4 << 20
_POOLED_BYTES = 256 << 10
_TRIES = 100


class FilePlace(NamedTuple):
    """The location of a shared array: process, file and offset."""

    pid: int
    number: int
    descriptor: int
    file_bytes: int
    offset: int


class SharedFiles:
    """Allocates arrays in files that other processes map; small arrays share a file."""

    def __init__(self) -> None:
        self._num_files = 0
        self._pool: tuple[mmap.mmap, int, int] | None = None
        self._pool_used = _POOL_BYTES

    def allocate(
        self, shape: tuple[int, ...], dtype: Any
    ) -> tuple[Array, Array, FilePlace]:
        """Return a new array, its version (an array of one number), and its location.

        A file is closed when its last array is deleted; readers keep their mappings.
        """
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        span = _HEAD_BYTES + nbytes + -nbytes % _HEAD_BYTES
        if span > _POOLED_BYTES:
            memory, number, descriptor = self._file(span)
            offset, size = 0, span
        else:
            if self._pool is None or self._pool_used + span > _POOL_BYTES:
                self._pool, self._pool_used = self._file(_POOL_BYTES), 0
            memory, number, descriptor = self._pool
            offset, size = self._pool_used, _POOL_BYTES
            self._pool_used += span
        version = np.frombuffer(memory, np.int64, 1, offset)
        count = math.prod(shape)
        array = np.frombuffer(memory, dtype, count, offset + _HEAD_BYTES).reshape(shape)
        return array, version, FilePlace(os.getpid(), number, descriptor, size, offset)

    def close(self) -> None:
        """Release the file for small arrays, which is closed with its last array."""
        self._pool = None

    def _file(self, nbytes: int) -> tuple[mmap.mmap, int, int]:
        descriptor = os.memfd_create("hpcstrat-shards")
        os.ftruncate(descriptor, nbytes)
        self._num_files += 1
        memory = mmap.mmap(descriptor, nbytes)
        weakref.finalize(memory, os.close, descriptor)
        return memory, self._num_files, descriptor


class _MappedFile:
    """A server's file, mapped read-only into this process."""

    def __init__(self, place: FilePlace) -> None:
        path = f"/proc/{place.pid}/fd/{place.descriptor}"
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.map = mmap.mmap(handle, place.file_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(handle)


class Reader:
    """An array of a server, mapped into another process of its node."""

    def __init__(
        self, file: _MappedFile, place: FilePlace, shape: Any, dtype: Any
    ) -> None:
        self._file = file
        count, start = math.prod(shape), place.offset + _HEAD_BYTES
        self._start = start
        self._version = np.frombuffer(file.map, np.int64, 1, place.offset)
        self._array = np.frombuffer(file.map, dtype, count, start).reshape(shape)

    def read(self, copy: Callable[[Array], Any]) -> Any:
        """Call ``copy`` on the array between two updates, and return its result.

        Return None if updates are so frequent that no try succeeds.
        """
        version, array = self._version, self._array
        for _ in range(_TRIES):
            before = int(version[0])
            if not before & 1:
                result = copy(array)
                if version[0] == before:
                    return result
            os.sched_yield()
        return None

    def read_bytes(self, start: int, stop: int) -> Any:
        """Return a copy of some bytes of the array, or None, as in `read`."""

        def copy(array: Array) -> Array:
            return array.reshape(-1).view(np.uint8)[start:stop].copy()

        try:
            return self.read(copy)
        finally:
            # Drop the pages of this piece; else reading a large array in pieces would
            # keep all of its pages in this process.
            begin = self._start + start
            begin -= begin % mmap.PAGESIZE
            end = self._start + stop
            self._file.map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


class Readers:
    """The files of servers that this process has mapped."""

    def __init__(self) -> None:
        self._files: weakref.WeakValueDictionary[tuple[int, int], _MappedFile] = (
            weakref.WeakValueDictionary()
        )

    def reader(self, place: FilePlace, shape: Any, dtype: Any) -> Reader | None:
        """Return a reader of a server's array; None if this process cannot map it."""
        if platform.machine() not in ("x86_64", "AMD64"):
            return None
        key = place.pid, place.number
        file = self._files.get(key)
        try:
            if file is None:
                file = self._files[key] = _MappedFile(place)
        except (OSError, ValueError):
            return None
        return Reader(file, place, shape, dtype)
