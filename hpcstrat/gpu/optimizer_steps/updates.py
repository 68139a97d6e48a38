"""Steps of optimizers on a GPU: all arrays of a type in one launch, or a few.

All launches go to the program's current stream, and none waits for the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.gpu.optimizer_steps.update_kernels import (
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
    """Return a contiguous array as one of real numbers.

    Not collective.

    Parameters
    ----------
    array : cupy.ndarray
        Real or complex.

    Returns
    -------
    cupy.ndarray of shape (n,)
        Sharing its memory.
    """
    flat = array.reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(np.dtype(f"f{flat.dtype.itemsize // 2}"))
    return flat


class Scaling:
    """What combined gradients are multiplied by, before they are used.

    Parameters
    ----------
    mean : float
        The first factor.
    clip : cupy.ndarray of float64, optional
        The second one, in its first element; see `Norm`.
    """

    __slots__ = ("clip", "mean")

    def __init__(self, mean: float = 1.0, clip: Any = None) -> None:
        self.mean = mean
        self.clip = clip


class Spans:
    """Arrays of one type, which one launch goes through.

    Not collective. The tables that the kernels read are copied to the device here, and
    once for each set of gradients' addresses; few of these sets are kept.

    Parameters
    ----------
    dtype : dtype
        One that `is_fused`.
    sizes : sequence of int
        Elements of each array.
    states : sequence of tuple of int, optional
        For each array, addresses of the variable and of at most two arrays of its
        state.
    marks : sequence of bool, optional
        Which arrays are marked, for rules with exceptions.

    Attributes
    ----------
    dtype : dtype
        Of the arrays.
    kind : {"F16", "BF16", "F32", "F64"}
        The name that the kernels have for it.
    chunks : int
        How many blocks have something to do.
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
        self._kept: OrderedDict[Key, Any] = OrderedDict()
        self._lamb: tuple[Any, ...] = ()

    def number(self, value: float) -> Any:
        """Return a number rounded to the type of the arrays, for a kernel.

        Not collective.

        Parameters
        ----------
        value : float
            The number.

        Returns
        -------
        numpy.float32 or numpy.float64
            What the kernels take.
        """
        return self._real(self.dtype.type(value))

    def factor(self, value: float) -> Any:
        """Return a factor of gradients, not rounded to a half type, for a kernel.

        Not collective.

        Parameters
        ----------
        value : float
            The factor.

        Returns
        -------
        numpy.float32 or numpy.float64
            What the kernels take.
        """
        return self._real(value)

    def launch(self, name: str, gradients: Sequence[Any], *arguments: Any) -> None:
        """Launch a kernel.

        Not collective.

        Parameters
        ----------
        name : str
            Without the type.
        gradients : sequence of cupy.ndarray
            Contiguous, of the type and the sizes given; none for kernels that read no
            gradients.
        *arguments : object
            After the tables.
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
        """Make one step of a rule.

        Not collective.

        Parameters
        ----------
        name : {"sgd", "momentum", "nesterov", "adagrad", "adam"}
            Which rule.
        gradients : sequence of cupy.ndarray
            Not modified.
        scaling : Scaling
            Of the gradients.
        numbers : sequence of float
            What the kernel takes, in its order.
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
        """Make one step of LAMB.

        Not collective.

        Parameters
        ----------
        gradients : sequence of cupy.ndarray
            Overwritten.
        scaling : Scaling
            Of the gradients.
        numbers : sequence of float
            Those of Adam without the rate, and the weight decay.
        rate : float
            The learning rate.
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
        firsts, values, directions, rates = self._lamb
        self.launch(
            *("lamb_direction", gradients, *self._scaled(scaling)),
            *[self.number(value) for value in numbers],
            *(values[0], directions[0]),
        )
        for sums in (values, directions):
            fold(self.kind, sums, firsts, count)
        launch_small(
            self.kind,
            *("lamb_rates", count, values[2], directions[2]),
            *(np.int32(count), np.float64(rate), rates),
        )
        self.launch("lamb_step", gradients, rates)

    def add(self, gradients: Sequence[Any]) -> None:
        """Add gradients to the arrays.

        Not collective.

        Parameters
        ----------
        gradients : sequence of cupy.ndarray
            Not modified.
        """
        self.launch("add", gradients)

    def clear(self) -> None:
        """Set the arrays to zero.

        Not collective.
        """
        self.launch("clear", ())

    def scale(self, gradients: Sequence[Any], scaling: Scaling) -> None:
        """Multiply gradients in place.

        Not collective.

        Parameters
        ----------
        gradients : sequence of cupy.ndarray
            Overwritten.
        scaling : Scaling
            By what.
        """
        self.launch("scale", gradients, *self._scaled(scaling))


class Tables:
    """Spans, kept by the memory they are of."""

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
        """Return the spans of arrays.

        Not collective.

        Parameters
        ----------
        dtype : dtype
            As for `Spans`.
        sizes : sequence of int
            As for `Spans`.
        states : sequence of tuple of int
            As for `Spans`.
        marks : sequence of bool
            As for `Spans`.

        Returns
        -------
        Spans
            New, or one of those used last.
        """
        key = dtype, tuple(sizes), tuple(states), tuple(marks)
        spans = self._kept.get(key)
        if spans is None:
            spans = self._kept[key] = Spans(dtype, sizes, states, marks)
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return spans
