"""A step of an optimizer, planned once for all steps with gradients of the same
kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import without_fp_warnings
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.arrays.packing import side_by_side
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.optimizers.gradients import Pairs, merged_rows
from hpcstrat.optimizers.non_finite import NonFinite, all_finite, are_finite, is_finite
from hpcstrat.optimizers.parameters import Step, Target
from hpcstrat.optimizers.rules import is_of_elements
from hpcstrat.optimizers.sharding import Parts
from hpcstrat.strategies.update_backends import UpdateBackend
from hpcstrat.variables import Variable

# Copying so many elements there and back takes less time than calling NumPy for each
# array: a step of 20 arrays of 4,096 elements takes half the time, of 64 a quarter. A
# bundle and its state fit into the cache.
_SMALL = 4096
_MOST_IN_BUNDLE = 1 << 16


class Bundle:
    """Small variables of one type that an elementwise rule updates as one array.

    Each step copies them side by side, and back, so that programs and checkpoints find
    them at the same place. The bits are those of separate updates.
    """

    def __init__(self, indices: list[int], targets: list[Target]) -> None:
        self.indices = indices
        first, wholes = targets[indices[0]]
        self.step = Step(0.0, 0, first.name)
        size = sum(targets[index][1][0].size for index in indices)
        shapes = [targets[index][1][0].shape for index in indices]
        self.gradient, *self._flats = (
            np.empty(size, wholes[0].dtype) for _ in range(1 + len(wholes))
        )
        self.gradients = side_by_side(self.gradient, shapes)
        self._copies = [
            pair
            for kind, flat in enumerate(self._flats)
            for pair in zip(
                side_by_side(flat, shapes),
                [targets[index][1][kind] for index in indices],
                strict=True,
            )
        ]

    def update(self, rule: Any, gradients: Sequence[Array]) -> None:
        """Update the bundled variables; ``gradients`` are those of all variables."""
        if gradients is not self.gradients:
            for view, index in zip(self.gradients, self.indices, strict=True):
                view[...] = gradients[index]
        for view, whole in self._copies:
            view[...] = whole
        rule.update(self.step, self.gradient, *self._flats)
        for view, whole in self._copies:
            whole[...] = view


def _bundles(rule: Any, targets: list[Target]) -> list[Bundle]:
    """Return bundles of small variables, separate for types, and for marked
    variables.
    """
    groups: dict[Any, list[list[int]]] = {}
    if not is_of_elements(type(rule)):
        return []
    sizes = [wholes[0].size for _, wholes in targets]
    for index, (step, wholes) in enumerate(targets):
        if sizes[index] > _SMALL or wholes[0].dtype.kind == "c":
            continue
        group = groups.setdefault((wholes[0].dtype, rule._is_marked(step.name)), [[]])
        if sum(sizes[i] for i in group[-1]) + sizes[index] > _MOST_IN_BUNDLE:
            group.append([])
        group[-1].append(index)
    chosen = [part for group in groups.values() for part in group if len(part) > 1]
    return [Bundle(part, targets) for part in chosen]


class Routine:
    """A step with gradients of the same kinds for the same variables.

    The arrays of the variables and of their state never change. A step has the order:
    `UpdateBackend.reduce` combines gradients, and `update` does the rest.
    """

    def __init__(
        self,
        strategy: Replicas,
        pairs: Sequence[tuple[Any, Variable]],
        backend: UpdateBackend,
    ) -> None:
        self._strategy: Any = strategy
        self._expected = [
            (v, type(v.component), v.dtype, v.shape, _gpu(v.component))
            for _, v in pairs
        ]
        self.backend = backend
        self.non_finite: str = strategy.settings.non_finite
        # Whether gradients are of NumPy and summed as in the last step, and the arrays
        # for the sums, if they are the same in each step.
        self.repeats = False
        self.sums: list[Array] | None = None
        # One target for each gradient or slice of one; the first step makes them.
        self.begun = False
        self.targets: list[Target] = []
        # The Step objects for rules: of bundles, and of single variables.
        self.steps: list[Step] = []
        self.bundles: list[Bundle] = []
        self.apart: list[int] = []
        # All combined gradients side by side, if all are bundled and of one type.
        self.flat: Array | None = None

    @without_fp_warnings
    def update(
        self, optimizer: Any, reduced: list[Any], given: list[Pairs], rate: float
    ) -> bool:
        """Update variables with combined gradients; return False for a skipped step.

        Collective over the strategy's replicas. ``given`` are the gradients of each
        replica of this process.
        """
        backend = self.backend
        if not self.begun:
            reduced = [
                merged_rows(g) if isinstance(g, IndexedSlices) else g for g in reduced
            ]
        if self.non_finite != "off" and self._refuses(optimizer, reduced, given):
            return False
        optimizer.condition(reduced, backend)
        reduced = backend.gradients_here(reduced)
        if not self.begun:
            self._begin(optimizer, given[0], reduced)
        # A rule sees the number of this step: Adam's bias correction counts from 1.
        number = int(optimizer.iterations.component) + 1
        for step in self.steps:
            step.rate, step.number = rate, number
        backend.update(optimizer, reduced, self)
        # Last: after an error in a rule the count is as before.
        optimizer.iterations.component[...] = number
        return True

    def _refuses(self, optimizer: Any, reduced: list[Any], given: list[Pairs]) -> bool:
        """Whether to skip a step because its gradients are not finite."""
        if not self.repeats:
            finite = are_finite(reduced)
        elif self.flat is None:
            finite = all_finite(reduced)
        else:
            finite = is_finite(self.flat)
        if self.backend.all_finite(finite):
            return False
        # Whole gradients, to name the first that is not finite.
        whole = self.backend.gather_whole(
            reduced, [gradient for gradient, _ in given[0]]
        )
        # A combined gradient has the same bits on every replica: all decide alike.
        dealing: NonFinite = optimizer._non_finite
        return dealing.refuses(self.non_finite, self._strategy, given, whole)

    def _begin(self, optimizer: Any, pairs: Pairs, gradients: Sequence[Any]) -> None:
        """Make the state of the variables, and plan their updates."""
        sharded = isinstance(self.backend, Parts)
        wholes = [optimizer.arrays_of(variable, sharded) for _, variable in pairs]
        self.targets = [
            (Step(0.0, 0, pairs[index][1].name), arrays)
            for index, arrays in self.backend.arrays_here(wholes)
        ]
        dense = all(type(gradient) is np.ndarray for gradient in gradients)
        # Sparse gradients, whose other rows a bundle would touch, and arrays on a GPU,
        # where each copy is a launch, are applied one by one.
        self.bundles = _bundles(optimizer, self.targets) if dense else []
        bundled = {index for bundle in self.bundles for index in bundle.indices}
        self.apart = [i for i in range(len(self.targets)) if i not in bundled]
        self.steps = [bundle.step for bundle in self.bundles]
        self.steps += [self.targets[index][0] for index in self.apart]
        self.begun = True

    def repeat(self) -> None:
        """Let further steps sum gradients into the same arrays."""
        on_gpu = any(is_device(wholes[0]) for _, wholes in self.targets)
        if on_gpu or not self.backend.sums_in_place:
            return
        flat, sums = None, None
        if len(self.bundles) == 1 and not self.apart:
            flat, sums = self.bundles[0].gradient, self.bundles[0].gradients
        elif not self.apart and len({b.gradient.dtype for b in self.bundles}) == 1:
            shapes = [wholes[0].shape for _, wholes in self.targets]
            size = sum(bundle.gradient.size for bundle in self.bundles)
            flat = np.empty(size, self.bundles[0].gradient.dtype)
            sums = side_by_side(flat, shapes)
        self.repeats, self.flat, self.sums = True, flat, sums

    def fits(self, strategy: Replicas, pairs: Sequence[tuple[Any, Variable]]) -> bool:
        """Whether another step has gradients of the same kinds, and needs no checks."""
        if strategy is not self._strategy or len(pairs) != len(self._expected):
            return False
        # The hot path: gradients of any other kind are checked by `checked`.
        for (gradient, given), (variable, kind, dtype, shape, gpu) in zip(
            pairs, self._expected, strict=True
        ):
            if (
                given is not variable
                or type(gradient) is not kind
                or gradient.dtype != dtype
                or gradient.shape != shape
                or (gpu is not None and gpu != _gpu(gradient))
            ):
                return False
        return True


def _gpu(array: Any) -> Any:
    # An array without elements is on no GPU in particular.
    return array.data.device_id if is_device(array) and array.size else None
