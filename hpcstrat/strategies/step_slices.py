"""`StepSlices`: optimizer steps in central storage; each rank updates one slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.slices import SlicedPiece, reduce_slices
from hpcstrat.engine.algorithms.work import slice_of
from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.packing import Bucket, Run, plan, spans_of, wire_dtype
from hpcstrat.engine.channel.call import describe_call, signature_text
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.strategies.update_backends import Copies
from hpcstrat.variables import Variable

_LINE_BYTES = 64
_PIECE_BYTES = 512 << 10
# The size of the blocks of each array that an elementwise rule updates one after the
# other: the rule reads a block many times, and finds it in the cache. A step of Adam on
# arrays of 64 MiB, in one thread, took 0.6 of the time of a step without blocks.
_BLOCK_BYTES = 256 << 10


class StepSlices(Copies):
    """The slices in which the ranks of a worker sum gradients and update variables.

    The elements of all variables of one dtype form one sequence, which is divided into
    slices, one for each rank. If the optimizer's rule is not ``by_elements``, slices
    end at the ends of variables. For a sparse gradient, each rank updates a range of
    rows, or all rows of some variables. The number of slices is the same on every
    worker: the number of ranks of the smallest worker.
    """

    sums_whole = False
    sums_in_place = False
    other_ranks_wait = True

    def __init__(
        self,
        strategy: Any,
        pairs: Sequence[tuple[Any, Variable]],
        label: str,
        op: ReduceOp,
        *,
        by_elements: bool,
    ) -> None:
        super().__init__(strategy, pairs, label, op, by_elements=by_elements)
        self._collectives = strategy.collectives
        self._channel: Any = strategy.collectives.channel
        topology = strategy.topology
        self._worker_id = topology.worker_id
        self._rank = topology.worker_comm.rank
        self._piece_bytes = min(_PIECE_BYTES, topology.slot_bytes)
        # A piece contains at least one cache line of each slice.
        most = self._piece_bytes // _LINE_BYTES
        self._count = min(topology.smallest_worker, most)
        sparse = [isinstance(gradient, IndexedSlices) for gradient, _ in pairs]
        self._sparse = [index for index, is_sparse in enumerate(sparse) if is_sparse]
        self._dense = [index for index in range(len(pairs)) if not sparse[index]]
        self._shapes = [variable.shape for _, variable in pairs]
        arrays = [pairs[index][0] for index in self._dense]
        self._call = describe_call(
            f"{label}({op.name})",
            signature_text(None, arrays),
            sum(array.nbytes for array in arrays),
        )
        self._pieces: list[SlicedPiece] = []
        # Pairs of arrays: one for sums in the wider dtype in which they are added, and
        # one for the same sums in the variables' dtype.
        self._narrowed: list[tuple[Array, Array]] = []
        # This rank's slices, as tuples: number of the variable, first element, end, and
        # a view of the combined gradient.
        self._own: list[tuple[int, int, int, Array]] = []
        self._nbytes = 1
        signatures = tuple((array.dtype, array.shape) for array in arrays)
        for bucket in plan(signatures).buckets:
            self._divide(bucket)

    def _divide(self, bucket: Bucket) -> None:
        """Plan how the ranks sum the gradients of a bucket, which have one dtype."""
        if not bucket.size:
            return
        wire, narrows = wire_dtype(bucket.dtype, self._op is ReduceOp.MEAN)
        line = max(1, _LINE_BYTES // wire.itemsize)
        bounds = self._bounds(bucket, line)
        longest = int(np.diff(bounds).max())
        room = self._piece_bytes // self._count // wire.itemsize
        columns = min(room, longest + line - 1) // line * line
        low, high = 0, 0
        if self._rank < self._count:
            low, high = bounds[self._rank], bounds[self._rank + 1]
        total = gradient = np.empty(high - low, wire)
        if narrows:
            gradient = np.empty(high - low, bucket.dtype)
            self._narrowed.append((total, gradient))
        for done in range(0, longest, columns):
            runs = []
            for rank in range(self._count):
                first = min(bounds[rank] + done, bounds[rank + 1])
                last = min(first + columns, bounds[rank + 1])
                start = rank * columns
                spans = spans_of(bucket, first, last, start - first)
                runs.append(Run(wire, start, last - first, spans))
            part = total[done : done + columns]
            self._pieces.append((tuple(runs), part if part.size else None))
        self._nbytes = max(self._nbytes, self._count * columns * wire.itemsize)
        self._claim(spans_of(bucket, low, high, -low), gradient)

    def _claim(
        self, spans: Sequence[tuple[int, int, int, int]], gradient: Array
    ) -> None:
        """Append the slices in ``spans`` to ``_own``, with views of ``gradient``."""
        most = _BLOCK_BYTES // gradient.dtype.itemsize
        for place, start, stop, at in spans:
            block = most if self._by_elements else stop - start
            for begin in range(start, stop, block):
                end, first = min(begin + block, stop), at + begin - start
                part = gradient[first : first + end - begin]
                self._own.append((self._dense[place], begin, end, part))

    def _bounds(self, bucket: Bucket, line: int) -> list[int]:
        """Return the first element of each slice, and the end of the last slice."""
        even = [bucket.size * rank // self._count for rank in range(self._count)]
        if self._by_elements:
            # Two ranks that write to the same cache line would slow each other down.
            return [*(start // line * line for start in even), bucket.size]
        ends = np.array([0, *(end for _, end, _ in bucket.parts)])
        nearest = [int(ends[np.argmin(np.abs(ends - start))]) for start in even]
        return [*nearest, bucket.size]

    def _rows(self) -> Iterator[tuple[int, slice]]:
        """Yield this rank's rows of each variable with a sparse gradient."""
        for number, index in enumerate(self._sparse):
            count = self._shapes[index][0]
            if self._rank >= self._count:
                continue
            if self._by_elements:
                yield index, slice_of(count, self._rank, self._count)
            elif number % self._count == self._rank:
                yield index, slice(0, count)

    def arrays_here(self, wholes: list[list[Array]]) -> list[tuple[int, list[Array]]]:
        own: list[tuple[int, list[Array]]] = []
        for index, start, stop, _ in self._own:
            parts = [whole.reshape(-1)[start:stop] for whole in wholes[index]]
            if not self._by_elements:
                parts = [part.reshape(self._shapes[index]) for part in parts]
            own.append((index, parts))
        for index, rows in self._rows():
            own.append((index, [whole[rows] for whole in wholes[index]]))
        return own

    def reduce(self, gradients: list[Any], out: list[Array] | None = None) -> list[Any]:
        """Return the combined gradients of this rank's slices.

        Collective over the strategy's replicas. Slices are in the order of
        `arrays_here`. The next call of ``reduce`` overwrites the returned arrays.
        """
        del out
        [gradients] = gradients
        channel, combined = self._channel, list[Any]()
        if self._sparse:
            rows: list[Any] = [gradients[index] for index in self._sparse]
            sparse = [
                IndexedSlices(_lasting(np.asarray(r.values)), r.indices, r.dense_shape)
                for r in rows
            ]
            combined = self._collectives.batch_reduce(self._op, sparse, self._label)
        if self._dense:
            # Pending reductions end first, because they use the same shared memory.
            channel.pending.drain()
            steps = reduce_slices(
                self._pieces,
                [_flat(gradients[index]) for index in self._dense],
                self._call,
                channel,
                place_bytes=channel.rings.place_bytes(self._nbytes),
                divisor=self._divisor,
            )
            channel.drive(steps, self._call, self._collectives.timeout_seconds)
        for total, narrow in self._narrowed:
            call_without_fp_warnings(assign, narrow, ..., total)
        own: list[Any] = []
        for index, _, _, part in self._own:
            own.append(part if self._by_elements else part.reshape(self._shapes[index]))
        by_index = dict(zip(self._sparse, combined, strict=True))
        own += [self._own_rows(by_index[index], rows) for index, rows in self._rows()]
        return own

    @property
    def _divisor(self) -> int:
        """The number by which a sum is divided for ``MEAN``; 0 for ``SUM``."""
        return self._collectives.size if self._op is ReduceOp.MEAN else 0

    def _own_rows(self, gradient: IndexedSlices, rows: slice) -> IndexedSlices:
        kept = (gradient.indices >= rows.start) & (gradient.indices < rows.stop)
        shape = (rows.stop - rows.start, *gradient.values.shape[1:])
        indices = gradient.indices[kept] - rows.start
        return IndexedSlices(gradient.values[kept], indices, shape)

    def all_finite(self, finite: bool) -> bool:
        return not self.total([float(not finite)])

    def total(self, squares: Sequence[Any]) -> float:
        # Only the first worker's ranks contribute: every worker's slices cover all
        # elements, and each element must be counted once.
        own = np.array(0.0 if self._worker_id else sum(squares), np.float64)
        what = f"{self._label}: a number of all slices"
        return float(self._collectives.batch_reduce(ReduceOp.SUM, own, what))

    def gather_whole(self, reduced: list[Any], own: list[Any]) -> list[Any]:
        del reduced
        found: list[Any] = self._collectives.batch_reduce(self._op, own, self._label)
        return found

    def end_update(self, number: int, targets: Sequence[Any]) -> None:
        """Wait for the other ranks' updates."""
        call = describe_call(f"end of {self._label}")
        self._channel.agree(call, self._collectives.timeout_seconds)


def _flat(gradient: Any) -> Array:
    return _lasting(np.ascontiguousarray(gradient).reshape(-1))


def _lasting(array: Array) -> Array:
    """Return an array that no rank writes to: a copy, if the array is read-only.

    A read-only array may be a view of a central variable, which other ranks update."""
    return array if array.flags.writeable else array.copy()
