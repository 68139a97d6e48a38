"""The tables of addresses that go to the device with each launch of a kernel.

Arguments of a kernel may have 4 KiB (CUDA C++ Programming Guide, section "__global__
Function Parameters"): room for some two hundred arrays. The table of a longer call goes
through page-locked memory of its own, which serves again when the device has done with
it. The layouts are those of ``kernels.cu``. CuPy passes arrays of one element by value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat.engine.gpu.device_memory import pinned_memory, plain_memory, rounded
from hpcstrat.engine.gpu.streams import Mark
from hpcstrat.engine.typing import Array

__all__ = [
    "MOST_TERMS",
    "SpanLayout",
    "Table",
    "give_back",
    "laid_out",
    "reserve",
    "segments_table",
    "spans_table",
    "terms_table",
]

Span = tuple[int, int, int, int]

# Most buffers that one launch adds, or reads from; as in ``kernels.cu``.
MOST_TERMS = 32

_FEW_SPANS = 24
_MANY_SPANS = 208
# cudaMemcpyHostToDevice.

_HOST_TO_DEVICE = 1
_MOST_LAYOUTS = 256


def _spans_dtype(size: int) -> np.dtype[Any]:
    return np.dtype(
        [("count", "i8"), ("starts", "i8", size + 1), ("arrays", "u8", size)]
    )


_FEW, _MANY = _spans_dtype(_FEW_SPANS), _spans_dtype(_MANY_SPANS)
_LONG = np.dtype([("count", "i8"), ("starts", "u8"), ("arrays", "u8")])
_BUFFERS = np.dtype(
    [
        ("parts", "i8"),
        ("terms", "i8"),
        ("firsts", "i8", MOST_TERMS + 1),
        ("pointers", "u8", MOST_TERMS),
    ]
)


class SpanLayout(NamedTuple):
    """The layout of spans, which is the same in each step."""

    spans: Sequence[Span]
    # The array of each span.
    indices: list[int]
    # Start of each in its array, and in the buffer, with the end of the last; in
    # elements.
    offsets: Array
    starts: Array


class Table(NamedTuple):
    """Memory for the addresses of many arrays."""

    # Page-locked host memory of the size of ``device``.
    host: Array
    device: Any
    # The end of the last work that uses them.
    used: Mark


_layouts: dict[int, SpanLayout] = {}
_tables: deque[Table] = deque()


def segments_table(segments: Sequence[tuple[int, int, int]]) -> Array:
    """Return the ``Buffers`` of one buffer in several places, see `kernels.unpack`."""
    assert 0 < len(segments) <= MOST_TERMS
    buffers = np.zeros((), _BUFFERS)
    buffers["parts"], buffers["terms"] = len(segments), 1
    buffers["firsts"][: len(segments)] = [first for _, first, _ in segments]
    buffers["pointers"][: len(segments)] = [pointer for pointer, _, _ in segments]
    return buffers


def terms_table(pointers: Sequence[int]) -> Array:
    """Return the ``Buffers`` of buffers that are to be added."""
    assert 0 < len(pointers) <= MOST_TERMS
    buffers = np.zeros((), _BUFFERS)
    buffers["parts"], buffers["terms"] = 1, len(pointers)
    buffers["pointers"][: len(pointers)] = pointers
    return buffers


def laid_out(spans: Sequence[Span]) -> SpanLayout:
    """Return what the spans say, which is kept: the same for the same tuple."""
    layout = _layouts.get(id(spans))
    # A layout keeps its spans alive, so that no other tuple can have their id; a list
    # may change, and is not kept.
    if layout is not None and layout.spans is spans:
        return layout
    first = spans[0][3] if spans else 0
    starts = [at - first for _, _, _, at in spans]
    end = starts[-1] + spans[-1][2] - spans[-1][1] if spans else 0
    layout = SpanLayout(
        spans,
        [index for index, _, _, _ in spans],
        np.array([start for _, start, _, _ in spans], np.uint64),
        np.array([*starts, end], np.int64),
    )
    if type(spans) is tuple:
        # A program has few plans; one that makes new ones in each step must not fill
        # memory.
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        _layouts[id(spans)] = layout
    return layout


def spans_table(
    layout: SpanLayout, arrays: Sequence[Any], itemsize: int, stream: Any
) -> tuple[str, Array, Table | None]:
    """Return the table of at least one span, with the addresses of their arrays.

    First which kernel takes it: few, many or long; then the argument for it; last what
    `give_back` takes when the kernel has been launched. ``arrays`` are all of the call,
    ``itemsize`` is that of those in the spans; a long table is copied on the stream.
    """
    count = len(layout.indices)
    pointers = layout.offsets * np.uint64(itemsize)
    pointers += np.array([arrays[i].data.ptr for i in layout.indices], np.uint64)
    if count > _MANY_SPANS:
        return _long_table(layout.starts, pointers, stream)
    size, dtype = ("few", _FEW) if count <= _FEW_SPANS else ("many", _MANY)
    table = np.empty((), dtype)
    table["count"] = count
    table["starts"][: count + 1] = layout.starts
    table["arrays"][:count] = pointers
    return size, table, None


def _long_table(
    starts: Array, pointers: Array, stream: Any
) -> tuple[str, Array, Table | None]:
    """Send a table to the device."""
    from cupy.cuda import runtime

    nbytes = _long_bytes(len(pointers))
    memory = _table_memory(nbytes)
    host = memory.host[:nbytes].view(np.int64)
    host[: len(starts)] = starts
    host[len(starts) :] = pointers.view(np.int64)
    address = memory.device.data.ptr
    runtime.memcpyAsync(
        address, host.ctypes.data, host.nbytes, _HOST_TO_DEVICE, stream.ptr
    )
    table = np.array((len(pointers), address, address + len(starts) * 8), _LONG)
    return "long", table, memory


def _long_bytes(count: int) -> int:
    return (2 * count + 1) * 8


def reserve(counts: Iterable[int]) -> None:
    """Make the tables for launches to come, where that may fail.

    ``counts`` are the numbers of spans of each launch, in their order.
    """
    sizes = [_long_bytes(count) for count in counts if count > _MANY_SPANS]
    # The first of them is asked for first.
    _tables.extendleft(reversed([_table_memory(nbytes) for nbytes in sizes]))


def _table_memory(nbytes: int) -> Table:
    """Return memory whose last use the device has done."""
    for _ in range(len(_tables)):
        memory = _tables.popleft()
        if not memory.used.passed():
            _tables.append(memory)
        elif memory.host.nbytes >= nbytes:
            return memory
    nbytes = rounded(nbytes)
    return Table(pinned_memory(nbytes), plain_memory(nbytes), Mark())


def give_back(memory: Table | None, stream: Any) -> None:
    """Let a table be used again after what the stream has been given so far."""
    if memory is not None:
        memory.used.record(stream)
        _tables.append(memory)
