"""Steps of optimizers on a GPU: all arrays of a type in one launch, or a few.

All launches go to the program's current stream, and none waits for the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.gpu.optimizer_steps.update_kernels import (
    CHUNK,
    LANES,
    MOST_BLOCKS,
    PARTS,
    THREADS,
    fold,
    kernel,
    kind_of,
    launch_small,
)

__all__ = ["Scaling", "Spans", "Tables", "real_view"]

_MOST_KEPT = 16

Key = tuple[Any, ...]


def real_view(array: Any) -> Any:
    """Return the memory of a contiguous array as real numbers, of shape (n,)."""
    flat = array.reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(np.dtype(f"f{flat.dtype.itemsize // 2}"))
    return flat


class Scaling:
    """The factors of combined gradients, before they are used.

    ``clip`` is the second factor, in its first element; see `Norm`.
    """

    __slots__ = ("clip", "mean")

    def __init__(self, mean: float = 1.0, clip: Any = None) -> None:
        self.mean = mean
        self.clip = clip


class Spans:
    """Arrays of one type, which one launch goes through.

    For each array there may be the addresses of the variable and of at most two arrays
    of its state, and a mark, for rules with exceptions. The tables that the kernels
    read are copied to the device here, and once for each set of gradients' addresses;
    few of these sets are kept.
    """

    def __init__(
        self,
        dtype: np.dtype[Any],
        sizes: Sequence[int],
        states: Sequence[tuple[int, ...]] = (),
        marks: Sequence[bool] = (),
    ) -> None:
        import cupy

        kind = kind_of(dtype)
        assert kind is not None
        self.dtype = dtype
        self.kind = kind
        self._real = np.float64 if kind == "F64" else np.float32
        count = len(sizes)
        # As `updates.cu` reads them: three addresses, size, first chunk, mark.
        rows = np.zeros((count, 6), np.int64)
        rows[:, 3] = sizes
        each = -(-rows[:, 3] // CHUNK)
        rows[:, 4] = np.cumsum(each) - each
        for row, state in zip(rows, states, strict=False):
            row[: len(state)] = state
        if marks:
            rows[:, 5] = marks
        self._count = count
        self.chunks = int(each.sum())
        self._rows = cupy.asarray(rows)
        self._owners = cupy.asarray(np.repeat(np.arange(count, dtype=np.int32), each))
        self._firsts = np.append(rows[:, 4], self.chunks).astype(np.int32)
        # The pool gives gradients the same few addresses in turn, step after step.
        self._kept: OrderedDict[Key, Any] = OrderedDict()
        self._lamb: tuple[Any, ...] = ()

    def number(self, value: float) -> Any:
        """Return a number rounded to the type of the arrays, for a kernel."""
        # Rounded as the host rounds it, where arrays of a half type meet it.
        return self._real(self.dtype.type(value))

    def factor(self, value: float) -> Any:
        """Return a factor of gradients, not rounded to a half type, for a kernel."""
        return self._real(value)

    def launch(self, name: str, gradients: Sequence[Any], *arguments: Any) -> None:
        """Launch a kernel, named without the type; the arguments come after the tables.

        Gradients are contiguous, of the type and sizes given; none for kernels that
        read none.
        """
        if not self.chunks:
            return
        kernel(self.kind, name)(
            (min(self.chunks, MOST_BLOCKS),),
            (THREADS,),
            (
                *(self._addresses(gradients), self._rows, self._owners),
                *(np.int32(self.chunks), *arguments),
            ),
        )

    def _addresses(self, gradients: Sequence[Any]) -> Any:
        key = tuple([gradient.data.ptr for gradient in gradients])
        table = self._kept.get(key)
        if table is None:
            import cupy

            assert all(gradient.flags.c_contiguous for gradient in gradients)
            # In the order of the stream: nothing waits for this copy.
            table = cupy.asarray(np.array(key or [0] * self._count, np.int64))
            self._kept[key] = table
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return table

    def update(
        self,
        name: str,
        gradients: Sequence[Any],
        scaling: Scaling,
        numbers: Sequence[float],
    ) -> None:
        """Make one step of sgd, momentum, nesterov, adagrad or adam.

        Gradients are not modified; the numbers are in the order of the kernel.
        """
        self.launch(
            name,
            gradients,
            *self._scaled(scaling),
            *[self.number(value) for value in numbers],
        )

    def _scaled(self, scaling: Scaling) -> tuple[Any, Any]:
        clip = scaling.clip
        return self.factor(scaling.mean), np.uint64(0) if clip is None else clip

    def lamb(
        self,
        gradients: Sequence[Any],
        scaling: Scaling,
        numbers: Sequence[float],
        rate: float,
    ) -> None:
        """Make one step of LAMB; overwrites the gradients.

        The numbers are those of Adam without the rate, and the weight decay.
        """
        if not self.chunks:
            return
        chunks, count = self.chunks, self._count
        if not self._lamb:
            import cupy

            firsts = cupy.asarray(self._firsts)
            pairs = [
                [cupy.empty(n) for n in (LANES * chunks, chunks, PARTS * count)]
                for _ in range(2)
            ]
            self._lamb = firsts, *pairs, cupy.empty(count)
        # The norms of values and of directions, of each array: they stay on the device,
        # where the last kernel makes rates of them.
        firsts, values, directions, rates = self._lamb
        self.launch(
            "lamb_direction",
            gradients,
            *self._scaled(scaling),
            *[self.number(value) for value in numbers],
            values[0],
            directions[0],
        )
        for sums in (values, directions):
            fold(self.kind, sums, firsts, count)
        launch_small(
            self.kind,
            "lamb_rates",
            count,
            values[2],
            directions[2],
            np.int32(count),
            np.float64(rate),
            rates,
        )
        self.launch("lamb_step", gradients, rates)

    def add(self, gradients: Sequence[Any]) -> None:
        """Add gradients to the arrays."""
        self.launch("add", gradients)

    def clear(self) -> None:
        """Set the arrays to zero."""
        self.launch("clear", ())

    def scale(self, gradients: Sequence[Any], scaling: Scaling) -> None:
        """Multiply gradients in place."""
        self.launch("scale", gradients, *self._scaled(scaling))


class Tables:
    """Spans, kept by the memory they are of; those used last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, Spans] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tables:
        """Return an empty one: a copy has other memory."""
        return Tables()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return an empty one."""
        return Tables, ()

    def get(
        self,
        dtype: np.dtype[Any],
        sizes: Sequence[int],
        states: Sequence[tuple[int, ...]] = (),
        marks: Sequence[bool] = (),
    ) -> Spans:
        """Return the spans of arrays, as `Spans` makes them."""
        key = dtype, tuple(sizes), tuple(states), tuple(marks)
        spans = self._kept.get(key)
        if spans is None:
            spans = self._kept[key] = Spans(dtype, sizes, states, marks)
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return spans
