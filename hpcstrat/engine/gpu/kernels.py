"""The copies and sums that run on a GPU; one launch serves up to 208 arrays.

`kernels.cu` is compiled by NVRTC for each pair of types when it is first needed, once
per process; CuPy keeps what it has compiled on disk.

A *span* is ``(index, start, stop, at)``, as in `hpcstrat.engine.arrays.packing`:
elements ``start`` to ``stop`` of array ``index`` lie in a buffer from element ``at``
on. The spans of a call lie one behind the other, and the buffer that goes with them
begins at the ``at`` of the first.

The addresses of the arrays differ from step to step, so they are an argument of each
launch. No function here waits for the device.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat.engine.typing import Array

__all__ = ["OPTIONS", "Span", "add", "pack", "prepare", "source", "unpack"]

Span = tuple[int, int, int, int]

# For the compiler: CuPy 13 and 14 differ in the standard that they take by default.
OPTIONS = ("--std=c++14", "--fmad=false")

# A block copies a chunk at a time; small calls take smaller chunks, so that each
# processor of the device has some.
_THREADS = 256
_BLOCKS_PER_PROCESSOR = 8
_CHUNK_BYTES = 16 << 10
_SMALLEST_CHUNK_BYTES = 4 << 10
# As in kernels.cu: arguments of a kernel may have 4 KiB (CUDA C++ Programming Guide,
# section "__global__ Function Parameters").
_MOST_SPANS = 208
_SPANS = np.dtype(
    [
        ("count", "i8"),
        ("starts", "i8", _MOST_SPANS + 1),
        ("arrays", "u8", _MOST_SPANS),
    ]
)
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
    """Return the text that is compiled for a pair of types, given by their names.

    The first is that of sources or results, the second that in which they are added.
    """
    name = _WIRE_TYPES[wire] if stored == wire else _TYPES[stored]
    types = f"#define STORED {name}\n#define WIRE {_WIRE_TYPES[wire]}\n"
    file = importlib.resources.files("hpcstrat.engine.gpu") / "kernels.cu"
    # It includes no other file: NVRTC may not find CUDA's headers.
    return types + file.read_text(encoding="ascii")


@functools.cache
def _kernel(name: str, stored: str, wire: str) -> Any:
    import cupy

    module = cupy.RawModule(code=source(stored, wire), options=OPTIONS)
    return module.get_function(name)


@functools.cache
def _processors(device: int) -> int:
    from cupy.cuda import runtime

    return int(runtime.getDeviceProperties(device)["multiProcessorCount"])


def prepare(stored: np.dtype[Any], wire: np.dtype[Any]) -> None:
    """Compile and load the kernels for a pair of types: as stored, and as added.

    The first call takes seconds, unless CuPy has kept the result. Without it the other
    functions do the same at their first call.
    """
    # CUDA loads a kernel when it is asked for, which may wait for the device, or fail.
    _kernel("pack", stored.name, wire.name)
    _kernel("unpack", stored.name, wire.name)
    _kernel("add", wire.name, wire.name)


class _SpanGroup(NamedTuple):
    """The spans of one launch."""

    # The array of each span, and the span's first element in it.
    indices: list[int]
    offsets: Array
    # The first element of the group in the buffer, and its number of elements.
    start: int
    size: int
    # Argument of the kernel, without the addresses.
    table: Array

    def with_addresses(self, arrays: Sequence[Any], itemsize: int) -> Array:
        """Return the argument with the addresses of the spans in some arrays."""
        table = self.table.copy()
        addresses = np.array([arrays[i].data.ptr for i in self.indices], np.uint64)
        addresses += self.offsets * np.uint64(itemsize)
        table["arrays"][: len(addresses)] = addresses
        return table


@functools.lru_cache(maxsize=256)
def _span_groups(spans: tuple[Span, ...]) -> list[_SpanGroup]:
    """Return the launches that serve some spans, the same in each step."""
    groups = []
    for first in range(0, len(spans), _MOST_SPANS):
        some = spans[first : first + _MOST_SPANS]
        begin, end = some[0][3], some[-1][3] + some[-1][2] - some[-1][1]
        table = np.zeros((), _SPANS)
        table["count"] = len(some)
        table["starts"][: len(some) + 1] = [
            *(at - begin for *_, at in some),
            end - begin,
        ]
        groups.append(
            _SpanGroup(
                [index for index, *_ in some],
                np.array([start for _, start, _, _ in some], np.uint64),
                begin - spans[0][3],
                end - begin,
                table,
            )
        )
    return groups


def pack(spans: Sequence[Span], sources: Sequence[Any], out: Any, stream: Any) -> None:
    """Copy spans of arrays into a buffer, cast to its type, that of the wire.

    Sources and buffer are contiguous; the arrays of the spans are of one type.
    """
    size = out.itemsize
    for group in _span_groups(tuple(spans)):
        stored = sources[group.indices[0]].dtype
        kernel = _kernel("pack", stored.name, out.dtype.name)
        table = group.with_addresses(sources, stored.itemsize)
        address = out.data.ptr + group.start * size
        _start(kernel, (table, address), group.size, size, stream)


def unpack(
    address: int,
    spans: Sequence[Span],
    results: Sequence[Any],
    stream: Any,
    *,
    dtype: np.dtype[Any],
    divisor: int = 0,
) -> None:
    """Copy spans of a buffer into arrays, divided and cast to their type.

    ``address`` is that of the buffer, and ``dtype`` its type, that of the wire. Results
    are contiguous, of one type, and none lies in the buffer, unless each element is its
    own result. ``divisor`` 0 is by nothing; the quotient is rounded as NumPy does in
    the type of the wire. Integers and half types are not divided.
    """
    size = dtype.itemsize
    for group in _span_groups(tuple(spans)):
        stored = results[group.indices[0]].dtype
        kernel = _kernel("unpack", stored.name, dtype.name)
        table = group.with_addresses(results, stored.itemsize)
        place = address + group.start * size
        _start(kernel, (table, place, divisor), group.size, size, stream)


def add(one: Any, other: Any, out: Any, stream: Any) -> None:
    """Add two arrays of one type and length: ``out = one + other``.

    ``out`` may be one of them, and overlaps with them otherwise not at all. Integers
    wrap around.
    """
    kernel = _kernel("add", out.dtype.name, out.dtype.name)
    addresses = one.data.ptr, other.data.ptr, out.data.ptr
    _start(kernel, (*addresses, out.size), out.size, out.itemsize, stream)


def _start(
    kernel: Any, args: tuple[Any, ...], count: int, itemsize: int, stream: Any
) -> None:
    """Launch a kernel over some elements, cut into chunks; the last argument is one."""
    from cupy.cuda import runtime

    if not count:
        return
    processors = _processors(runtime.getDevice())
    chunk_bytes = _CHUNK_BYTES
    if count * itemsize < processors * _CHUNK_BYTES:
        chunk_bytes = _SMALLEST_CHUNK_BYTES
    chunk = chunk_bytes // itemsize
    grid = min(-(-count // chunk), processors * _BLOCKS_PER_PROCESSOR)
    with stream:
        kernel((grid,), (_THREADS,), (*args, chunk))
