"""Checks of the arrays that a reduction sums, and of the arrays for the sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.arrays.overlaps import lies_apart, overlap
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.tree import flatten
from hpcstrat.engine.typing import Array, Tree

__all__ = [
    "all_plain",
    "checked_outs",
    "in_each_memory",
    "list_structure",
    "require_fitting",
    "require_sum_of_rows",
]

# The DLPack device type of host memory, kDLCPU.
_DLPACK_CPU = 1


def all_plain(leaves: list[Any]) -> bool:
    """Return whether all leaves are NumPy arrays that can be summed without a copy."""
    for leaf in leaves:
        if type(leaf) is not np.ndarray or not leaf.dtype.isnative:
            return False
    return True


@functools.cache
def list_structure(length: int) -> Any:
    """Return the structure of a list of leaves; see `hpcstrat.engine.tree.flatten`."""
    return flatten([0] * length)[1]


def in_each_memory(
    make: Callable[[list[int]], Sequence[Array]], arrays: list[Array]
) -> list[Any]:
    """Return the results of a call for each kind of memory, which has some arrays.

    ``make`` is called with the indices of the arrays in host memory, and then with
    those of the arrays on GPUs, so that all replicas make the calls in this order. It
    is called once if there are no arrays.
    """
    there = [index for index, array in enumerate(arrays) if is_device(array)]
    if not there or len(there) == len(arrays):
        return list(make(list(range(len(arrays)))))
    here = [index for index in range(len(arrays)) if index not in there]
    found = dict(zip(here, make(here), strict=True))
    found |= zip(there, make(there), strict=True)
    return [found[index] for index in range(len(arrays))]


def checked_outs(
    out: Tree, arrays: list[Array], structure: Any, sparse: list[int]
) -> list[Any]:
    """Return the leaves of ``out``, which must have the structure of the value.

    Host arrays of other libraries are returned as NumPy arrays on the same memory.
    ``sparse`` are the indices of the value's leaves that are IndexedSlices. Raises
    ValueError for another structure, for IndexedSlices, for arrays that cannot be
    shared, or if leaves of ``out`` overlap with each other.
    """
    if sparse:
        raise ValueError(
            "expected no out for IndexedSlices, whose number of rows is known only "
            "afterwards, found one; leave it out"
        )
    outs, found = flatten(out)
    if found != structure:
        raise ValueError(
            f"expected an out of the structure {structure}, as the value, found "
            f"{found}; give one array for each"
        )
    outs = [_own_memory(leaf) for leaf in outs]
    shared = overlap(outs, arrays)
    if shared is not None:
        one, other = (_name(structure.paths()[index]) for index in shared)
        raise ValueError(
            f"expected out arrays that lie apart, found that {one} and {other} share "
            "memory, in which one result would be lost; give each an array of its own"
        )
    return outs


def _name(path: tuple[Any, ...]) -> str:
    return "out" + "".join(f"[{key!r}]" for key in path)


def _own_memory(out: Any) -> Any:
    """Return another library's host array as a NumPy array on the same memory.

    Other objects, and arrays that DLPack can only copy, are returned unchanged;
    `require_fitting` refuses them.
    """
    if isinstance(out, (np.ndarray, np.generic)) or is_device(out):
        return out
    where = getattr(type(out), "__dlpack_device__", None)
    if where is None or where(out)[0] != _DLPACK_CPU:
        return out
    try:
        array, again = np.from_dlpack(out), np.from_dlpack(out)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ValueError(
            "expected memory that can be written as out, found a "
            f"{type(out).__qualname__}: {error}; detach it from the gradient "
            "computation"
        ) from error
    # Arrays in different memory are copies: results in a copy would be lost.
    shared = np.may_share_memory(array, again) or not array.size
    return array if shared else out


def require_fitting(
    outs: list[Any],
    results: Sequence[tuple[tuple[int, ...], np.dtype[Any]]],
    on_gpu: bool,
) -> None:
    """Raise ValueError for an array that cannot hold its result (shape and dtype)."""
    for out, result in zip(outs, results, strict=True):
        if type(out) is np.ndarray and not on_gpu:
            # A shortcut for nearly all arrays.
            flags = out.flags
            if (
                flags.c_contiguous
                and flags.writeable
                and (out.shape, out.dtype) == result
            ):
                continue
        if (
            (not is_device(out) if on_gpu else type(out) is not np.ndarray)
            or (out.shape, out.dtype) != result
            or not (on_gpu or out.flags.writeable)
            or not lies_apart(out)
        ):
            raise ValueError(_misfit(out, *result, on_gpu))


def require_sum_of_rows(op: ReduceOp) -> None:
    """Raise ValueError for an operation that IndexedSlices do not have."""
    if not op.adds:
        raise ValueError(
            "expected SUM or MEAN of IndexedSlices, whose rows are concatenated, found "
            f"{op.name}; reduce dense arrays, see to_dense"
        )


def _misfit(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], on_gpu: bool
) -> str:
    kind = f"a {type(out).__name__}"
    if isinstance(out, np.ndarray):
        locked = "" if out.flags.writeable else "read-only "
        kind = f"a {locked}{kind[2:]} {out.dtype}{list(out.shape)}"
    elif is_device(out):
        kind = f"a cupy.ndarray {out.dtype}{list(out.shape)}"
    library = "cupy" if on_gpu else "numpy"
    if hasattr(out, "strides") and not lies_apart(out):
        kind += f" of strides {out.strides}, whose elements share memory"
    return (
        f"expected a writable {library}.ndarray {dtype}{list(shape)} as out, found "
        f"{kind}; make it with {library}.empty"
    )
