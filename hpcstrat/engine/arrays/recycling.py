"""Arrays for results, in memory that is reused once nothing refers to the old result.

The page faults of a new array of more than a few pages take longer than the sum that is
written into it. A program that drops its gradients before the next step, as training
loops do, gets the same memory in every step.
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

__all__ = ["DeviceRecycler", "Recycler", "is_unused"]

_SMALLEST_BYTES = 32 << 10
_LIMIT_BYTES = 256 << 20
_LIMIT_DEVICE_BYTES = 1 << 30
_ALIGNMENT_BYTES = 64


class Recycler:
    """Allocates arrays, and keeps up to ``limit_bytes`` of their memory for reuse."""

    def __init__(self, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes if _UNUSED else 0
        # Blocks by size; the most recently requested size is last.
        self._blocks: OrderedDict[int, list[Array]] = OrderedDict()
        self._kept_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialized array in C order.

        The array's memory is not reused while the array or a view of it exists.
        """
        array: Array
        nbytes = math.prod(shape) * dtype.itemsize
        if not _SMALLEST_BYTES <= nbytes <= self._limit_bytes:
            array = np.empty(shape, dtype)
            return array
        array = self._block(nbytes).view(dtype).reshape(shape)
        return array

    def arrays(
        self, kinds: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
    ) -> list[Array]:
        """Return several uninitialized arrays of these shapes and dtypes."""
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
            if is_unused(blocks, 0):
                return blocks[0]
            # Move blocks in use to the end, where the next search looks last.
            blocks.append(blocks.pop(0))
        whole = np.empty(nbytes + _ALIGNMENT_BYTES, np.uint8)
        start = -whole.ctypes.data % _ALIGNMENT_BYTES
        block = whole[start : start + nbytes]
        while self._kept_bytes + nbytes > self._limit_bytes and len(self._blocks) > 1:
            size, forgotten = self._blocks.popitem(last=False)
            self._kept_bytes -= size * len(forgotten)
        if self._kept_bytes + nbytes <= self._limit_bytes:
            self._kept_bytes += nbytes
            blocks.append(block)
        return block


def _holders(blocks: list[Array], index: int) -> tuple[int, int]:
    """Return the reference counts of a view and of the memory that all views share."""
    return sys.getrefcount(blocks[index]), sys.getrefcount(blocks[index].base)


# Without the interpreter lock, reference counts do not show unused memory.
_UNUSED: tuple[int, int] | None = None
if getattr(sys, "_is_gil_enabled", lambda: True)():
    _UNUSED = _holders([np.empty(1, np.uint8)[:]], 0)


def is_unused(blocks: list[Array], index: int) -> bool:
    """Return whether only the list refers to ``blocks[index]``, a view of memory.

    False if another view of this memory exists.
    """
    return _holders(blocks, index) == _UNUSED


class DeviceRecycler:
    """Allocates arrays on this thread's GPU, and keeps up to ``limit_bytes`` for reuse.

    CuPy's pool keeps memory ready, but creating an array takes a microsecond or two,
    and a model has hundreds of gradients. When nothing refers to the arrays of a call
    any longer, the next repetition of the call returns the same arrays. In the
    program's stream, new results are written after all earlier work on these arrays.
    """

    def __init__(self, limit_bytes: int = _LIMIT_DEVICE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            self._limit_bytes = 0
        # Arrays by the key of their reduction; the most recent reduction is last.
        self._kept: OrderedDict[Hashable, list[Array]] = OrderedDict()
        # Reference counts of an array that only this object refers to; None until
        # measured.
        self._unused: tuple[int, int, int] | None = None

    def arrays(
        self,
        key: Hashable,
        kinds: Sequence[tuple[tuple[int, ...], np.dtype[Any]]],
        module: Any,
    ) -> list[Array]:
        """Return arrays for the results of the reduction that ``key`` identifies.

        Returns the arrays of the reduction's last run if nothing else refers to them,
        or else new arrays; they are uninitialized, and in C order. The same key must
        always have the same ``kinds``. ``module`` is ``cupy``.
        """
        # Reuse memory only on its former stream, which orders the old and the new work.
        key = key, module.cuda.get_current_stream().ptr
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            for index, (shape, _) in enumerate(kinds):
                # The program may have changed the shape of an array in place.
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
            # The kept arrays may occupy the missing memory.
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
        """Drop all kept arrays."""
        self._kept.clear()


def _device_holders(arrays: list[Any], index: int) -> tuple[int, int, int]:
    """Return the reference counts of a CuPy array, of its pointer, and of its memory.

    Some views, such as views from ``as_strided``, refer to the pointer, not the array.
    """
    return (
        sys.getrefcount(arrays[index]),
        sys.getrefcount(arrays[index].data),
        sys.getrefcount(arrays[index].data.mem),
    )
