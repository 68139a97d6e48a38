"""Tests whether the input and output arrays of a reduction share memory."""

from __future__ import annotations

import itertools
import math
import types
from typing import Any

import numpy as np
from numpy.exceptions import TooHardError
from numpy.lib.array_utils import byte_bounds

from hpcstrat.engine.arrays.kinds import array_module, is_device
from hpcstrat.engine.typing import Array

__all__ = ["copied_where_overwritten", "lies_apart", "overlap"]

# Limit of numpy.shares_memory's search (``max_work``).
_MOST_WORK = 10_000
# With at most this many arrays, every pair of arrays is compared.
_FEW = 8

_Interval = tuple[int, int, int]
"""Start and end of an array in memory, and the array's index."""


def overlap(outs: list[Any], arrays: list[Array]) -> tuple[int, int] | None:
    """Return the indices of two ``outs`` that share memory, or None.

    In shared memory, one of the two results would be lost. Two outs may be the same
    array if their inputs are also the same array.
    """
    intervals = [(*_extent(outs[index]), index) for index in _not_surely_apart(outs)]
    # The last interval is a sentinel: it ends the last group of overlapping extents.
    end_of_all = max((end for _, end, _ in intervals), default=0)
    group: list[_Interval] = []
    until = 0
    for interval in (*sorted(p for p in intervals if p[0] < p[1]), (end_of_all, 0, -1)):
        if interval[0] >= until:
            shared = _shared(group, outs, arrays) if len(group) > 1 else None
            if shared is not None:
                return shared
            group = []
        group.append(interval)
        until = max(until, interval[1])
    return None


def _shared(
    group: list[_Interval], outs: list[Any], arrays: list[Array]
) -> tuple[int, int] | None:
    """Return the indices of two outs of this group that share memory, or None."""
    single: dict[Any, _Interval] = {}
    for interval in group:
        index = interval[2]
        single.setdefault((_layout(outs[index]), _layout(arrays[index])), interval)
    group = list(single.values())
    indices = [index for _, _, index in group]
    if len(indices) > _FEW:
        last = _first_again(group, outs)
        indices = [] if last is None else indices[: last + 1]
        pairs = [(index, indices[-1]) for index in indices[:-1]]
    else:
        pairs = list(itertools.combinations(indices, 2))
    for one, other in pairs:
        if _share(outs[one], outs[other]):
            return min(one, other), max(one, other)
    return None


def _first_again(group: list[_Interval], outs: list[Any]) -> int | None:
    """Return the position of the first array that shares memory with an earlier one.

    Marks each piece of memory that an array uses: comparing all pairs of many arrays,
    such as the columns of a matrix, would take too long.
    """
    low, high = group[0][0], max(end for _, end, _ in group)
    views = [_in_host_terms(outs[index]) for _, _, index in group]
    firsts = [view.__array_interface__["data"][0] - low for view in views]
    sizes = [stride for view in views for stride in (*view.strides, view.itemsize)]
    unit = math.gcd(*firsts, *sizes)
    marks = np.zeros((high - low) // unit, np.bool_)
    for number, (first, view) in enumerate(zip(firsts, views, strict=True)):
        shape = *view.shape, view.itemsize // unit
        strides = *(stride // unit for stride in view.strides), 1
        own = np.ndarray(shape, np.bool_, marks, first // unit, strides)
        if own.any():
            return number
        own[...] = True
    return None


def _layout(array: Any) -> tuple[Any, ...]:
    return _extent(array), array.strides, array.dtype


def _not_surely_apart(outs: list[Any]) -> list[int]:
    """Return indices of outs that may share memory, without slow reads of addresses."""
    owners: dict[int, list[int]] = {}
    for index, out in enumerate(outs if len(outs) > 1 else ()):
        # Two arrays never own the same memory, and a NumPy view refers to its owner.
        owner = out
        if type(out) is np.ndarray and not out.flags.owndata:
            owner = out.base
        if type(owner) is not np.ndarray or not owner.flags.owndata:
            kinds = [type(o) is np.ndarray or is_device(o) for o in outs]
            return [i for i, is_array in enumerate(kinds) if is_array]
        owners.setdefault(id(owner), []).append(index)
    return [i for some in owners.values() if len(some) > 1 for i in some]


def _share(one: Any, other: Any) -> bool:
    """Return whether two arrays share memory."""
    # `Any`, because NumPy's type stub accepts only two values of max_work.
    exactly: Any = np.shares_memory
    views = _in_host_terms(one), _in_host_terms(other)
    try:
        return bool(exactly(*views, max_work=_MOST_WORK))
    except TooHardError:
        # Only arrays from as_strided have strides that are too hard to analyze.
        return True


def _in_host_terms(array: Any) -> Array:
    """Return a NumPy array with the same addresses; its content must not be read."""
    if not is_device(array):
        host: Array = array
        return host
    interface = {
        "data": (array.data.ptr, False),
        "shape": array.shape,
        "strides": array.strides,
        "typestr": f"|V{array.itemsize}",
        "version": 3,
    }
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))


def lies_apart(array: Any) -> bool:
    """Return whether no two elements of an array share memory.

    Returns False only for arrays from functions such as ``as_strided``.
    """
    if array.flags.c_contiguous or not array.size:
        return True
    span = array.itemsize
    strides = zip(array.strides, array.shape, strict=True)
    for stride, length in sorted((abs(s), n) for s, n in strides if n > 1):
        if stride < span:
            return False
        span += stride * (length - 1)
    return True


def copied_where_overwritten(arrays: list[Array], outs: list[Array]) -> list[Array]:
    """Return the arrays, with copies of those that another array's result overwrites.

    ``outs`` are the arrays for the results, in the same order as ``arrays``; they share
    no memory with each other.
    """
    # A shortcut: finding the address of an array takes longer than a small sum.
    if len(arrays) == 1 and arrays[0] is outs[0]:
        return arrays
    extents = [_extent(array) for array in arrays]
    ends = [(start, end, -1 - i) for i, (start, end) in enumerate(extents)]
    for index, out in enumerate(outs):
        own = extents[index]
        if (out.dtype, out.strides) != (arrays[index].dtype, arrays[index].strides):
            own = (0, 0)
        if _extent(out) != own:
            ends.append((*_extent(out), index))
    ends.sort()
    copied: set[int] = set()
    open_until, holders = 0, list[int]()
    for start, end, number in ends:
        if start >= open_until:
            holders = []
        holders.append(number)
        open_until = max(open_until, end)
        if len(holders) > 1:
            copied.update(-1 - h for h in holders if h < 0)
    return [a.copy() if i in copied else a for i, a in enumerate(arrays)]


def _extent(array: Array) -> tuple[int, int]:
    if not array.size:
        return 0, 0
    if is_device(array):
        device: Any = array
        if array.flags.c_contiguous:
            return device.data.ptr, device.data.ptr + array.nbytes
        low, high = array_module(array).byte_bounds(array)
        return int(low), int(high)
    if array.flags.c_contiguous:
        start = array.__array_interface__["data"][0]
        return start, start + array.nbytes
    return byte_bounds(array)
