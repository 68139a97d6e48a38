"""The copies and sums that run on a GPU, each one launch for any number of arrays.

`kernels.cu` is compiled by NVRTC for each pair of types when it is first needed, once
per process; CuPy keeps what it has compiled on disk.

A *span* is ``(index, start, stop, at)``, as in `hpcstrat.engine.arrays.packing`:
elements ``start`` to ``stop`` of array ``index`` lie in a buffer from element ``at``
on. The spans of a call lie one behind the other, and the buffer that goes with them
begins at the ``at`` of the first.

The addresses of the arrays differ from step to step. They travel as arguments of the
launch, or through page-locked memory, see `hpcstrat.engine.gpu.address_tables`. No
function here waits for the device.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.gpu.address_tables import (
    MOST_TERMS,
    Span,
    give_back,
    laid_out,
    reserve,
    segments_table,
    spans_table,
    terms_table,
)
from hpcstrat.engine.typing import Array

__all__ = [
    "MOST_TERMS",
    "OPTIONS",
    "add",
    "pack",
    "prepare",
    "reserve",
    "source",
    "sum_in_order",
    "unpack",
]

# For the compiler: CuPy 13 and 14 differ in the standard that they take by default.
OPTIONS = ("--std=c++14", "--fmad=false")

# A block takes a chunk at a time; small calls take smaller ones, so that each processor
# of the device has some.
_THREADS = 256
_BLOCKS_PER_PROCESSOR = 8
_CHUNK_BYTES = 16 << 10
_SMALLEST_CHUNK_BYTES = 4 << 10
_TYPES = {
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "Index",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "Word",
    "uint64": "Address",
    "float16": "Half",
    "bfloat16": "Brain",
    "float32": "Float",
    "float64": "double",
    "complex64": "Complex<Float>",
    "complex128": "Complex<double>",
}
# Sums of integers wrap around, which signed ones may not in C++.
_WIRE_TYPES = {**_TYPES, "int32": "Word", "int64": "Address"}


@functools.cache
def source(stored: str, wire: str) -> str:
    """Return what is compiled for a pair of types, given by their names.

    The first is that of sources or results, the second that in which they are added.
    """
    name, wire_name = _TYPES[stored], _WIRE_TYPES[wire]
    if stored == wire:
        name = wire_name
    types = f"#define STORED {name}\n#define WIRE {wire_name}\n"
    files = importlib.resources.files("hpcstrat.engine.gpu")
    parts = [files / name for name in ("singles.cu", "kernels.cu")]
    # One text without any #include: NVRTC may not find CUDA's headers.
    return types + "".join(part.read_text(encoding="ascii") for part in parts)


@functools.cache
def _module(stored: str, wire: str) -> Any:
    import cupy

    return cupy.RawModule(code=source(stored, wire), options=OPTIONS)


@functools.cache
def _kernel(name: str, stored: str, wire: str) -> Any:
    return _module(stored, wire).get_function(name)


@functools.cache
def _load(stored: str, wire: str) -> None:
    # Loaded when they are asked for (CUDA's lazy loading), which may wait or fail.
    for what in ("pack", "unpack"):
        for size in ("few", "many", "long"):
            _kernel(f"{what}_{size}", stored, wire)
    _kernel("sum_terms", wire, wire)


@functools.cache
def _processors(device: int) -> int:
    from cupy.cuda import runtime

    return int(runtime.getDeviceProperties(device)["multiProcessorCount"])


def prepare(stored: np.dtype[Any], wire: np.dtype[Any]) -> None:
    """Compile and load the kernels for a pair of types: as stored, and as added.

    The first call takes seconds, unless CuPy has kept the result; the other functions
    make it where it has not been made.
    """
    _load(stored.name, wire.name)


def pack(spans: Sequence[Span], sources: Sequence[Any], out: Any, stream: Any) -> None:
    """Copy spans of arrays into a buffer, cast to its type, that of the wire.

    Sources and buffer are contiguous; those in the spans are of one type. A tuple of
    spans that is used again is quicker the second time.
    """
    layout = laid_out(spans)
    if not out.size or not layout.indices:
        return
    stored = sources[layout.indices[0]].dtype
    size, table, memory = spans_table(layout, sources, stored.itemsize, stream)
    kernel = _kernel(f"pack_{size}", stored.name, out.dtype.name)
    _launch(kernel, (table, out.data.ptr), out, stream)
    give_back(memory, stream)


def unpack(
    segments: Sequence[tuple[int, int, int]],
    spans: Sequence[Span],
    results: Sequence[Any],
    stream: Any,
    *,
    dtype: np.dtype[Any],
    divisor: int = 0,
) -> None:
    """Copy spans of a buffer into arrays, divided and cast to their type.

    A segment says where a part of the buffer lies: its address, and which elements of
    the buffer it holds, from and to; in order, without gaps or empty ones, at most
    MOST_TERMS. Results are contiguous, of one type, and none lies in the buffer, unless
    each element is its own result. ``divisor`` 0 is by nothing; the quotient is rounded
    as NumPy does in the type of the wire, ``dtype``. Integers and half types are not
    divided.
    """
    buffers = segments_table(segments)
    _deliver(buffers, spans, results, stream, dtype=dtype, divisor=divisor)


def add(own: Any, other: Any, out: Any, stream: Any) -> None:
    """Add two arrays, ``out = own + other``, as `sum_in_order` does."""
    sum_in_order([own.data.ptr, other.data.ptr], out, stream)


def sum_in_order(pointers: Sequence[int], out: Any, stream: Any) -> None:
    """Add at most MOST_TERMS arrays in their order: ``((p0 + p1) + p2) + ...``.

    They have the type and length of ``out``, which may be one of them, and overlaps
    with the others not at all. Integers wrap around.
    """
    if out.size:
        kernel = _kernel("sum_terms", out.dtype.name, out.dtype.name)
        _launch(kernel, (terms_table(pointers), out.data.ptr, out.size), out, stream)


def _deliver(
    buffers: Array,
    spans: Sequence[Span],
    results: Sequence[Any],
    stream: Any,
    *,
    dtype: np.dtype[Any],
    divisor: int,
) -> None:
    layout = laid_out(spans)
    if not layout.indices:
        return
    stored = results[layout.indices[0]].dtype
    size, table, memory = spans_table(layout, results, stored.itemsize, stream)
    kernel = _kernel(f"unpack_{size}", stored.name, dtype.name)
    count = int(layout.starts[-1])
    _launch_over(count, dtype.itemsize, kernel, (table, buffers, divisor), stream)
    give_back(memory, stream)


def _launch(kernel: Any, args: tuple[Any, ...], out: Any, stream: Any) -> None:
    _launch_over(out.size, out.dtype.itemsize, kernel, args, stream)


def _launch_over(
    count: int, itemsize: int, kernel: Any, args: tuple[Any, ...], stream: Any
) -> None:
    """Launch a kernel over some elements, cut into chunks; the last argument is one."""
    from cupy.cuda import runtime

    processors = _processors(runtime.getDevice())
    chunk_bytes = _CHUNK_BYTES
    if count * itemsize < processors * _CHUNK_BYTES:
        chunk_bytes = _SMALLEST_CHUNK_BYTES
    chunk = chunk_bytes // itemsize
    grid = min(-(-count // chunk), processors * _BLOCKS_PER_PROCESSOR)
    with stream:
        kernel((grid,), (_THREADS,), (*args, chunk))
