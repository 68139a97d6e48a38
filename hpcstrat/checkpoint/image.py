"""Memory in which blocks of a file are put together before they are written."""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from hpcstrat.checkpoint.plan import Plan
from hpcstrat.typing import Array

__all__ = ["Image", "Memory", "Source", "as_bytes", "fill"]

# Large pages; and children have zeros there: to share the pages with them would have
# this process copy each of them when it writes to it again.
_ADVICE: tuple[int, ...] = ()
if sys.platform == "linux":
    # madvise(2): MADV_WIPEONFORK, of which Python has no name.
    _ADVICE = (mmap.MADV_HUGEPAGE, 18)


class Source(Protocol):
    """What has the bytes of a dataset that this replica writes; an array has all."""

    def __getitem__(self, source: slice, /) -> Array:
        """Return the bytes of a piece.

        Not collective.

        Parameters
        ----------
        source : slice
            That of a `Piece`.

        Returns
        -------
        ndarray of uint8
            As many.
        """


class Memory:
    """Memory for images, one at a time.

    It comes from the system and stays until it is released, so that pages are touched
    for the first time once only: that can take longer than to read or to write them.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._bytes: Array = np.empty(0, np.uint8)
        # From which byte on the system may take pages away.
        self._lent_from = 0

    def image(self, num_slots: int, slot_bytes: int) -> Image:
        """Return an image; the one before is not valid any more.

        Not collective.

        Parameters
        ----------
        num_slots : int
            How many blocks it holds; at least 1.
        slot_bytes : int
            Size of each; a multiple of a page.

        Returns
        -------
        Image
            With any content.
        """
        nbytes = num_slots * slot_bytes
        if self._bytes.size < nbytes:
            self.release()
            self._map = _pages(nbytes)
            self._bytes = np.frombuffer(self._map, np.uint8)
            self._lent_from = self._bytes.size
        if self._lent_from < nbytes:
            # Before Linux 5.18, a page that only the disk has written to since could
            # still be taken away.
            self._bytes[self._lent_from : nbytes : mmap.PAGESIZE] = 0
            self._lent_from = nbytes
        return Image(num_slots, slot_bytes, self._bytes)

    def lend(self) -> None:
        """Let the system take pages away if it needs them; no image is valid.

        Not collective. Those that it has not taken are used again.
        """
        if self._map is not None and hasattr(mmap, "MADV_FREE"):
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_FREE)
                self._lent_from = 0

    def release(self) -> None:
        """Give the memory back, in a thread, as that takes long; no image is valid.

        Not collective.
        """
        held = [self._map, self._bytes]
        self.leave()
        with contextlib.suppress(RuntimeError):
            # Where the system gives no more threads, it goes here.
            threading.Thread(target=held.clear, daemon=True).start()

    def leave(self) -> None:
        """Leave the memory to an image that may still be used.

        Not collective.
        """
        self._map, self._bytes, self._lent_from = None, np.empty(0, np.uint8), 0


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


class Image:
    """Places for blocks, each on a page of its own, as direct reads and writes ask.

    Parameters
    ----------
    num_slots : int
        How many blocks it holds; at least 1.
    slot_bytes : int
        Size of each; a multiple of a page.
    memory : ndarray of uint8, optional
        Where; default: memory of its own.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, memory: Array | None = None
    ) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        if memory is None:
            memory = np.frombuffer(_pages(num_slots * slot_bytes), np.uint8)
        self._bytes = memory

    def slot(self, index: int) -> Array:
        """Return a place.

        Not collective.

        Parameters
        ----------
        index : int
            From 0.

        Returns
        -------
        ndarray of uint8 of shape (slot_bytes,)
            A view.
        """
        start = index * self.slot_bytes
        return self._bytes[start : start + self.slot_bytes]


def as_bytes(value: Array) -> Array:
    """Return a value as it is stored: little-endian, in C order.

    Not collective.

    Parameters
    ----------
    value : ndarray
        Of any shape.

    Returns
    -------
    ndarray of uint8 of shape (nbytes,)
        A view where the value is stored that way already.
    """
    if value.dtype.name == "bfloat16":
        # NumPy knows no byte orders of it.
        value = np.ascontiguousarray(value).view(np.uint16)
    little: Array = value.astype(value.dtype.newbyteorder("<"), "C", copy=False)
    return little.reshape(-1).view(np.uint8)


def fill(slot: Array, plan: Plan, block: int, values: Mapping[str, Source]) -> None:
    """Put a block together: the values that lie in it, and zeros between them.

    Not collective.

    Parameters
    ----------
    slot : ndarray of uint8
        At least as long as the block; overwritten.
    plan : Plan
        The layout.
    block : int
        Its number.
    values : mapping of str to Source
        Such as from `as_bytes`, by path.
    """
    done = 0
    for piece in plan.pieces(block):
        slot[done : piece.place.start] = 0
        slot[piece.place] = values[piece.path][piece.source]
        done = piece.place.stop
    start, stop = plan.span(block)
    slot[done : stop - start] = 0
