"""The class ServerBytes, by which checkpoints read and write values on servers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.typing import Array
from hpcstrat.parameter_server.client import Client
from hpcstrat.parameter_server.shared_files import Reader

_PIECE_BYTES = 32 << 20
# A shard: its server, number, first row, row after the last, and shared-memory reader.
Part = tuple[int, int, int, int, Reader | None]


class ServerBytes:
    """The bytes, in C order, of a variable's value or optimizer state on servers.

    Read the bytes in order: only one piece of up to 32 MiB is kept in memory, and a
    read outside of it fetches another piece. A piece has bytes of one shard, all read
    between two updates of this shard. ``slot`` is None for the variable's value; for
    optimizer state, it is the optimizer's key, and the state's kind and initial value.
    """

    def __init__(
        self,
        client: Client,
        shape: tuple[int, ...],
        dtype: Any,
        parts: Sequence[Part],
        slot: tuple[int, str, float] | None = None,
    ) -> None:
        self.shape = shape
        self._client, self._dtype, self._parts, self._slot = client, dtype, parts, slot
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self._nbytes = math.prod(shape) * dtype.itemsize
        self._piece, self._begin = np.empty(0, np.uint8), 0

    def __getitem__(self, source: slice, /) -> Array:
        found, done = np.empty(source.stop - source.start, np.uint8), 0
        while done < found.size:
            done += self._copy(source.start + done, found[done:])
        return found

    def _copy(self, start: int, out: Array) -> int:
        """Copy bytes from ``start`` to the end of a piece; return their number."""
        if not 0 <= start - self._begin < self._piece.size:
            # Free the old piece before the next one is read.
            self._piece = np.empty(0, np.uint8)
            spans = self._spans(start, start + _PIECE_BYTES)
            self._piece, self._begin = self._read(*next(spans)), start
        found = self._piece[start - self._begin :][: out.size]
        out[: found.size] = found
        if start + found.size == self._nbytes:
            # Free the last piece now, because a checkpoint may keep many ServerBytes.
            self._piece = np.empty(0, np.uint8)
        return int(found.size)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """Yield the shards of bytes ``start`` to ``stop``, with the range in each."""
        for part in self._parts:
            _, _, first, last, _ = part
            begin, end = first * self._row_bytes, last * self._row_bytes
            low, high = max(start, begin), min(stop, end)
            if low < high:
                yield part, low - begin, high - begin

    def _read(self, part: Part, start: int, stop: int) -> Array:
        server, number, _, _, reader = part
        found = None
        if self._slot is None:
            found = self._client.read_bytes(server, number, reader, start, stop)
        else:
            key, kind, initial = self._slot
            place = key, kind
            found = self._client.ask(server, "read_bytes", number, place, start, stop)
            if found is None:
                # No step has made the state yet: return its initial value.
                itemsize = self._dtype.itemsize
                first, last = start // itemsize, -(-stop // itemsize)
                values = np.full(last - first, initial, self._dtype)
                found = values.view(np.uint8)[start - first * itemsize :]
        return np.asarray(found[: stop - start])

    def write_bytes(self, start: int, data: Array) -> None:
        """Replace the bytes from ``start`` on; wait until the servers have written."""
        done = 0
        for part, low, high in self._spans(start, start + data.size):
            server, number, _, _, _ = part
            piece = data[done : done + high - low]
            self._client.post(server, "write_bytes", number, self._slot, low, piece)
            done += piece.size
        self._client.done()
