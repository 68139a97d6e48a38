"""Sharded steps (``sharded=True``): each rank updates a part of the elements."""

from __future__ import annotations

from typing import Any

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.typing import Array
from hpcstrat.optimizers.gradients import Gradient
from hpcstrat.optimizers.rules import has_two_stages
from hpcstrat.strategies.update_backends import Copies
from hpcstrat.variables import exchange_parts, part_of_rank


class Parts(Copies):
    """A backend: each rank updates a part of each variable, and has that part's state.

    This is ZeRO stage 1 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054). A
    rule with two stages runs its first stage on parts; the ranks exchange the results,
    and run the second stage on all elements.
    """

    sums_in_place = False

    def gradients_here(self, reduced: list[Any]) -> list[Any]:
        self._wholes = [_dense(gradient).reshape(-1) for gradient in reduced]
        return [w[part_of_rank(w.size, self._strategy)] for w in self._wholes]

    def arrays_here(self, wholes: list[list[Array]]) -> list[tuple[int, list[Array]]]:
        flats = [whole.reshape(-1) for whole, *_ in wholes]
        return [
            (index, [flat[part_of_rank(flat.size, self._strategy)], *wholes[index][1:]])
            for index, flat in enumerate(flats)
        ]

    def update(self, optimizer: Any, gradients: list[Any], routine: Any) -> None:
        strategy, wholes = self._strategy, self._wholes
        arrays = [variable.component for variable in self._variables]
        in_two = has_two_stages(type(optimizer))
        # Errors are raised on all ranks, which wait for this rank's parts.
        with strategy.collectives.all_raise(self._label):
            if in_two:
                targets = zip(gradients, routine.targets, strict=True)
                for part, (step, own) in targets:
                    optimizer._first_stage(step, part, *own[1:])
            else:
                optimizer.update_here(gradients, routine)
        exchange_parts(
            strategy,
            wholes if in_two else arrays,
            f"{self._label}, updated parts",
            strategy.collectives.timeout_seconds,
        )
        if in_two:
            steps = [step for step, _ in routine.targets]
            for step, whole, array in zip(steps, wholes, arrays, strict=True):
                optimizer._second_stage(step, whole.reshape(array.shape), array)


def shards(optimizer: Any, strategy: Any) -> bool:
    """Return whether each rank has state for only a part of the elements.

    Raises ValueError with ``sharded=True`` if the variables cannot be divided.
    """
    if not optimizer._sharded or strategy.num_ranks == 1:
        return False
    if not strategy.update_backend().sums_whole or strategy.split is not None:
        raise ValueError(
            "expected variables that all ranks have a copy of for sharded=True, found "
            f"those of {strategy!r}; leave out sharded=True"
        )
    return True


def _dense(gradient: Gradient) -> Array:
    return gradient.to_dense() if isinstance(gradient, IndexedSlices) else gradient
