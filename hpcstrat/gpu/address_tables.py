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

from hpcstrat.gpu.device_memory import pinned_memory, plain_memory, rounded
from hpcstrat.gpu.streams import Mark
from hpcstrat.typing import Array

__all__ = [
    "MOST_TERMS",
    "Layout",
    "Table",
    "give_back",
    "laid_out",
    "reserve",
    "segments_table",
    "spans_table",
    "terms_table",
]

Span = tuple[int, int, int, int]

MOST_TERMS = 32
"""How many buffers are added, or read from, in one launch; as in ``kernels.cu``."""

_FEW_SPANS = 24
_MANY_SPANS = 208
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


class Layout(NamedTuple):
    """Where spans lie, which is the same in each step.

    Parameters
    ----------
    spans : sequence of (int, int, int, int)
        The spans.
    indices : list of int
        The array of each.
    offsets : ndarray of shape (n,)
        Where each begins in its array, in elements.
    starts : ndarray of shape (n + 1,)
        Where each begins in the buffer, and where the last one ends, in elements.
    """

    spans: Sequence[Span]
    indices: list[int]
    offsets: Array
    starts: Array


class Table(NamedTuple):
    """Memory for the addresses of many arrays.

    Parameters
    ----------
    host : ndarray of shape (n,)
        Page-locked bytes.
    device : cupy.ndarray of shape (n,)
        As many on the device.
    used : Mark
        The end of the last work that uses them.
    """

    host: Array
    device: Any
    used: Mark


_layouts: dict[int, Layout] = {}
_tables: deque[Table] = deque()


def segments_table(segments: Sequence[tuple[int, int, int]]) -> Array:
    """Return the table of one buffer in several places.

    Not collective.

    Parameters
    ----------
    segments : sequence of (int, int, int)
        See `hpcstrat.gpu.kernels.unpack`.

    Returns
    -------
    ndarray of shape ()
        A ``Buffers``.
    """
    assert 0 < len(segments) <= MOST_TERMS
    buffers = np.zeros((), _BUFFERS)
    buffers["parts"], buffers["terms"] = len(segments), 1
    buffers["firsts"][: len(segments)] = [first for _, first, _ in segments]
    buffers["pointers"][: len(segments)] = [pointer for pointer, _, _ in segments]
    return buffers


def terms_table(pointers: Sequence[int]) -> Array:
    """Return the table of buffers that are to be added.

    Not collective.

    Parameters
    ----------
    pointers : sequence of int
        Their addresses.

    Returns
    -------
    ndarray of shape ()
        A ``Buffers``.
    """
    assert 0 < len(pointers) <= MOST_TERMS
    buffers = np.zeros((), _BUFFERS)
    buffers["parts"], buffers["terms"] = 1, len(pointers)
    buffers["pointers"][: len(pointers)] = pointers
    return buffers


def laid_out(spans: Sequence[Span]) -> Layout:
    """Return what the spans say, which is kept as long as they are likely to live.

    Not collective.

    Parameters
    ----------
    spans : sequence of (int, int, int, int)
        See `hpcstrat.gpu.kernels`.

    Returns
    -------
    Layout
        The same for the same tuple.
    """
    layout = _layouts.get(id(spans))
    if layout is not None and layout.spans is spans:
        return layout
    first = spans[0][3] if spans else 0
    starts = [at - first for _, _, _, at in spans]
    end = starts[-1] + spans[-1][2] - spans[-1][1] if spans else 0
    layout = Layout(
        spans,
        [index for index, _, _, _ in spans],
        np.array([start for _, start, _, _ in spans], np.uint64),
        np.array([*starts, end], np.int64),
    )
    if type(spans) is tuple:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        _layouts[id(spans)] = layout
    return layout


def spans_table(
    layout: Layout, arrays: Sequence[Any], itemsize: int, stream: Any
) -> tuple[str, Array, Table | None]:
    """Return the table of spans, with the addresses of their arrays.

    Not collective.

    Parameters
    ----------
    layout : Layout
        Of at least one span.
    arrays : sequence of cupy.ndarray of shape (n,)
        All arrays of the call.
    itemsize : int
        Of those in the spans.
    stream : cupy.cuda.Stream
        On which the table is copied, where it has to be.

    Returns
    -------
    str
        Which kernel takes it: few, many or long.
    ndarray of shape ()
        The argument for it.
    Table or None
        For `give_back`, when the kernel has been launched.
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
        *(address, host.ctypes.data, host.nbytes, _HOST_TO_DEVICE, stream.ptr)
    )
    table = np.array((len(pointers), address, address + len(starts) * 8), _LONG)
    return "long", table, memory


def _long_bytes(count: int) -> int:
    return (2 * count + 1) * 8


def reserve(counts: Iterable[int]) -> None:
    """Make the tables for launches to come, where that may fail.

    Not collective.

    Parameters
    ----------
    counts : iterable of int
        Number of spans in each launch.
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
    """Let a table be used again after what the stream has been given so far.

    Not collective.

    Parameters
    ----------
    memory : Table or None
        From `spans_table`.
    stream : cupy.cuda.Stream
        On which the kernel was launched.
    """
    if memory is not None:
        memory.used.record(stream)
        _tables.append(memory)
