"""Backends of optimizers: the rank that updates each variable, and by which sums.

`Strategy.update_backend` names it: ``copies`` of all variables on each rank; ``slices``
of the one copy that a worker has, in central storage; ``servers``, which make the steps
themselves, see `hpcstrat.parameter_server.gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.optimizers.gradients import Gradient, Pairs, merged_rows
from hpcstrat.optimizers.parameters import Target
from hpcstrat.optimizers.rules import has_two_stages, is_of_elements
from hpcstrat.optimizers.step_slices import StepSlices
from hpcstrat.strategies import Strategy
from hpcstrat.variables import exchange_parts, part_of_rank

__all__ = ["Backend", "Copies", "Parts", "backend_of", "shards"]


class Backend(Protocol):
    """The part of a step that depends on where variables are, in order of the calls.

    All of it is made for gradients of one kind: their number, shapes and types.
    """

    sharded: bool
    """Whether each rank has a part of the state alone."""

    sums_in_place: bool
    """Whether sums can be made in the memory in which they are used."""

    def reduce(self, gradients: list[Any], out: list[Array] | None) -> list[Any]:
        """Combine gradients over replicas; collective over the strategy's replicas."""

    def merge(self, reduced: list[Any]) -> list[Any]:
        """Return combined gradients, whose rows have each index once."""

    def all_finite(self, finite: bool) -> bool:
        """Whether combined gradients are finite everywhere, given that they are here.

        Collective over the strategy's replicas.
        """

    def gather_whole(self, reduced: list[Any], own: list[Any]) -> list[Any]:
        """Return combined gradients of all elements, given this rank's ``own``.

        Collective over the strategy's replicas.
        """

    def arrays_here(self, targets: list[Target]) -> list[Target]:
        """Return what this rank updates, of the arrays of all variables and state."""

    def gradients_here(self, optimizer: Any, reduced: list[Any]) -> list[Any]:
        """Return the gradients by which this rank updates."""

    def norm(self, arrays: Sequence[Array]) -> float | None:
        """Return the norm over all gradients; None where ``arrays`` are all of them.

        Collective over the strategy's replicas.
        """

    def update(self, optimizer: Any, gradients: list[Any], routine: Any) -> None:
        """Update the variables; collective over the strategy's replicas."""


class Copies:
    """Each rank updates its copy of every variable, by the whole sums."""

    sharded = False
    sums_in_place = True

    def __init__(
        self, strategy: Strategy, pairs: Pairs, label: str, op: ReduceOp
    ) -> None:
        self._strategy = strategy
        # Not the gradients, which would live as long as this.
        self._variables = [variable for _, variable in pairs]
        self._label, self._op = label, op

    def reduce(self, gradients: list[Any], out: list[Array] | None) -> list[Any]:
        """Combine gradients over replicas."""
        reduced: list[Any] = self._strategy.collectives.reduce_in_call(
            self._op, gradients, self._label, out=out
        )
        return reduced

    def merge(self, reduced: list[Any]) -> list[Any]:
        """Return combined gradients, whose rows have each index once."""
        return [merged_rows(g) if isinstance(g, IndexedSlices) else g for g in reduced]

    def all_finite(self, finite: bool) -> bool:
        """Return what is given: all ranks have the same sums."""
        return finite

    def gather_whole(self, reduced: list[Any], own: list[Any]) -> list[Any]:
        """Return the combined gradients."""
        del own
        return reduced

    def arrays_here(self, targets: list[Target]) -> list[Target]:
        """Return all."""
        return targets

    def gradients_here(self, optimizer: Any, reduced: list[Any]) -> list[Any]:
        """Return all."""
        del optimizer
        return reduced

    def norm(self, arrays: Sequence[Array]) -> float | None:
        """Return None: the gradients are whole."""
        del arrays
        return None

    def update(self, optimizer: Any, gradients: list[Any], routine: Any) -> None:
        """Update all variables."""
        optimizer._condition(gradients, self)
        optimizer._update_parts(gradients, routine)


class Parts(Copies):
    """Each rank has the state of a part of each variable, and updates that part.

    ZeRO stage 1 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054). Of a rule
    with two stages the first is of parts, whose results are exchanged, and the second
    of all elements.
    """

    sharded = True
    sums_in_place = False

    def gradients_here(self, optimizer: Any, reduced: list[Any]) -> list[Any]:
        """Return this rank's parts, scaled and clipped by the whole gradients."""
        optimizer._condition(reduced, self)
        self._wholes = [_dense(gradient).reshape(-1) for gradient in reduced]
        return [w[part_of_rank(w.size, self._strategy)] for w in self._wholes]

    def arrays_here(self, targets: list[Target]) -> list[Target]:
        """Return this rank's parts of the variables; their state is such a part."""
        found: list[Target] = []
        for step, (whole, *state) in targets:
            flat = whole.reshape(-1)
            found.append(
                (step, [flat[part_of_rank(flat.size, self._strategy)], *state])
            )
        return found

    def update(self, optimizer: Any, gradients: list[Any], routine: Any) -> None:
        """Update this rank's parts, and get the others."""
        strategy, wholes = self._strategy, self._wholes
        arrays = [variable.component for variable in self._variables]
        in_two = has_two_stages(type(optimizer))
        # The others wait for this rank's parts.
        with strategy.collectives.all_raise(self._label):
            if in_two:
                targets = zip(gradients, routine.targets, strict=True)
                for part, (step, own) in targets:
                    optimizer._first_stage(step, part, *own[1:])
            else:
                optimizer._update_parts(gradients, routine)
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


def backend_of(
    strategy: Strategy, pairs: Pairs, label: str, op: ReduceOp, optimizer: Any
) -> Backend:
    """Return the backend of a step with gradients of these kinds.

    Raises ValueError where the state cannot be divided as the optimizer asks for.
    """
    if shards(optimizer, strategy):
        return Parts(strategy, pairs, label, op)
    if strategy.update_backend == "slices" and strategy.num_replicas_in_sync > 1:
        by_elements = is_of_elements(type(optimizer))
        return StepSlices(strategy, pairs, label, op, by_elements=by_elements)
    return Copies(strategy, pairs, label, op)


def shards(optimizer: Any, strategy: Any) -> bool:
    """Whether each rank keeps the state of a part of the elements."""
    if not optimizer._sharded or strategy.num_ranks == 1:
        return False
    if strategy.update_backend != "copies" or strategy.split is not None:
        raise ValueError(
            "expected variables that all ranks have a copy of for sharded=True, found "
            f"those of {strategy!r}; leave out sharded=True"
        )
    return True


def _dense(gradient: Gradient) -> Array:
    return gradient.to_dense() if isinstance(gradient, IndexedSlices) else gradient
