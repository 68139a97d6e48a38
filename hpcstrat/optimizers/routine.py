"""Plans of an optimizer's steps; steps of the same shapes and dtypes share a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import without_fp_warnings
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.arrays.packing import side_by_side
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.optimizers.gradients import Pairs, clip_to_norm, merged_rows, scale
from hpcstrat.optimizers.non_finite import NonFinite, all_finite, are_finite, is_finite
from hpcstrat.optimizers.rules import Step, Target, is_of_elements
from hpcstrat.strategies.update_backends import Copies, Parts
from hpcstrat.variables import Variable

# Arrays of up to `_SMALL` elements are copied into one array, updated there, and copied
# back, because NumPy calls for each array take longer: a step with 20 arrays of 4,096
# elements then takes half the time, with 20 arrays of 64 elements a quarter. A bundle
# of `_MOST_IN_BUNDLE` elements and its state fit into the cache.
_SMALL = 4096
_MOST_IN_BUNDLE = 1 << 16


class Bundle:
    """Small variables of one dtype that an elementwise rule updates as one array.

    Each step copies the variables and their state into flat arrays, updates the flat
    arrays, and copies the results back, so that programs and checkpoints can use the
    variables' own memory. The results have the same bits as separate updates.
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
        """Update the bundled variables, given the gradients of all variables."""
        if gradients is not self.gradients:
            for view, index in zip(self.gradients, self.indices, strict=True):
                view[...] = gradients[index]
        for view, whole in self._copies:
            view[...] = whole
        rule.update(self.step, self.gradient, *self._flats)
        for view, whole in self._copies:
            whole[...] = view


