"""The part of ``cupyx`` that belongs to the stand-in for CuPy."""

import cupy
import numpy as np


def empty_pinned(shape, dtype=float, order="C"):
    """Return a NumPy array in page-locked memory."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    mem = cupy.cuda.alloc_pinned_memory(nbytes)
    return np.ndarray(shape, dtype=dtype, buffer=mem, order=order)


def zeros_pinned(shape, dtype=float, order="C"):
    """Return a NumPy array of zeros in page-locked memory."""
    made = empty_pinned(shape, dtype, order)
    made.fill(0)
    return made


def empty_like_pinned(a, dtype=None, order="K", subok=None, shape=None):
    """Return a NumPy array like another one, in page-locked memory."""
    if subok is not None:
        raise TypeError("subok is not supported yet")
    if order in {"K", "A", None}:
        order = "F" if a.flags.f_contiguous and not a.flags.c_contiguous else "C"
    shape = a.shape if shape is None else shape
    return empty_pinned(shape, a.dtype if dtype is None else dtype, order)


def zeros_like_pinned(a, dtype=None, order="K", subok=None, shape=None):
    """Return a NumPy array of zeros like another one, in page-locked memory."""
    made = empty_like_pinned(a, dtype, order, subok, shape)
    made.fill(0)
    return made


def scatter_add(a, slices, value):
    """Add values at indices that may repeat."""
    a.scatter_add(slices, value)
