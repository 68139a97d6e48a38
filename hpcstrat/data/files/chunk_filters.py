"""Filters of HDF5's chunks, undone without HDF5 and its lock.

Several threads can therefore unpack chunks at the same time. These filters are gzip
(by libdeflate if it is installed, else by zlib), shuffle, Fletcher's checksum, and,
with the package numcodecs, zstd, lz4 and blosc, by their numbers in HDF5's registry.
"""

from __future__ import annotations

import importlib
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.recycling import Recycler
from hpcstrat.engine.native import load_reader
from hpcstrat.engine.typing import Array

__all__ = ["ChunkFilters", "filters_of"]

_READER = load_reader()
_SHUFFLE, _FLETCHER = 2, 3
_CHECKSUM_BYTES = 4
_LIBRARIES = {"deflate": "libdeflate"}
_MEMORY_BYTES = 16 << 20
# Sums of so many words of 16 bits, each times its index, fit into 64 bits.
_WORDS_AT_ONCE = 1 << 20


def filters_of(properties: Any) -> list[tuple[int, tuple[int, ...], str]]:
    """Return number, parameters and name of each filter, in the order of writing."""
    found = []
    for index in range(properties.get_nfilters()):
        code, _, parameters, label = properties.get_filter(index)
        name = _COMPRESSORS[code][0] if code in _COMPRESSORS else label.decode()
        found.append((code, parameters, name))
    return found


class _OwnMemory(threading.local):
    """Reused memory of each thread, for the results of all filters but the last."""

    def __init__(self) -> None:
        self.empty = Recycler(_MEMORY_BYTES).empty


_MEMORY = _OwnMemory()


@dataclass(frozen=True)
class ChunkFilters:
    """The filters of a dataset, in the order in which they were applied.

    A filter is a function that undoes it, from bytes into an array of bytes; None is a
    checksum. ``how`` says in words which library unpacks the chunks.
    """

    filters: tuple[Callable[[Any, Array], None] | None, ...]
    how: str

    @classmethod
    def of(cls, properties: Any) -> ChunkFilters | None:
        """Return a dataset's filters; None if only HDF5 can undo some of them."""
        undo: list[Callable[[Any, Array], None] | None] = []
        how = "not compressed"
        for code, parameters, _ in filters_of(properties):
            if code == _FLETCHER:
                undo.append(None)
            # The number of bytes is known up to the compressor only.
            elif how != "not compressed":
                return None
            elif code == _SHUFFLE:
                undo.append(partial(_unshuffle, max(parameters[0], 1)))
            else:
                found = _decompressor(code)
                if found is None:
                    return None
                undo.append(found[0])
                how = f"unpacked by {found[1]}"
        return cls(tuple(undo), how)

    def undo(self, packed: bytes, out: Array, mask: int = 0) -> None:
        """Write the bytes of a chunk into ``out``; ``mask`` has the omitted filters.

        Bit i of ``mask`` is set if filter i was not applied to this chunk.
        """
        filters = list(self.filters)
        if mask:
            filters = [f for i, f in enumerate(filters) if not mask >> i & 1]
        data: Any = packed
        while filters:
            undo = filters.pop()
            if undo is None:
                data = _verified(memoryview(data))
                continue
            target = out
            if filters:
                num_checksums = filters.count(None)
                size = out.size + _CHECKSUM_BYTES * num_checksums
                target = _MEMORY.empty((size,), out.dtype)
            undo(data, target)
            data = target
        if data is not out:
            _require_size(len(data), out)
            out[:] = np.frombuffer(data, np.uint8)


def _require_size(size: int, out: Array) -> None:
    if size != out.size:
        raise ValueError(f"expected {out.size} bytes, found {size}")


def _verified(data: Any) -> Any:
    """Return data without the checksum at their end, which must be the data's."""
    content, stored = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    expected = int.from_bytes(stored, "little")
    found = _fletcher32(content)
    # Old versions of HDF5 swapped the bytes of each half on some machines.
    swapped = (expected & 0x00FF00FF) << 8 | (expected >> 8) & 0x00FF00FF
    if found not in {expected, swapped}:
        raise ValueError(f"expected the checksum {expected:08x}, found {found:08x}")
    return content