def _bundles(rule: Any, targets: list[Target]) -> list[Bundle]:
    """Return bundles of small variables with equal dtypes and ``rule._is_marked``."""
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
    """The plan of all steps that have the same variables, shapes and dtypes.

    The plan keeps references to the arrays of the variables and of their state, which
    are never replaced. `step` calls the update backend, which combines gradients, and
    then the rule of the optimizer, which updates arrays.
    """

    def __init__(
        self,
        strategy: Any,
        pairs: Sequence[tuple[Any, Variable]],
        label: str,
        optimizer: Any,
    ) -> None:
        self._strategy: Any = strategy
        self._expected = [
            (v, type(v.component), v.dtype, v.shape, _gpu(v.component))
            for _, v in pairs
        ]
        self._label = label
        # A rule that does not treat each element by itself has two stages, if sharded.
        by_elements = is_of_elements(type(optimizer))
        self._is_sharded = is_sharded(optimizer, strategy)
        self._has_two_stages = self._is_sharded and not by_elements
        kind = Parts if self._is_sharded else self._strategy.update_backend()
        self.backend: Copies = kind(
            strategy, pairs, label, optimizer._op, by_elements=by_elements
        )
        self.non_finite: str = strategy.settings.non_finite
        # Whether all combined gradients are NumPy arrays, and the arrays into which
        # every step sums gradients; both set by `repeat`.
        self.repeats = False
        self.sums: list[Array] | None = None
        # One target for each gradient or slice of a gradient; made in the first step.
        self.begun = False
        self.targets: list[Target] = []
        # The Step objects that rules receive: of bundles, then of single variables.
        self.steps: list[Step] = []
        self.bundles: list[Bundle] = []
        self.apart: list[int] = []
        # All combined gradients in one array, if all are bundled and have one dtype.
        self.flat: Array | None = None

    def step(self, optimizer: Any, given: list[Pairs]) -> bool:
        """Combine gradients, and update variables; return False for a skipped step.

        Collective over the strategy's replicas. ``given`` has the gradients of each
        replica of this process.
        """
        rate = learning_rate(optimizer, self._strategy)
        own = [[gradient for gradient, _ in pairs] for pairs in given]
        reduced = self.backend.reduce(own, self.sums)
        return self.update(optimizer, reduced, given, rate)

    @without_fp_warnings
    def update(
        self, optimizer: Any, reduced: list[Any], given: list[Pairs], rate: float
    ) -> bool:
        """Update variables with combined gradients; return False for a skipped step.

        Collective over the strategy's replicas. ``given`` has the gradients of each
        replica of this process.
        """
        backend = self.backend
        if not self.begun:
            reduced = [
                merged_rows(g) if isinstance(g, IndexedSlices) else g for g in reduced
            ]
        if self.non_finite != "off" and self._refuses(optimizer, reduced, given):
            return False
        if optimizer.clip_global_norm is not None or optimizer._op is ReduceOp.MEAN:
            self._condition(optimizer, reduced)
        reduced = backend.gradients_here(reduced)
        if not self.begun:
            self._begin(optimizer, given[0], reduced)
        # Steps count from 1: Adam's bias correction would divide by 0 in step 0.
        number = int(optimizer.iterations.component) + 1
        for step in self.steps:
            step.rate, step.number = rate, number
        try:
            self._apply_rule(optimizer, reduced)
        except Exception as error:
            if backend.other_ranks_wait:
                self._strategy.collectives.fail(self._label, error)
            raise
        exchanged = backend.end_update(number, self.targets)
        if self._has_two_stages:
            for (step, _), (_, variable), whole in zip(
                self.targets, given[0], exchanged, strict=True
            ):
                array = variable.component
                optimizer._second_stage(step, whole.reshape(array.shape), array)
        # The step count is written last: after an error in a rule, it is unchanged.
        optimizer.iterations.component[...] = number
        return True

    def _refuses(self, optimizer: Any, reduced: list[Any], given: list[Pairs]) -> bool:
        """Return whether to skip a step because its gradients are not finite."""
        if not self.repeats:
            finite = are_finite(reduced)
        elif self.flat is None:
            finite = all_finite(reduced)
        else:
            finite = is_finite(self.flat)
        if self.backend.all_finite(finite):
            return False
        # All elements are gathered, to find the first that is not finite.
        whole = self.backend.gather_whole(
            reduced, [gradient for gradient, _ in given[0]]
        )
        # All replicas decide in the same way: combined gradients have the same bits.
        dealing: NonFinite = optimizer._non_finite
        return dealing.refuses(self.non_finite, self._strategy, given, whole)

    def _condition(self, optimizer: Any, gradients: Sequence[Any]) -> None:
        """Scale and clip combined gradients in place."""
        limit = optimizer.clip_global_norm
        arrays = [g.values if isinstance(g, IndexedSlices) else g for g in gradients]
        if optimizer._op is ReduceOp.MEAN:
            # The divisor is the number of calls in the sums, not `accumulate_steps`,
            # which the program may have changed since the checkpoint was saved.
            scale(arrays, 1 / max(1, optimizer._accumulation.calls))
        if limit is not None:
            clip_to_norm(arrays, limit, self.backend.total)

    def _apply_rule(self, rule: Any, gradients: list[Any]) -> None:
        """Update this rank's arrays with the optimizer's rule, or its first stage."""
        if self._has_two_stages:
            for gradient, (step, arrays) in zip(gradients, self.targets, strict=True):
                rule._first_stage(step, gradient, *arrays[1:])
            return
        for bundle in self.bundles:
            bundle.update(rule, gradients)
        for index in self.apart:
            gradient, (step, arrays) = gradients[index], self.targets[index]
            # Dense NumPy gradients, the usual case, skip further checks.
            if type(gradient) is np.ndarray:
                rule.update(step, gradient, *arrays)
            else:
                rule.update_arrays(step, gradient, arrays)

    def _begin(self, optimizer: Any, pairs: Pairs, gradients: Sequence[Any]) -> None:
        """Make the state of the variables, and plan the variables' updates."""
        get, sharded = optimizer._slots.get, self._is_sharded
        wholes = [
            [v.component]
            + [
                get(kind, v, initial, sharded=sharded).component
                for kind, initial in optimizer.state.items()
            ]
            for _, v in pairs
        ]
        self.targets = [
            (Step(0.0, 0, pairs[index][1].name), arrays)
            for index, arrays in self.backend.arrays_here(wholes)
        ]
        dense = all(type(gradient) is np.ndarray for gradient in gradients)
        # Variables with sparse gradients are updated one by one, because a bundle would
        # also update rows without a gradient. Arrays on a GPU are updated one by one,
        # too, because each copy would launch a kernel.
        self.bundles = _bundles(optimizer, self.targets) if dense else []
        bundled = {index for bundle in self.bundles for index in bundle.indices}
        self.apart = [i for i in range(len(self.targets)) if i not in bundled]
        self.steps = [bundle.step for bundle in self.bundles]
        self.steps += [self.targets[index][0] for index in self.apart]
        self.begun = True

    def repeat(self) -> None:
        """Prepare further steps, which sum gradients into the arrays ``sums``."""
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
        """Return whether a step has this plan's variables, dtypes and shapes."""
        if strategy is not self._strategy or len(pairs) != len(self._expected):
            return False
        # This comparison runs in every step, so it must be fast. If it fails, `checked`
        # examines the gradients.
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


def learning_rate(optimizer: Any, strategy: Any) -> float:
    """Return the learning rate of an optimizer's next step."""
    rate: float | Callable[[int], float] = optimizer.learning_rate
    if callable(rate):
        try:
            # If the function fails on this rank only, `fail` notifies the others.
            rate = rate(int(optimizer.iterations.component))
        except Exception as error:
            strategy.collectives.fail("apply_gradients", error)
            raise
    return rate


def is_sharded(optimizer: Any, strategy: Any) -> bool:
    """Return whether each rank has state for only a part of the elements.

    Raises ValueError with ``sharded=True`` if the variables cannot be divided.
    """
    if not optimizer._sharded:
        return False
    if strategy.inside.size > 1:
        raise ValueError(
            "expected replicas of one rank for sharded=True, found "
            f"{strategy.inside.size} ranks per replica; leave out sharded=True, and "
            "divide large variables with split="
        )
    if strategy.num_ranks == 1:
        return False
    if not strategy.update_backend().sums_whole or strategy.split is not None:
        raise ValueError(
            "expected variables that all ranks have a copy of for sharded=True, found "
            f"those of {strategy!r}; leave out sharded=True"
        )
    return True


def _gpu(array: Any) -> Any:
    # An empty array belongs to no particular GPU.
    return array.data.device_id if is_device(array) and array.size else None
