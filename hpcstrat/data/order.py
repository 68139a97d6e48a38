"""Orders of shuffled rows, computed from a seed, an epoch and a place.

Up to 65,536 rows, `Permutation` draws a random permutation. Above, it needs the same
small memory for any number of rows: it is a Feistel network of 8 rounds on as many bits
as row numbers have. A result that is not a row number goes through the network again
(cycle walking: Black and Rogaway, 2002, doi:10.1007/3-540-45760-7_9).
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np

from hpcstrat.engine.typing import Array

__all__ = [
    "ORDER_VERSION",
    "BlockOrder",
    "BufferedOrder",
    "Order",
    "Permutation",
    "generator_of",
]

ORDER_VERSION = 2
"""Version of the order of shuffled rows; version 1 drew permutations of any length."""

_EXACT_ROWS = 1 << 16
_WINDOW_ROWS = 1 << 16
_ROUNDS = 8


class Order(Protocol):
    """The order of the rows in an epoch: the row number at each place."""

    def rows(self, places: Array) -> Array:
        """Return the row numbers (int64) at ``places``, which may be in any order."""
        ...


def generator_of(*key: int) -> np.random.Generator:
    """Return a random number generator whose seed is the integers ``key``."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


class Permutation:
    """A random permutation of ``num_rows`` rows.

    ``exact`` draws a whole permutation of any size: order version 1, which iterations
    that were saved by older versions of the library need.
    """

    def __init__(
        self, num_rows: int, seed: int, epoch: int, *, exact: bool = False
    ) -> None:
        self._num_rows = num_rows
        generator = generator_of(seed, epoch)
        self._whole: Any = None
        if exact or num_rows <= _EXACT_ROWS:
            self._whole = generator.permutation(num_rows)
        else:
            self._bits = (num_rows - 1).bit_length()
            self._keys = generator.integers(0, 2**32, _ROUNDS, dtype=np.uint32)
            # The latest window and its rows: with one tuple, threads see both change.
            self._latest: tuple[int, Any] = (-1, None)

    def rows(self, places: Array) -> Array:
        """Return the row numbers at places, which may be in any order."""
        found: Array
        if self._whole is not None:
            found = self._whole[places]
            return found
        if not places.size:
            return places
        window = int(places[0]) // _WINDOW_ROWS
        start = window * _WINDOW_ROWS
        if places.min() < start or places.max() >= start + _WINDOW_ROWS:
            return self._permuted(places)
        # Compute a window of 65,536 rows, because NumPy is slow for small arrays.
        kept, rows = self._latest
        if kept != window:
            stop = min(start + _WINDOW_ROWS, self._num_rows)
            rows = self._permuted(np.arange(start, stop))
            self._latest = window, rows
        found = rows[places - start]
        return found

    def _permuted(self, places: Array) -> Array:
        rows: Array = self._once(places.astype(np.uint64))
        beyond = np.flatnonzero(rows >= self._num_rows)
        while beyond.size:
            again = self._once(rows[beyond])
            rows[beyond] = again
            beyond = beyond[again >= self._num_rows]
        return rows.astype(np.int64)

    def _once(self, numbers: Any) -> Any:
        high_bits, low_bits = self._bits // 2, self._bits - self._bits // 2
        high = (numbers >> np.uint64(low_bits)).astype(np.uint32)
        low = (numbers & np.uint64((1 << low_bits) - 1)).astype(np.uint32)
        for key in self._keys:
            high ^= _mixed(low ^ key) & np.uint32((1 << high_bits) - 1)
            high, low = low, high
            high_bits, low_bits = low_bits, high_bits
        return (high.astype(np.uint64) << np.uint64(low_bits)) | low


def _mixed(numbers: Any) -> Any:
    """Hash 32-bit numbers in place, and return them (lowbias32 by C. Wellons)."""
    numbers ^= numbers >> np.uint32(16)
    numbers *= np.uint32(0x7FEB352D)
    numbers ^= numbers >> np.uint32(15)
    numbers *= np.uint32(0x846CA68B)
    numbers ^= numbers >> np.uint32(16)
    return numbers


