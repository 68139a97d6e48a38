"""Sums over gradients on a GPU: norms, what is not finite, rows that come again.

All orders of summation are fixed: equal bits give equal bits, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.gpu.optimizer_steps.update_kernels import (
    LANES,
    PARTS,
    fold,
    kind_of,
    launch_small,
)
from hpcstrat.engine.gpu.optimizer_steps.updates import Spans, real_view
from hpcstrat.engine.typing import Array

__all__ = ["Norm", "are_finite", "sum_rows"]


class Norm:
    """The norm over the gradients of several spans together, kept on the device.

    Equal bits of gradients give equal bits.
    """

    def __init__(self, spans: Sequence[Spans]) -> None:
        import cupy

        self._spans = spans
        self._chunks = chunks = sum(part.chunks for part in spans)
        # Without any chunk the parts stay 0.
        self._sums = [cupy.zeros(n) for n in (LANES * chunks, chunks, PARTS)]
        self._firsts = cupy.asarray(np.array([0, chunks], np.int32))
        self._factor = cupy.empty(2)

    def factor(
        self,
        gradients: Sequence[Sequence[Any]],
        means: Sequence[float],
        limit: float,
        more: float = 0.0,
    ) -> Any:
        """Return what makes gradients have at most the norm ``limit``, as a factor.

        ``means`` are what those of each of the spans are multiplied by first, ``more``
        is the square of the norm of what else counts. Two float64 on the device, valid
        until the next call: the factor, NaN for a norm that is not finite, and the sum
        of squares without ``more``.
        """
        lanes, kind, start = self._sums[0], self._spans[0].kind, 0
        for part, arrays, mean in zip(self._spans, gradients, means, strict=True):
            part.launch(
                "squares",
                arrays,
                part.factor(mean),
                lanes[start:],
                np.int32(self._chunks),
            )
            start += part.chunks
        if self._chunks:
            fold(kind, self._sums, self._firsts, 1)
        launch_small(
            kind,
            "clip_factor",
            1,
            self._sums[2],
            np.float64(more),
            np.float64(limit),
            self._factor,
        )
        return self._factor


def are_finite(groups: Sequence[tuple[Spans, Sequence[Any]]]) -> bool:
    """Whether no element of any array is NaN or infinite; waits for the device."""
    import cupy

    found = cupy.zeros(1, np.int32)
    for spans, arrays in groups:
        spans.launch("look", arrays, found)
    # The one copy to the host, for all arrays together.
    return not int(found[0])


def sum_rows(rows: Array, indices: Array) -> tuple[Array, Array]:
    """Add up rows that have the same index, in the order in which they come.

    Returns the sums, and their indices, ascending, each once; the same bits each time.
    Waits for the device, which alone knows how many indices there are.
    """
    import cupy

    count = len(indices)
    if not count:
        return rows.copy(), indices.copy()
    # One number for index and place, so that no sort can change the order of equals.
    places = cupy.arange(count, dtype=np.int64)
    ascending = cupy.sort(indices.astype(np.int64, copy=False) * count + places)
    order = ascending % count
    ascending //= count
    changes = cupy.flatnonzero(ascending[1:] != ascending[:-1]) + 1
    ends = [cupy.asarray(np.array([end], np.int64)) for end in (0, count)]
    starts = cupy.concatenate([ends[0], changes, ends[1]])
    unique = ascending[starts[:-1]]
    results = cupy.empty((len(unique), *rows.shape[1:]), rows.dtype)
    flat = real_view(cupy.ascontiguousarray(rows))
    kind = kind_of(flat.dtype)
    assert kind is not None
    if results.size:
        launch_small(
            kind,
            "sum_rows",
            flat.size // count * len(unique),
            flat,
            order,
            starts,
            real_view(results),
            np.int64(len(unique)),
            np.int64(flat.size // count),
        )
    return results, unique
