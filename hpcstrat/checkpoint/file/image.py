"""Memory in which blocks of a file are put together before they are written."""

from __future__ import annotations

import contextlib
import mmap
import sys
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

# Large pages; and children have zeros there: to share the pages with them would have
# this process copy each of them when it writes to it again, while a GPU that pages are
# locked for would go on with the old ones.
_ADVICE: tuple[int, ...] = ()
if sys.platform == "linux":
    # madvise(2): MADV_WIPEONFORK, of which Python has no name.
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
    # To compare all of a protocol takes 30 times as long, for each of many variables.
    return hasattr(value, "write_bytes")


class ImageMemory:
    """Memory for images, one at a time.

    It comes from the system and stays until it is released, so that pages are touched
    for the first time once only: that can take longer than to read or to write them.
    """

    def __init__(self) -> None:
        self._region: _Region | None = None
        # From which byte on the system may take pages away.
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
        """Have the first bytes stay, whatever the system needs."""
        if self._lent_from < nbytes and self._region is not None:
            # Before Linux 5.18, a page that only the disk has written to since could
            # still be taken away.
            self._region.bytes[self._lent_from : nbytes : mmap.PAGESIZE] = 0
            self._lent_from = nbytes

    def lend(self) -> None:
        """Let the system take pages away if it needs them; no image is valid.

        Those that it has not taken are used again. It cannot take pages that are
        locked: what a GPU writes to them would not keep them, either.
        """
        region = self._region
        if region is not None and not region.unlocks and hasattr(mmap, "MADV_FREE"):
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
            # This thread frees it where the system gives no more threads.
            threading.Thread(target=held.clear, daemon=True).start()

    def leave(self) -> None:
        """Leave the memory to an image that may still be used."""
        self._region, self._lent_from = None, 0


def _pages(nbytes: int) -> mmap.mmap:
    """Return memory that begins on a page."""
    # Without the flags it would be shared memory, which few systems let have large
    # pages: into small ones that are scattered, a disk reads half as fast.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in _ADVICE:
        # Not all kernels have it.
        with contextlib.suppress(OSError):
            memory.madvise(advice)
    return memory


class _Region:
    """Memory that begins on a page; unlocked with the last image that is in it.

    Pages are locked place by place, each when a GPU first copies to it: the copies to
    one go on while the next is locked, which can take as long.
    """

    def __init__(self, nbytes: int) -> None:
        self.map = _pages(nbytes)
        self.bytes: Array = np.frombuffer(self.map, np.uint8)
        # By the number of a place.
        self.unlocks: dict[int, Callable[[], Any]] = {}
        self._slot_bytes = 0
        self._refused = False

    def cut(self, slot_bytes: int) -> None:
        """Have places of another size; no place may be in use."""
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

    ``slot_bytes`` is a multiple of a page. Without a region it has memory of its own.
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
        """Have a GPU write to a place by itself; whether the system lets it.

        The pages stay locked until the memory is given back: to lock them can take
        longer than to copy.
        """
        return self._region.lock(index)


def as_bytes(value: Array) -> Array:
    """Return a value as it is stored: its bytes, little-endian, in C order.

    A view where the value is stored that way already; on the device where it is.
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

    ``slot`` may be longer than the block. Returns the parts that are in the memory of a
    GPU, each with the view of the slot into which the caller is still to copy it.
    """
    done, missing = 0, []
    for piece in plan.pieces(block):
        # Zeros, as the format says, and nothing of an earlier block.
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
