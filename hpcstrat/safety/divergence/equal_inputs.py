"""A warning if all ranks compute the same: the inputs of their first steps are equal.

Each rank writes one record to the shared memory of its worker: a hash of the inputs of
its first steps. Replica 0 reads the records of the other ranks in its later steps, and
never waits for them, so that ranks that make different calls cannot hang here. Ranks of
other workers have other memory: only the ranks of the first worker are compared.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.arrays.samples import digest_of_rows, has_plain_bytes
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.observe.arrival_report import ROW_BYTES
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.engine.typing import Array

__all__ = ["EqualInputs"]

_STEPS = 3
# After this many steps whose inputs were hashed, or calls of any kind, stop looking.
_MOST_HASHED = 8
_MOST_CALLS = 100
_MOST_BYTES = 16 << 20
# An array with fewer elements is more likely a setting, or a key of random numbers.
_LEAST_ELEMENTS = 16

# A record is the hash and its complement, so that readers detect a half-written record.
# The records are between the statistics of arrivals and the watchdog's page.
_RECORD = struct.Struct("=QQ")
_START = 480
_SCALARS = (bool, int, float, complex, str, bytes, np.generic)
_ALL_BITS = (1 << 64) - 1
assert _START >= ROW_BYTES

_ADVICE = (
    "so that all replicas compute the same; give each rank its own rows, by "
    "experimental_distribute_dataset, array[strategy.rows(len(array))], or a "
    "DistributedSampler in the DataLoader; if this is intended, silence the warning "
    "with logging.getLogger('hpcstrat.inputs').setLevel('ERROR')"
)


class EqualInputs:
    """Compares the inputs of this rank's first steps with those of its worker's ranks.

    Not collective. ``record`` is the number of the record, 0 or 1; ``what`` describes
    the inputs. If ``must_change``, steps with the same inputs as the step before do not
    count, because an array that never changes may be configuration; and no step counts
    before ``counts`` is set.
    """

    def __init__(
        self, topology: Topology, record: int, what: str, *, must_change: bool
    ) -> None:
        start = _START + record * _RECORD.size
        size = topology.worker_comm.size
        self._pages: list[memoryview] = [
            topology.status(rank)[start : start + _RECORD.size] for rank in range(size)
        ]
        self._own = topology.worker_comm.rank
        self._warns = topology.replica_id == 0
        self._what, self._must_change = what, must_change
        self._is_whole = topology.num_workers == 1
        self._calls = self._hashed = self._counted = 0
        self._last: int | None = None
        self._mark = 0
        # False while inputs may be the program's parameters, which are equal.
        self.counts = not must_change
        self.done = False
        # Replica 0, which warns, sees the records of its own worker only.
        if size == 1 or topology.worker_id:
            self.stop()

    def see(self, leaves: Sequence[Any], read: Callable[[Any], Array | None]) -> None:
        """Add the inputs of a step.

        A step without an array of several rows, or only with constant ones, does not
        count. ``read`` returns a leaf as an array, or None for other values.
        """
        if self.done:
            return
        self._calls += 1
        if self.counts and self._counted < _STEPS:
            try:
                self._add(leaves, read)
            # Advice must not end a program that passes arrays of an unknown kind.
            except Exception as error:
                get_logger("inputs").debug("inputs cannot be compared: %r", error)
                self.stop()
        self.look()
        if self._calls >= _MOST_CALLS:
            self.stop()

    def _add(self, leaves: Sequence[Any], read: Callable[[Any], Array | None]) -> None:
        # ``mark`` is of all values; ``large`` only of arrays that may be a batch.
        mark, large, counts = 0, 0, False
        for leaf in leaves:
            array = read(leaf)
            if array is None:
                if isinstance(leaf, _SCALARS):
                    mark = xxh3_64_intdigest(repr(leaf).encode(errors="replace"), mark)
                continue
            if is_device(array) or not has_plain_bytes(array):
                # The values cannot be hashed, or only after a wait for the GPU.
                self.stop()
                return
            # Arrays without a first dimension get one.
            rows = array if array.ndim else array[np.newaxis]
            own, is_constant = digest_of_rows(rows, _MOST_BYTES)
            mark = _mixed(mark, own)
            if len(rows) > 1 and rows.size >= _LEAST_ELEMENTS and not is_constant:
                counts, large = True, _mixed(large, own)
        if not counts:
            return
        self._count(mark, large)

    def _count(self, mark: int, large: int) -> None:
        """Count a step, given hashes of all inputs and of its large arrays."""
        self._hashed += 1
        if not (self._must_change and large == self._last):
            self._counted += 1
            self._mark = _mixed(self._mark, mark)
        self._last = large
        if self._counted == _STEPS:
            record = _RECORD.pack(self._mark, self._mark ^ _ALL_BITS)
            self._pages[self._own][:] = record
            if not self._warns:
                self.stop()
        elif self._hashed >= _MOST_HASHED:
            self.stop()

    def look(self) -> None:
        """Warn on replica 0 if all ranks have written equal records."""
        if self.done or self._counted < _STEPS:
            return
        found = [_RECORD.unpack(page) for page in self._pages]
        if any(mark ^ check != _ALL_BITS for mark, check in found):
            # Another rank has not written its record, and perhaps never will.
            return
        size = len(found)
        self.stop()
        if len(set(found)) == 1:
            where = f"all {size} ranks"
            if not self._is_whole:
                where += " of the first worker"
            get_logger("inputs").warning(
                "%s were bitwise equal on %s in each of the first %d steps, %s",
                self._what,
                where,
                _STEPS,
                _ADVICE,
            )

    def stop(self) -> None:
        """Release the views of the shared memory; later calls do nothing."""
        self.done = True
        for page in self._pages:
            page.release()
        self._pages = []


def _mixed(mark: int, digest: int) -> int:
    return xxh3_64_intdigest(digest.to_bytes(8, "little"), mark)
