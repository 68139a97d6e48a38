"""Work that is the same in all steps of a training loop, and is done once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.arrays.packing import side_by_side
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.optimizers.parameters import Step, Target
from hpcstrat.optimizers.rules import is_of_elements
from hpcstrat.strategies.update_backends import UpdateBackend
from hpcstrat.variables import Variable

# Up to so many elements it takes less time to copy arrays there and back than to call
# NumPy for each: a step of 20 arrays of 4,096 takes half the time, of 64 a quarter. A
# bundle is to stay in the cache, with its state.
_SMALL = 4096
_MOST_IN_BUNDLE = 1 << 16


class Bundle:
    """Small variables of one type that a rule of elements updates as if they were one.

    For each step they are copied side by side, and back. So they stay where programs
    and checkpoints hold them, and their bits are those of updates one by one.
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
        """Update the variables with combined gradients, those of all variables."""
        if gradients is not self.gradients:
            for view, index in zip(self.gradients, self.indices, strict=True):
                view[...] = gradients[index]
        for view, whole in self._copies:
            view[...] = whole
        rule.update(self.step, self.gradient, *self._flats)
        for view, whole in self._copies:
            whole[...] = view


def _bundles(rule: Any, targets: list[Target]) -> list[Bundle]:
    """Return the small variables of each type, those that decay apart from the rest."""
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
    """A step with a dense gradient for each of the same variables.

    Its arrays, those of variables and their state, stay the same for good.
    """

    def __init__(
        self,
        strategy: Replicas,
        pairs: Sequence[tuple[Any, Variable]],
        backend: UpdateBackend,
    ) -> None:
        self._strategy = strategy
        self._expected = [
            (v, type(v.component), v.dtype, v.shape, _gpu(v.component))
            for _, v in pairs
        ]
        self.backend = backend
        self.non_finite: str = strategy.settings.non_finite
        # Whether the gradients are of NumPy, and summed as in the step before; and the
        # arrays for their sums, where they are always the same.
        self.repeats = False
        self.sums: list[Array] | None = None
        # One target for each gradient, or slice of one; made in the first step.
        self.begun = False
        self.targets: list[Target] = []
        # The Step objects that rules are given: of bundles, and of single variables.
        self.steps: list[Step] = []
        self.bundles: list[Bundle] = []
        self.apart: list[int] = []
        # All combined gradients side by side, where all are bundled and of one type.
        self.flat: Array | None = None

    def begin(self, rule: Any, targets: list[Target], gradients: Sequence[Any]) -> None:
        """Note the variables and their state, which the first step has made."""
        self.begun, self.targets = True, targets
        dense = all(type(gradient) is np.ndarray for gradient in gradients)
        # Rows are updated one by one: a bundle would touch the others, too. So is what
        # is on a GPU, where each copy is a launch.
        self.bundles = _bundles(rule, targets) if dense else []
        bundled = {index for bundle in self.bundles for index in bundle.indices}
        self.apart = [i for i in range(len(targets)) if i not in bundled]
        self.steps = [bundle.step for bundle in self.bundles]
        self.steps += [targets[index][0] for index in self.apart]

    def repeat(self) -> None:
        """Let the sums of further steps be made as before."""
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
        """Return whether another step is like this one, so that its checks hold."""
        if strategy is not self._strategy or len(pairs) != len(self._expected):
            return False
        # The hot path: what is not of NumPy or not as before goes the long way.
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
    # Arrays without elements are nowhere in particular.
    return array.data.device_id if is_device(array) and array.size else None