class BufferedOrder:
    """The order of tf.data's shuffle: each place gets a random row of a buffer.

    The buffer has ``size`` rows, so that row v is at place v - (size - 1) at the
    earliest. The order is computed in windows of 65,536 places, one after another; for
    a place before the latest window, it is computed again from the first window.
    ``num_rows`` is None for a data set without an end.
    """

    def __init__(self, num_rows: int | None, size: int, seed: int, epoch: int) -> None:
        self._num_rows = num_rows
        self._size = size
        self._key = seed, epoch
        self._lock = threading.Lock()
        # The rows in the buffer after the last row has entered it, in random order.
        self._tail: Any = None
        self._restart()

    def _restart(self) -> None:
        self._buffer = np.arange(self._size)
        self._window = -1
        self._rows: Any = None

    def rows(self, places: Array) -> Array:
        """Return the row numbers at places, which may be in any order."""
        found = np.empty(len(places), np.int64)
        windows = places // _WINDOW_ROWS
        with self._lock:
            for window in np.unique(windows):
                inside = windows == window
                rows = self._of_window(int(window))
                found[inside] = rows[places[inside] - window * _WINDOW_ROWS]
        return found

    def _of_window(self, window: int) -> Array:
        if window < self._window:
            self._restart()
        while self._window < window:
            self._window += 1
            self._rows = self._advance(self._window * _WINDOW_ROWS)
        rows: Array = self._rows
        return rows

    def _advance(self, start: int) -> Array:
        """Return the row numbers of the window that begins at place ``start``."""
        generator = generator_of(*self._key, start)
        count, rest = _WINDOW_ROWS, 0
        if self._num_rows is not None:
            # From place ``last`` on, no more rows enter the buffer.
            last = self._num_rows - self._size
            count = min(max(last - start, 0), _WINDOW_ROWS)
            rest = min(_WINDOW_ROWS - count, self._num_rows - start - count)
        slots = generator.integers(0, self._size, count)
        # A draw of a slot returns the row that the slot's previous draw put into it.
        by_slot = np.argsort(slots, kind="stable")
        ordered = slots[by_slot]
        is_first = np.ones(count, bool)
        is_first[1:] = ordered[1:] != ordered[:-1]
        rows = np.empty(count, np.int64)
        came = self._size + start
        rows[by_slot[1:]] = came + by_slot[:-1]
        rows[by_slot[is_first]] = self._buffer[ordered[is_first]]
        is_last = np.ones(count, bool)
        is_last[:-1] = is_first[1:]
        self._buffer[ordered[is_last]] = came + by_slot[is_last]
        if not rest:
            return rows
        assert self._num_rows is not None
        if self._tail is None:
            self._tail = generator_of(*self._key, 1, 1).permutation(self._buffer)
        first = start + count - (self._num_rows - self._size)
        return np.concatenate([rows, self._tail[first : first + rest]])


class BlockOrder:
    """Permutes blocks of rows, then shuffles the rows in each window of blocks."""

    def __init__(
        self, num_rows: int, block: int, window: int, seed: int, epoch: int
    ) -> None:
        self._num_rows = num_rows
        self._block = block
        self._window = block * window
        self._group = self._window * max(_WINDOW_ROWS // self._window, 1)
        self._key = seed, epoch
        num_blocks = -(-num_rows // block)
        self._blocks = Permutation(num_blocks, seed, epoch)
        # The rows' last block may be short: blocks that follow it in the permutation
        # begin earlier, by the number of missing rows.
        self._short = num_blocks * block - num_rows
        self._hole = num_rows + 1
        if self._short:
            self._hole = self._place_of(num_blocks - 1, num_blocks) * block
            self._hole += block - self._short
        self._latest: tuple[int, Any] = (-1, None)

    def _place_of(self, block: int, num_blocks: int) -> int:
        for start in range(0, num_blocks, _WINDOW_ROWS):
            stop = min(start + _WINDOW_ROWS, num_blocks)
            found = np.flatnonzero(self._blocks.rows(np.arange(start, stop)) == block)
            if found.size:
                return start + int(found[0])
        raise AssertionError("a permutation has every block")

    def rows(self, places: Array) -> Array:
        """Return the row numbers at places, which may be in any order."""
        if not len(places):
            return places
        first = int(places[0]) // self._group
        start = first * self._group
        inside = places - start
        if inside.min() >= 0 and inside.max() < self._group:
            found: Array = self._of_group(first)[inside]
            return found
        found = np.empty(len(places), np.int64)
        groups = places // self._group
        for group in np.unique(groups):
            inside = groups == group
            rows = self._of_group(int(group))
            found[inside] = rows[places[inside] - group * self._group]
        return found

    def _of_group(self, group: int) -> Array:
        """Return the row numbers of a group: windows that are computed together."""
        rows: Array
        kept, rows = self._latest
        if kept != group:
            start = group * self._group
            places = np.arange(start, min(start + self._group, self._num_rows))
            places[places >= self._hole] += self._short
            blocks = self._blocks.rows(places // self._block)
            rows = blocks * self._block + places % self._block
            # Sort each window by random keys. The missing rows of a short last window
            # get the greatest key, so that they stay at its end.
            keys = generator_of(*self._key, group + 1).random(self._group)
            keys[len(rows) :] = 1
            by_key = keys.reshape(-1, self._window).argsort(axis=1, kind="stable")
            by_key += np.arange(0, self._group, self._window)[:, np.newaxis]
            rows = rows[by_key.reshape(-1)[: len(rows)]]
            self._latest = group, rows
        return rows
