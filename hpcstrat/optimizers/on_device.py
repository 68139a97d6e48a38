"""The part of an optimizer's step that is made on a GPU.

Rules that have a kernel update all dense gradients of a type in one launch. Others, and
sparse gradients of which single rows are updated, go through their rule in Python, one
after the other, on CuPy's arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.gpu.optimizer_steps.gradient_sums import Norm, are_finite
from hpcstrat.engine.gpu.optimizer_steps.update_kernels import is_fused
from hpcstrat.engine.gpu.optimizer_steps.updates import (
    Scaling,
    Spans,
    Tables,
    real_view,
)
from hpcstrat.engine.typing import Array
from hpcstrat.optimizers.gradients import Gradient, scale, sum_of_squares
from hpcstrat.optimizers.parameters import Target

__all__ = ["DeviceStep", "Fused", "add", "all_finite", "set_zero"]

Fused = tuple[str, tuple[float, ...]]
"""A kernel and its numbers, see `Spans`; of LAMB, the last one is the rate."""

_MOST_ARRAYS = 3


def _has_kernel(kind: type) -> bool:
    """Whether a class has a kernel that does what its rule in Python does.

    A subclass may have another rule than the kernel of its base.
    """
    for each in kind.__mro__:
        if "_fused" in vars(each):
            return True
        if "update" in vars(each) or "_direction" in vars(each):
            return False
    return False


class DeviceStep:
    """An update of variables some of which are on a GPU.

    ``rule._fused`` returns a kernel and its numbers for a step, if the rule has one.
    ``gradients`` say which are sparse, as in each step.
    """

    def __init__(
        self,
        rule: Any,
        tables: Tables,
        targets: Sequence[Target],
        gradients: Sequence[Gradient],
    ) -> None:
        self._rule = rule
        self._tables = tables
        self._targets = targets
        groups: dict[np.dtype[Any], list[int]] = {}
        fuses = _has_kernel(type(rule))
        for index, (gradient, (_, wholes)) in enumerate(
            zip(gradients, targets, strict=True)
        ):
            by_rows = isinstance(gradient, IndexedSlices) and rule._by_rows
            value = wholes[0]
            if fuses and not by_rows and is_device(value) and is_fused(value.dtype):
                assert len(wholes) <= _MOST_ARRAYS
                groups.setdefault(value.dtype, []).append(index)
        self._groups = [(group, self._spans(group)) for group in groups.values()]
        fused = {index for group in groups.values() for index in group}
        self._apart = [i for i in range(len(targets)) if i not in fused]
        self._norm: tuple[list[Spans], Norm] | None = None

    def _spans(self, group: Sequence[int]) -> Spans:
        targets = [self._targets[index] for index in group]
        return self._tables.get(
            targets[0][1][0].dtype,
            [wholes[0].size for _, wholes in targets],
            [tuple([_pointer(array) for array in wholes]) for _, wholes in targets],
            [self._rule._is_marked(step.name) for step, _ in targets],
        )

    def update(
        self, combined: Sequence[Gradient], mean: float, limit: float | None
    ) -> None:
        """Make the step, for all variables.

        Overwrites the gradients. Waits for the GPU only where a norm is limited to
        which gradients in host memory contribute, too.
        """
        gradients: list[Any] = list(combined)
        for group, _ in self._groups:
            for index in group:
                if isinstance(gradients[index], IndexedSlices):
                    gradients[index] = gradients[index].to_dense()
        apart = [_values(gradients[index]) for index in self._apart]
        scale(apart, mean)
        scaling = Scaling(mean)
        if limit is not None:
            scaling.clip = self._clip(gradients, apart, mean, limit)
        for group, spans in self._groups:
            kernel, numbers = self._rule._fused(self._targets[group[0]][0])
            chosen = [gradients[index] for index in group]
            if kernel == "lamb":
                spans.lamb(chosen, scaling, numbers[:-1], numbers[-1])
            else:
                spans.update(kernel, chosen, scaling, numbers)
        for index in self._apart:
            step, wholes = self._targets[index]
            self._rule._update_one(step, gradients[index], wholes)

    def _clip(
        self, gradients: list[Any], apart: list[Array], mean: float, limit: float
    ) -> Any:
        """Return the factor of fused gradients, and apply it to the others."""
        spans = [part for _, part in self._groups]
        arrays = [[gradients[index] for index in group] for group, _ in self._groups]
        means = [mean] * len(spans)
        others = list(_by_type(self._tables, [a for a in apart if is_device(a)]))
        for part, chosen in others:
            spans.append(part)
            arrays.append(chosen)
            means.append(1.0)
        host = [array for array in apart if not is_device(array)]
        more = float(sum(sum_of_squares(array) for array in host))
        if self._norm is None or self._norm[0] != spans:
            self._norm = spans, Norm(spans)
        factor = self._norm[1].factor(arrays, means, limit, more)
        for part, chosen in others:
            part.scale(chosen, Scaling(clip=factor))
        if host:
            scale(host, float(factor[0]))
        return factor


def _values(gradient: Gradient) -> Array:
    return gradient.values if isinstance(gradient, IndexedSlices) else gradient


def _pointer(array: Any) -> int:
    pointer: int = array.data.ptr
    return pointer


def _by_type(
    tables: Tables, arrays: Iterable[Any], *, as_states: bool = False
) -> Iterator[tuple[Spans, list[Any]]]:
    """Yield arrays on a GPU as contiguous real ones, those of a type together."""
    groups: dict[np.dtype[Any], list[Any]] = {}
    for array in arrays:
        view = real_view(array)
        groups.setdefault(view.dtype, []).append(view)
    for dtype, group in groups.items():
        states = [(_pointer(view),) for view in group] if as_states else []
        yield tables.get(dtype, [view.size for view in group], states), group


def all_finite(tables: Tables, arrays: Sequence[Array]) -> bool:
    """Return whether no element of any array on a GPU is NaN or infinite.

    Waits for the GPU.
    """
    return not arrays or are_finite(list(_by_type(tables, arrays)))


def add(tables: Tables, pairs: Sequence[tuple[Array, Array]]) -> None:
    """Add gradients to sums on a GPU, in one launch for each type.

    Sums are contiguous; gradients need not be.
    """
    groups: dict[np.dtype[Any], list[tuple[Any, Any]]] = {}
    for total, gradient in pairs:
        flat: Any = gradient
        if not flat.flags.c_contiguous:
            flat = flat.copy("C")
        groups.setdefault(total.dtype, []).append((real_view(total), real_view(flat)))
    for group in groups.values():
        totals = [total for total, _ in group]
        ((spans, _),) = _by_type(tables, totals, as_states=True)
        spans.add([gradient for _, gradient in group])


def set_zero(tables: Tables, arrays: Sequence[Array]) -> None:
    """Set arrays on a GPU to zero, in one launch for each type."""
    for spans, _ in _by_type(tables, arrays, as_states=True):
        spans.clear()
