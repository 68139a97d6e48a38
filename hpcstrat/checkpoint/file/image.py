"""Memory in which blocks of a file are put together before they are written."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeGuard

import numpy as np

from hpcstrat.checkpoint.file.extents import FileLayout
from hpcstrat.checkpoint.file.schema import dtype_name
from hpcstrat.engine.arrays.kinds import array_module, is_device
from hpcstrat.engine.gpu.transfers import lock_pages
from hpcstrat.engine.typing import Array

__all__ = [
    "Elsewhere",
    "Image",
    "ImageMemory",
    "Source",
    "as_bytes",
    "fill",
    "is_elsewhere",
]

# Ask for large pages, and for zeros in child processes (MADV_WIPEONFORK of madvise(2),
# which Python does not name). Shared with a child, each page would be copied when it is
# written to, and a GPU with locked pages would go on with the old ones.
_ADVICE = (mmap.MADV_HUGEPAGE, 18)


class Source(Protocol):
    """The bytes of a dataset that this replica writes; an array has all."""

    def __getitem__(self, source: slice, /) -> Array:
        """Return the bytes of the `Piece` that has this ``source``."""


class Elsewhere(Source, Protocol):
    """A value in other processes; its bytes are moved by the main thread alone."""

    shape: tuple[int, ...]

    def write_bytes(self, start: int, data: Array) -> None:
        """Replace bytes of the value, from one on."""


def is_elsewhere(value: Any) -> TypeGuard[Elsewhere]:
    """Whether a value lies in other processes."""
    # The check of a protocol takes 30 times as long.
    return hasattr(value, "write_bytes")


class ImageMemory:
    """Memory for one image at a time.

    It is kept until it is released: the first touch of a page can take longer than to
    read or to write it.
    """

    def __init__(self) -> None:
        self._region: _Region | None = None
        # The first byte of the pages that the system may take away.
        self._lent_from = 0

    def image(self, num_slots: int, slot_bytes: int) -> Image:
        """Return an image with any content; the one before is not valid any more."""
        nbytes = num_slots * slot_bytes
        if self._region is None or self._region.bytes.size < nbytes:
            self.release()
            self._region = _Region(nbytes)
            self._lent_from = nbytes
        self._take_back(nbytes)
        return Image(num_slots, slot_bytes, self._region)

    def _take_back(self, nbytes: int) -> None:
        """Keep the system from taking away the first bytes."""
        if self._lent_from < nbytes and self._region is not None:
            # A write keeps a page: before Linux 5.18, direct reads into it do not.
            self._region.bytes[self._lent_from : nbytes : mmap.PAGESIZE] = 0
            self._lent_from = nbytes

    def lend(self) -> None:
        """Let the system take pages away if it needs them; no image is valid.

        It cannot take locked pages: they would lose what a GPU writes to them.
        """
        region = self._region
        if region is not None and not region.unlocks:
            with contextlib.suppress(OSError):
                region.map.madvise(mmap.MADV_FREE)
                self._lent_from = 0

    def release(self) -> None:
        """Give the memory back, in a thread, as that takes long; no image is valid."""
        if self._region is not None:
            self._region.unlock()
        # The thread drops the last reference, unless an image still has one.
        held = [self._region]
        self.leave()
        with contextlib.suppress(RuntimeError):
            # If the system gives no more threads, this thread frees it.
            threading.Thread(target=held.clear, daemon=True).start()

    def leave(self) -> None:
        """Leave the memory to an image that may still be used."""
        self._region, self._lent_from = None, 0


def _pages(nbytes: int) -> mmap.mmap:
    """Return memory that begins on a page."""
    # Private, as few systems allow large pages in shared memory: disks read half as
    # fast into small ones.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in _ADVICE:
        # Some kernels do not know the advice.
        with contextlib.suppress(OSError):
            memory.madvise(advice)
    return memory


class _Region:
    """Memory that begins on a page; its locked pages are unlocked with it.

    Each place is locked when a GPU first copies to it, so that copies go on meanwhile.
    """

    def __init__(self, nbytes: int) -> None:
        self.map = _pages(nbytes)
        self.bytes: Array = np.frombuffer(self.map, np.uint8)
        # Functions that unlock, by the number of a place.
        self.unlocks: dict[int, Callable[[], Any]] = {}
        self._slot_bytes = 0
        self._refused = False

    def cut(self, slot_bytes: int) -> None:
        """Change the size of places; no place may be in use."""
        if slot_bytes != self._slot_bytes:
            self.unlock()
            self._slot_bytes = slot_bytes

    def place(self, index: int) -> Array:
        """Return the bytes of a place."""
        start = index * self._slot_bytes
        return self.bytes[start : start + self._slot_bytes]

    def lock(self, index: int) -> bool:
        """Lock the pages of a place; whether they are, which the system may refuse."""
        if index not in self.unlocks and not self._refused:
            unlock = lock_pages(self, self.place(index))
            if unlock is None:
                self._refused = True
            else:
                self.unlocks[index] = unlock
        return index in self.unlocks

    def unlock(self) -> None:
        """Unlock the pages: memory must not go back to the system before."""
        while self.unlocks:
            self.unlocks.popitem()[1]()


class Image:
    """Places for blocks, each on a page of its own, as direct reads and writes ask.

    ``slot_bytes`` is a multiple of a page. Without a region it has its own memory.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, region: _Region | None = None
    ) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self._region = _Region(num_slots * slot_bytes) if region is None else region
        self._region.cut(slot_bytes)

    def slot(self, index: int) -> Array:
        """Return a view of a place, of ``slot_bytes`` bytes."""
        return self._region.place(index)

    def lock(self, index: int) -> bool:
        """Let a GPU write to a place by itself; return whether the system allows it.

        The pages stay locked until the memory is given back.
        """
        return self._region.lock(index)


def as_bytes(value: Array) -> Array:
    """Return a value as it is stored: its bytes, little-endian, in C order.

    It is a view where that is so already, and stays on its device.
    """
    if is_device(value):
        # GPUs are little-endian.
        flat: Array = array_module(value).ascontiguousarray(value).reshape(-1)
        return flat.view(np.uint8)
    if dtype_name(value.dtype) == "bfloat16":
        # NumPy knows no byte orders of it.
        value = np.ascontiguousarray(value).view(np.uint16)
    little: Array = value.astype(value.dtype.newbyteorder("<"), "C", copy=False)
    return little.reshape(-1).view(np.uint8)


def fill(
    slot: Array, plan: FileLayout, block: int, values: Mapping[str, Source]
) -> list[tuple[Array, Array]]:
    """Put a block together: the values that lie in it, by path, and zeros between them.

    ``slot`` may be longer. Returns pairs that the caller is still to copy: parts in the
    memory of a GPU, and the views of the slot for them.
    """
    done, missing = 0, []
    for piece in plan.pieces(block):
        # The format wants zeros between values.
        slot[done : piece.place.start] = 0
        part = values[piece.path][piece.source]
        if is_device(part):
            missing.append((part, slot[piece.place]))
        else:
            slot[piece.place] = part
        done = piece.place.stop
    start, stop = plan.span(block)
    slot[done : stop - start] = 0
    return missing
