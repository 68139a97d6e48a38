"""A stand-in for CuPy on host memory, for tests on machines without a GPU.

It has the names, parameters and errors of CuPy 14 for the part of CuPy that hpcstrat
and its users' programs use; ``tests/gpu/test_standin.py`` compares them with the real
one where that is installed. With this folder's parent on ``PYTHONPATH``, ``import
cupy`` finds it. ``cupy._standin.counts`` tells what has been launched, copied and
waited for. It follows CUDA's documentation and CuPy's sources; it has not been
compared with a GPU at work.

What it shares with a device: an array is a class of its own, which never turns into a
NumPy array by itself. Each stream is a thread that does its work in order and later,
after random delays; until then memory holds the byte 0xCB. Streams wait for each other
as CUDA's do: the legacy default stream for blocking ones and they for it; others
through events only. Copies from and to memory that is not page-locked hold the caller
up where CUDA's do. Memory from ``cudaMalloc`` and interprocess events are shared
between processes by handles, NCCL's communicators connect processes of one host.

Where it is stricter. Kernels must be free of barriers, of shared memory and of warp
intrinsics: g++ compiles them, and a grid runs as loops. Their arguments must have the
sizes that they declare. Memory that went back to CuPy's pool is overwritten in the
order of its stream, as its next owner would do; pinned memory that was freed, at once.
Memory of the pool cannot be shared by handles (CuPy's could, with the offset in its
block). Indices out of bounds in arrays of indices are errors (CuPy wraps them around).
Addresses that no device knows are refused. Ranks that call different collectives of
NCCL, or with different arguments, get an error. Functions take no lists or arrays of
NumPy where CuPy's happen to work on some of them.

Kernels that load or store at an address that their type's alignment forbids end the
context: each later call on that device fails, as with CUDA. The first use of a kernel
waits for all that its device does, as to load one may.

Where it is laxer. Other errors of the work in a stream come at the next wait for
anything on the device, and do not make it unusable for good. Priorities of streams
change nothing. There is no limit on
resources other than the memory. Grids occupy no device, so that kernels of different
streams run side by side. The per-thread default stream is an ordinary blocking stream.
``cudaFree`` does not wait for the device. A result of NumPy's may have another layout
in memory or differ from CuPy's in the last bits; random numbers differ altogether.

To add a function of NumPy, write its name into a table of ``_functions.py`` or
``_ufuncs.py``. ``HPCSTRAT_STANDIN_*`` variables are described in ``_standin.py``.
"""

import sys as _sys

import numpy as _numpy

# The order matters: the classes are put together from these modules.
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
    """Return this module if an argument is one of its arrays, else NumPy."""
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
    """Tell whether there is a device."""
    return cuda.is_available()


def show_config(*, _full=False):
    """Print what the stand-in is."""
    print(f"CuPy Version : {__version__} (stand-in on host memory)")


_pinned_pool = cuda.PinnedMemoryPool()
__all__ = [_name for _name in globals() if not _name.startswith("_")]
