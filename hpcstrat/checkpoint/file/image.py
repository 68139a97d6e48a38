"""Memory in which blocks of a file are assembled before they are written."""

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

# Ask for large pages, and for zeros in child processes (18 is MADV_WIPEONFORK of
# madvise(2), which Python does not name). If a child process shared the pages, the next
# write of this process would go to new pages, but a GPU would still write to the old
# (page-locked) pages, so that a block would lose the GPU's bytes.
_ADVICE = (mmap.MADV_HUGEPAGE, 18)


class Source(Protocol):
    """Protocol for the bytes of a dataset that this replica writes; arrays conform."""

    def __getitem__(self, source: slice, /) -> Array:
        """Return the bytes of the `Piece` that has this ``source``."""


class Elsewhere(Source, Protocol):
    """A value in other processes' memory; only the main thread may copy its bytes."""

    shape: tuple[int, ...]

    def write_bytes(self, start: int, data: Array) -> None:
        """Write ``data`` to the value's bytes from offset ``start``."""


def is_elsewhere(value: Any) -> TypeGuard[Elsewhere]:
    """Return whether a value is in the memory of other processes (`Elsewhere`)."""
    # An isinstance check of the protocol would take 30 times as long.
    return hasattr(value, "write_bytes")


class ImageMemory:
    """Memory for one image at a time, kept for the next image until `release`.

    Memory is kept because the first access to a new page can take longer than I/O.
    """

    def __init__(self) -> None:
        self._region: _Region | None = None
        # Offset of the first byte that the kernel may reclaim.
        self._lent_from = 0

    def image(self, num_slots: int, slot_bytes: int) -> Image:
        """Return an image with arbitrary content; earlier images become invalid."""
        nbytes = num_slots * slot_bytes
        if self._region is None or self._region.bytes.size < nbytes:
            self.release()
            self._region = _Region(nbytes)
            self._lent_from = nbytes
        self._take_back(nbytes)
        return Image(num_slots, slot_bytes, self._region)

    def _take_back(self, nbytes: int) -> None:
        """Keep the kernel from reclaiming the first ``nbytes`` bytes."""
        if self._lent_from < nbytes and self._region is not None:
            # Write to each page: before Linux 5.18, the kernel may reclaim a page that
            # only a direct read has filled.
            self._region.bytes[self._lent_from : nbytes : mmap.PAGESIZE] = 0
            self._lent_from = nbytes

    def lend(self) -> None:
        """Let the kernel reclaim pages when it needs memory; images become invalid.

        Memory with locked pages is excluded: data that a GPU writes would be lost.
        """
        region = self._region
        if region is not None and not region.unlocks:
            with contextlib.suppress(OSError):
                region.map.madvise(mmap.MADV_FREE)
                self._lent_from = 0

    def release(self) -> None:
        """Free the memory in a thread, as freeing takes long; images become invalid."""
        if self._region is not None:
            self._region.unlock()
        # The thread drops the last reference to the memory, unless an image has one.
        held = [self._region]
        self.leave()
        with contextlib.suppress(RuntimeError):
            # If the system refuses another thread, this thread frees the memory.
            threading.Thread(target=held.clear, daemon=True).start()

    def leave(self) -> None:
        """Forget the memory without freeing it, because threads may still use it."""
        self._region, self._lent_from = None, 0


def _pages(nbytes: int) -> mmap.mmap:
    """Return new memory that is aligned to a page."""
    # Use private memory: few systems allow large pages in shared memory, and direct
    # reads into small pages are half as fast.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in _ADVICE:
        # Some kernels do not support the advice.
        with contextlib.suppress(OSError):
            memory.madvise(advice)
    return memory


class _Region:
    """Page-aligned memory, cut into places for blocks; each place can be page-locked.

    A place is locked when a GPU first copies to it, because locking is slow, and copies
    to other places can run meanwhile. All places are unlocked together.
    """

    def __init__(self, nbytes: int) -> None:
        self.map = _pages(nbytes)
        self.bytes: Array = np.frombuffer(self.map, np.uint8)
        # The function that unlocks each locked place, by the index of the place.
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
        """Page-lock a place; return False if the system refuses to lock memory."""
        if index not in self.unlocks and not self._refused:
            unlock = lock_pages(self, self.place(index))
            if unlock is None:
                self._refused = True
            else:
                self.unlocks[index] = unlock
        return index in self.unlocks

    def unlock(self) -> None:
        """Unlock all pages; call this before the memory is freed."""
        while self.unlocks:
            self.unlocks.popitem()[1]()


class Image:
    """Memory for ``num_slots`` blocks, page-aligned, as direct I/O requires.

    ``slot_bytes`` is a multiple of a page. Without ``region``, new memory is used.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, region: _Region | None = None
    ) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self._region = _Region(num_slots * slot_bytes) if region is None else region
        self._region.cut(slot_bytes)

    def slot(self, index: int) -> Array:
        """Return the ``slot_bytes`` bytes of a place, as a view."""
        return self._region.place(index)

    def lock(self, index: int) -> bool:
        """Page-lock a place until the memory is freed; return False on failure."""
        return self._region.lock(index)


def as_bytes(value: Array) -> Array:
    """Return the bytes of a value as they are stored: little-endian, in C order.

    The result is on the value's device. No copy is made if the value has this form.
    """
    if is_device(value):
        # Values on GPUs are little-endian already.
        flat: Array = array_module(value).ascontiguousarray(value).reshape(-1)
        return flat.view(np.uint8)
    if dtype_name(value.dtype) == "bfloat16":
        # NumPy has no byte orders for bfloat16.
        value = np.ascontiguousarray(value).view(np.uint16)
    little: Array = value.astype(value.dtype.newbyteorder("<"), "C", copy=False)
    return little.reshape(-1).view(np.uint8)


def fill(
    slot: Array, plan: FileLayout, block: int, values: Mapping[str, Source]
) -> list[tuple[Array, Array]]:
    """Write a block into ``slot``: its parts of ``values``, and zeros between them.

    ``slot`` may be longer than the block. Parts in the memory of a GPU are not copied:
    the caller must copy each of the returned pairs, from the first array (on the GPU)
    to the second array (a view of the slot).
    """
    done, missing = 0, []
    for piece in plan.pieces(block):
        # The format requires zeros between values.
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
