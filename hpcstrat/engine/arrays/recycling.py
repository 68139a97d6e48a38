"""Arrays for results, in memory that is used again once nobody holds the old result.

Fresh memory of more than a few pages costs more, in page faults, than the sum that is
written into it. A program that drops its gradients before the next step, as training
loops do, gets the same memory every time.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.typing import Array

__all__ = ["DeviceRecycler", "Recycler"]

_SMALLEST_BYTES = 32 << 10
_LIMIT_BYTES = 256 << 20
_LIMIT_DEVICE_BYTES = 1 << 30
_ALIGNMENT_BYTES = 64


class Recycler:
    """Makes arrays, and keeps hold of up to ``limit_bytes`` of their memory."""

    def __init__(self, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        # Without the interpreter lock reference counts say less.
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            self._limit_bytes = 0
        # Blocks by their size; the sizes asked for last at the end.
        self._blocks: OrderedDict[int, list[Array]] = OrderedDict()
        self._kept_bytes = 0
        self._unused = _holders([np.empty(1, np.uint8)], 0)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array with any content, in C order.

        No other caller gets its memory while a view of it lives.
        """
        array: Array
        nbytes = math.prod(shape) * dtype.itemsize
        if not _SMALLEST_BYTES <= nbytes <= self._limit_bytes:
            array = np.empty(shape, dtype)
            return array
        block = self._block(nbytes)
        start = -block.ctypes.data % _ALIGNMENT_BYTES
        array = block[start : start + nbytes].view(dtype).reshape(shape)
        return array

    def arrays(
        self, kinds: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
    ) -> list[Array]:
        """Return several arrays as from `empty`, of these shapes and types."""
        arrays = []
        for shape, dtype in kinds:
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes < _SMALLEST_BYTES:
                arrays.append(np.empty(shape, dtype))
            else:
                arrays.append(self.empty(shape, dtype))
        return arrays

    def _block(self, nbytes: int) -> Array:
        blocks = self._blocks.setdefault(nbytes, [])
        self._blocks.move_to_end(nbytes)
        for _ in range(len(blocks)):
            # All views of a block's memory count as references to the block.
            if _holders(blocks, 0) == self._unused:
                return blocks[0]
            # Blocks in use go to the end, so that the next search does not begin there.
            blocks.append(blocks.pop(0))
        block = np.empty(nbytes + _ALIGNMENT_BYTES, np.uint8)
        while self._kept_bytes + nbytes > self._limit_bytes and len(self._blocks) > 1:
            size, forgotten = self._blocks.popitem(last=False)
            self._kept_bytes -= size * len(forgotten)
        if self._kept_bytes + nbytes <= self._limit_bytes:
            self._kept_bytes += nbytes
            blocks.append(block)
        return block


def _holders(blocks: list[Array], index: int) -> int:
    """Count the references to a block."""
    return sys.getrefcount(blocks[index])


class DeviceRecycler:
    """Makes arrays on this thread's GPU, and keeps hold of up to ``limit_bytes``.

    CuPy's pool has memory at hand, but making an array takes a microsecond or two, and
    a model has hundreds of gradients. Arrays of a call that nobody holds any longer
    become the results of its next repetition. They are written in the order of the
    program's stream, after all earlier work on them.
    """

    def __init__(self, limit_bytes: int = _LIMIT_DEVICE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            self._limit_bytes = 0
        # The calls made last at the end.
        self._kept: OrderedDict[Hashable, list[Array]] = OrderedDict()
        # Reference counts of an array that only this object uses, once known.
        self._unused: tuple[int, int, int] | None = None

    def arrays(
        self,
        key: Hashable,
        kinds: Sequence[tuple[tuple[int, ...], np.dtype[Any]]],
        module: Any,
    ) -> list[Array]:
        """Return arrays with any content, in C order, for the call that ``key`` names.

        The kinds are the same for the same key. The arrays belong to their caller alone
        as long as it, or a view, holds them. ``module`` is ``cupy``.
        """
        # Memory is used again in the order of the stream that used it before.
        key = key, module.cuda.get_current_stream().ptr
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            for index, (shape, _) in enumerate(kinds):
                # A program can change the shape of an array.
                whole = kept[index].shape == shape and kept[index].flags.c_contiguous
                if not whole or _device_holders(kept, index) != self._unused:
                    break
            else:
                return list(kept)
        if self._unused is None:
            self._unused = _device_holders([module.empty(1, np.uint8)], 0)
        made = list[Array]()
        with contextlib.suppress(MemoryError):
            made = [module.empty(shape, dtype) for shape, dtype in kinds]
        if len(made) < len(kinds):
            # The memory that is missing may be kept here.
            kept = None
            self.clear()
            made = [module.empty(shape, dtype) for shape, dtype in kinds]
        self._kept[key] = list(made)
        used = 0
        for other in reversed(list(self._kept)):
            used += sum(array.nbytes for array in self._kept[other])
            if used > self._limit_bytes:
                del self._kept[other]
        return made

    def clear(self) -> None:
        """Let go of all arrays."""
        self._kept.clear()


def _device_holders(arrays: list[Any], index: int) -> tuple[int, int, int]:
    """Count the references to an array of CuPy, to its pointer, and to its memory.

    Some views, such as those of ``as_strided``, hold the pointer, not the array.
    """
    return (
        sys.getrefcount(arrays[index]),
        sys.getrefcount(arrays[index].data),
        sys.getrefcount(arrays[index].data.mem),
    )
