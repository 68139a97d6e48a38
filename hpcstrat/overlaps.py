"""Which arrays of a reduction share memory with each other."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
from numpy.exceptions import TooHardError
from numpy.lib.array_utils import byte_bounds

from hpcstrat.arrays import array_module, is_device
from hpcstrat.typing import Array

__all__ = ["copied_where_overwritten", "lies_apart", "overlap"]

# Steps in which NumPy finds whether two arrays share memory.
_MOST_WORK = 10_000


def overlap(outs: list[Any], arrays: list[Array]) -> tuple[int, int] | None:
    """Find two outs that share memory, in which a result would be lost.

    Not collective.

    Parameters
    ----------
    outs : list
        Where results are to go.
    arrays : list of ndarray
        What is to be reduced. Where these are one array twice, its result may be, too.

    Returns
    -------
    tuple of int or None
        Which two; None where all lie apart.
    """
    places = [(*_extent(outs[index]), index) for index in _not_surely_apart(outs)]
    held: list[tuple[int, int]] = []
    for start, end, index in sorted(places):
        held = [earlier for earlier in held if earlier[0] > start]
        for _, other in held:
            twice = all(_place(x[index]) == _place(x[other]) for x in (outs, arrays))
            if not twice and _share(outs[index], outs[other]):
                return min(index, other), max(index, other)
        held.append((end, index))
    return None


def _place(array: Any) -> tuple[Any, ...]:
    return _extent(array), array.strides, array.dtype


def _not_surely_apart(outs: list[Any]) -> list[int]:
    """Return which outs need a closer look: addresses are slow to find."""
    owners: dict[int, list[int]] = {}
    for index, out in enumerate(outs if len(outs) > 1 else ()):
        # Two arrays never own the same memory, and NumPy's views keep its owner.
        owner = out
        if type(out) is np.ndarray and not out.flags.owndata:
            owner = out.base
        if type(owner) is not np.ndarray or not owner.flags.owndata:
            kinds = [type(o) is np.ndarray or is_device(o) for o in outs]
            return [i for i, is_array in enumerate(kinds) if is_array]
        owners.setdefault(id(owner), []).append(index)
    return [i for some in owners.values() if len(some) > 1 for i in some]


def _share(one: Any, other: Any) -> bool:
    """Whether two arrays share memory."""
    # NumPy's stub knows two values of it only.
    exactly: Any = np.shares_memory
    views = _in_host_terms(one), _in_host_terms(other)
    try:
        return bool(exactly(*views, max_work=_MOST_WORK))
    except TooHardError:
        # Strides that only as_strided makes.
        return True


def _in_host_terms(array: Any) -> Array:
    """Return an array of NumPy with the same addresses, never to be read."""
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
    """Whether no element of an array shares memory with another of it.

    Not collective.

    Parameters
    ----------
    array : ndarray
        Of NumPy or CuPy.

    Returns
    -------
    bool
        True for all but what functions such as ``as_strided`` make.
    """
    if array.flags.c_contiguous or not array.size:
        return True
    span = array.itemsize
    steps = zip(array.strides, array.shape, strict=True)
    for stride, length in sorted((abs(s), n) for s, n in steps if n > 1):
        if stride < span:
            return False
        span += stride * (length - 1)
    return True


def copied_where_overwritten(arrays: list[Array], outs: list[Array]) -> list[Array]:
    """Copy the arrays over which another array's result would be written.

    Not collective.

    Parameters
    ----------
    arrays : list of ndarray
        What is to be reduced.
    outs : list of ndarray
        Where the results go, in the same order.

    Returns
    -------
    list of ndarray
        The arrays, or copies of them.
    """
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