def _fletcher32(data: Any) -> int:
    """Return the checksum that HDF5 computes, of big-endian words of 16 bits."""
    if _READER is not None:
        return int(_READER.fletcher32(data))
    words = np.frombuffer(bytes(data) + bytes(len(data) % 2), ">u2").astype(np.int64)
    first = second = 0
    for start in range(0, len(words), _WORDS_AT_ONCE):
        some = words[start : start + _WORDS_AT_ONCE]
        factors = np.arange(len(some), 0, -1)
        second += len(some) * first + int(factors @ some)
        first += int(some.sum())
    # HDF5's sums are 0 only if all words are, and else from 1 to 65535.
    first, second = (total and (total - 1) % 65535 + 1 for total in (first, second))
    return second << 16 | first


def _unshuffle(size: int, planes: Any, out: Array) -> None:
    """Undo HDF5's shuffle filter on numbers of ``size`` bytes.

    Bytes after the last whole number are at the end, as they were.
    """
    _require_size(len(planes), out)
    whole = out.size - out.size % size
    planes = np.frombuffer(planes, np.uint8)
    out[whole:] = planes[whole:]
    if _READER is not None:
        _READER.unshuffle(planes[:whole], out[:whole], size)
    else:
        out[:whole].reshape(-1, size)[:] = planes[:whole].reshape(size, -1).T


def _inflate(library: Any, packed: Any, out: Array) -> None:
    """Decompress data in zlib's format."""
    if library is zlib:
        data = zlib.decompress(packed, bufsize=out.size)
    else:
        data = library.zlib_decompress(packed, out.size)
    _require_size(len(data), out)
    out[:] = np.frombuffer(data, np.uint8)


def _unpack_zstd(zstd: Any, packed: Any, out: Array) -> None:
    size = _zstd_size(packed)
    if size is None:
        data = zstd.decompress(packed)
        _require_size(len(data), out)
        out[:] = np.frombuffer(data, np.uint8)
    else:
        _require_size(size, out)
        zstd.decompress(packed, out)


def _zstd_size(packed: Any) -> int | None:
    """Return the number of bytes of a frame's content if its header has it.

    RFC 8878, section 3.1.1.1.
    """
    descriptor = packed[4]
    code, is_single = descriptor >> 6, descriptor >> 5 & 1
    start = 6 - is_single + (0, 1, 2, 4)[descriptor & 3]
    length = (is_single, 2, 4, 8)[code]
    size = int.from_bytes(packed[start : start + length], "little")
    return size + (256 if code == 1 else 0) if length else None


def _unpack_blosc(blosc: Any, packed: Any, out: Array) -> None:
    # The header has the bytes of the content, of a block, and of the compressed data.
    size, _, stored = struct.unpack_from("<3I", packed, 4)
    _require_size(size, out)
    if stored != len(packed):
        raise ValueError(f"expected {stored} bytes of blosc, found {len(packed)}")
    blosc.decompress(packed, out)


def _unpack_lz4(lz4: Any, packed: Any, out: Array) -> None:
    """Decompress lz4's blocks, before which the HDF5 filter stores their sizes."""
    size, most = struct.unpack_from(">QI", packed)
    _require_size(size, out)
    place = 12
    for start in range(0, size, max(most, 1)):
        part = out[start : start + most]
        (stored,) = struct.unpack_from(">I", packed, place)
        block = packed[place + 4 : place + 4 + stored]
        place += 4 + stored
        # The filter stores a block as it is if lz4 cannot make it smaller.
        if stored == part.size:
            part[:] = np.frombuffer(block, np.uint8)
        else:
            lz4.decompress(struct.pack("<I", part.size) + bytes(block), part)


_COMPRESSORS: dict[int, tuple[str, tuple[str, ...], Callable[..., None]]] = {
    1: ("gzip", ("deflate", "zlib"), _inflate),
    32015: ("zstd", ("numcodecs.zstd",), _unpack_zstd),
    32004: ("lz4", ("numcodecs.lz4",), _unpack_lz4),
    32001: ("blosc", ("numcodecs.blosc",), _unpack_blosc),
}
"""Name of each filter, modules that can undo it, the best first, and the function that
calls such a module."""


def _decompressor(code: int) -> tuple[Callable[[Any, Array], None], str] | None:
    """Return a function that undoes a compressor, and its library; None if missing."""
    _, modules, function = _COMPRESSORS.get(code, ("", (), _inflate))
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        library = name.partition(".")[0]
        return partial(function, module), _LIBRARIES.get(library, library)
    return None
