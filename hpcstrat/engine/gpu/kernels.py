"""Launches the copy and sum kernels on a GPU; one launch copies up to 208 arrays.

NVRTC compiles `kernels.cu` for each pair of types at the first use, once per process.
CuPy caches the compiled kernels on disk.

A *span* is ``(index, start, stop, at)``, as in `hpcstrat.engine.arrays.packing`:
elements ``start`` to ``stop`` of array ``index`` are stored in a buffer, the first of
them at element ``at`` of the buffer. The spans of a call are consecutive, and the
buffer argument of the call begins at the ``at`` of the first span.

The addresses of the arrays are an argument of each launch, because the addresses differ
from step to step. No function in this module waits for the GPU.
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

# Compiler options; CuPy 13 and 14 have different defaults of the C++ standard.
OPTIONS = ("--std=c++14", "--fmad=false")

# A CUDA block copies one chunk at a time. Small copies use smaller chunks, so that
# every multiprocessor of the GPU gets work.
_THREADS = 256
_BLOCKS_PER_PROCESSOR = 8
_CHUNK_BYTES = 16 << 10
_SMALLEST_CHUNK_BYTES = 4 << 10
# The same as MOST_SPANS in kernels.cu. Kernel arguments are limited to 4 KiB (CUDA C++
# Programming Guide, section "__global__ Function Parameters").
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
# Unsigned types, because sums wrap around; signed overflow is undefined in C++.
_WIRE_TYPES = {**_TYPES, "int32": "Word", "int64": "Address"}


@functools.cache
def source(stored: str, wire: str) -> str:
    """Return the kernels' source for arrays of type ``stored`` and sums in ``wire``."""
    name = _WIRE_TYPES[wire] if stored == wire else _TYPES[stored]
    types = f"#define STORED {name}\n#define WIRE {_WIRE_TYPES[wire]}\n"
    file = importlib.resources.files("hpcstrat.engine.gpu") / "kernels.cu"
    # The source includes no headers, because NVRTC may not find CUDA's headers.
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
    """Compile and load the kernels for a type of arrays and a type of sums.

    The first call takes seconds, unless CuPy has cached the kernels. If `prepare` is
    not called, the other functions compile the kernels at their first call.
    """
    # Load the kernels now, because loading a kernel may wait for the GPU, or fail.
    _kernel("pack", stored.name, wire.name)
    _kernel("unpack", stored.name, wire.name)
    _kernel("add", wire.name, wire.name)


class _SpanGroup(NamedTuple):
    """The spans that one launch copies."""

    # For each span, the index of its array, and its first element in that array.
    indices: list[int]
    offsets: Array
    # The first element of the group in the buffer, and the group's number of elements.
    start: int
    size: int
    # The kernel's argument ``Spans``, without the addresses.
    table: Array

    def with_addresses(self, arrays: Sequence[Any], itemsize: int) -> Array:
        """Return a copy of the kernel's argument with the addresses of the spans."""
        table = self.table.copy()
        addresses = np.array([arrays[i].data.ptr for i in self.indices], np.uint64)
        addresses += self.offsets * np.uint64(itemsize)
        table["arrays"][: len(addresses)] = addresses
        return table


@functools.lru_cache(maxsize=256)
def _span_groups(spans: tuple[Span, ...]) -> list[_SpanGroup]:
    """Return the groups of spans, one per launch; cached from step to step."""
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
    """Copy spans of arrays into a buffer, cast to the type of the buffer.

    Sources and buffer are contiguous. All source arrays have the same type.
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
    """Copy spans of a buffer into arrays; divide the values, and cast them.

    ``address`` is the address of the buffer, and ``dtype`` the buffer's type. Results
    are contiguous and have one type. They do not overlap with the buffer, except if
    each element is written to the address from which it was read. A quotient has the
    bits of NumPy's quotient in ``dtype``. Values are not divided if ``divisor`` is 0,
    or if ``dtype`` is an integer or half type.
    """
    size = dtype.itemsize
    for group in _span_groups(tuple(spans)):
        stored = results[group.indices[0]].dtype
        kernel = _kernel("unpack", stored.name, dtype.name)
        table = group.with_addresses(results, stored.itemsize)
        first = address + group.start * size
        _start(kernel, (table, first, divisor), group.size, size, stream)


def add(one: Any, other: Any, out: Any, stream: Any) -> None:
    """Add two arrays of one type and length: ``out = one + other``.

    ``out`` is either one of the two arrays, or does not overlap with them. Integers
    wrap around.
    """
    kernel = _kernel("add", out.dtype.name, out.dtype.name)
    addresses = one.data.ptr, other.data.ptr, out.data.ptr
    _start(kernel, (*addresses, out.size), out.size, out.itemsize, stream)


def _start(
    kernel: Any, args: tuple[Any, ...], count: int, itemsize: int, stream: Any
) -> None:
    """Launch a kernel over ``count`` elements, with the chunk size as last argument."""
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
