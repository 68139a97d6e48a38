"""A stand-in for CuPy on host memory, for tests on machines without a GPU.

It has the names, parameters and errors of CuPy 14 for the part of CuPy that hpcstrat
and its users' programs use; ``tests/gpu/test_standin.py`` compares them with the real
CuPy if CuPy is installed. With this folder's parent on ``PYTHONPATH``, ``import cupy``
finds it. ``cupy._standin.counts`` counts launches, copies and waits. The stand-in
follows CUDA's documentation and CuPy's sources; it has not been compared with a GPU at
work.

The stand-in resembles a device in these points. An array is a separate class, which is
never converted to a NumPy array implicitly. Each stream is a thread that does its work
in order, after random delays; memory that is not written yet holds the byte 0xCB.
Streams wait for each other as in CUDA: the legacy default stream waits for blocking
streams, and these wait for it; other streams wait only for events. Copies from and to
memory that is not page-locked block the caller if CUDA's copies do. Memory from
``cudaMalloc`` and interprocess events can be shared between processes by handles.
NCCL's communicators connect processes of one host.

The stand-in is stricter in these points. Kernels must not use barriers, shared memory
or warp intrinsics, because g++ compiles them, and a grid runs as loops. Their arguments
must have the sizes that they declare. Memory that is returned to CuPy's pool is
overwritten in the order of its stream, as its next owner would do. Pinned memory that
is freed is overwritten at once. Memory of the pool cannot be shared by handles (CuPy's
memory could, with the offset in its block). Indices out of bounds in arrays of indices
are errors (CuPy wraps them around). Addresses that no device knows are refused. Ranks
that call different collectives of NCCL, or with different arguments, get an error.
Functions refuse lists and NumPy arrays, even if some of CuPy's functions happen to
accept them.

A kernel that loads or stores at a misaligned address ends the context: each later call
on that device fails, as in CUDA. The first use of a kernel waits for all work of its
device, because loading a kernel may wait in CUDA, too.

The stand-in is laxer in these points. Other errors of the work in a stream are raised
at the next wait for any work of the device, and the device stays usable. Priorities of
streams have no effect. There is no limit on resources except the memory. Grids do not
occupy the device, so kernels of different streams run at the same time. The per-thread
default stream is an ordinary blocking stream. ``cudaFree`` does not wait for the
device. A result may have another memory layout than CuPy's, or differ in the last bits;
random numbers are completely different.

To add a function of NumPy, write its name into a table of ``_functions.py`` or
``_ufuncs.py``. ``HPCSTRAT_STANDIN_*`` variables are described in ``_standin.py``.
"""

import sys as _sys

import numpy as _numpy

# The order matters, because these modules build the classes step by step.
from cupy import _standin, cuda  # isort: skip
from cupy import _core, _creation, _array, _functions, _ufuncs  # isort: skip
from cupy import exceptions, linalg, random, testing  # isort: skip
from cupy._array import ndarray
from cupy._creation import (
    arange,
    array,
    asanyarray,
    asarray,
    ascontiguousarray,
    asfortranarray,
    asnumpy,
    copy,
    copyto,
    empty,
    empty_like,
    eye,
    from_dlpack,
    full,
    full_like,
    identity,
    linspace,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from cupy._raw import RawKernel, RawModule
from cupy.cuda import compiler as _compiler

__version__ = "14.2.0"

globals().update(_functions.table)
globals().update(_ufuncs.table)

_CONSTANTS = """
bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64
complex64 complex128 intp uintp int_ uint generic number integer floating
complexfloating signedinteger unsignedinteger inexact dtype finfo iinfo newaxis inf nan
pi e single double half byte short intc longlong ubyte ushort uintc ulonglong csingle
cdouble issubdtype promote_types min_scalar_type common_type broadcast_shapes
""".split()
for _name in _CONSTANTS:
    globals()[_name] = getattr(_numpy, _name)


def get_array_module(*args):
    """Return this module if an argument is a CuPy array, else NumPy."""
    for arg in args:
        if isinstance(arg, ndarray):
            return _sys.modules[__name__]
    return _numpy


def get_default_memory_pool():
    """Return CuPy's pool of device memory."""
    return cuda.memory._default_pool


def get_default_pinned_memory_pool():
    """Return CuPy's pool of page-locked memory."""
    return _pinned_pool


def is_available():
    """Return whether there is a device."""
    return cuda.is_available()


def show_config(*, _full=False):
    """Print the name and version of the stand-in."""
    print(f"CuPy Version : {__version__} (stand-in on host memory)")


_pinned_pool = cuda.PinnedMemoryPool()
__all__ = [_name for _name in globals() if not _name.startswith("_")]
