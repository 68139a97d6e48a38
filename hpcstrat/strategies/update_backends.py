"""Update backends: classes that sum gradients and synchronize ranks in a step.

`Strategy.update_backend` returns the backend class of a strategy. The backend decides
which ranks update each variable. `Copies` is for variables with a copy on each rank;
`Parts` is for optimizers with ``sharded=True``, under the same strategies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.variables import exchange_parts, part_of_rank


class Copies:
    """A backend in which each rank updates its copy of every variable.

    This is the base class of all backends: the part of an optimizer's step that depends
    on where variables are stored. A backend is made for one list of shapes and dtypes
    of gradients, and is used for all steps whose gradients have these shapes and
    dtypes; it does not keep the gradients in ``pairs``. ``by_elements`` is True if the
    optimizer's rule updates each element independently.

    `hpcstrat.optimizers.routine.Routine` calls `reduce`, `all_finite`, `total` (for
    clipping) and `gradients_here`, then updates the arrays of this rank by the
    optimizer's rule, and calls `end_update`. A backend never calls an optimizer. The
    first step calls `arrays_here` before the update.
    """

    sums_whole = True
    """True if each rank has the plain sums of all gradients, equal on all ranks.

    If not, ``sharded=True`` and `Optimizer.apply_combined`, which do not call `reduce`,
    are refused."""

    sums_in_place = True
    """Whether gradients can be summed in the memory that the update then reads."""

    other_ranks_wait = False
    """True if `end_update` waits for other ranks, which an error must reach."""

    def __init__(
        self,
        strategy: Any,
        pairs: Sequence[tuple[Any, Any]],
        label: str,
        op: ReduceOp,
        *,
        by_elements: bool,
    ) -> None:
        self._strategy = strategy
        # Storing ``pairs`` would keep the gradients' memory allocated.
        self._variables = [variable for _, variable in pairs]
        self._label, self._op, self._by_elements = label, op, by_elements

    def reduce(self, gradients: list[Any], out: list[Array] | None) -> list[Any]:
        """Sum or average gradients over all replicas of all processes.

        Collective over the strategy's replicas. ``gradients`` has a list for each
        replica of this process; the lists are not modified. Results are written to
        ``out`` if it is given. The next call may overwrite the results.
        """
        reduced: list[Any] = self._strategy.replicas.reduce_parts(
            self._op, gradients, self._label, out
        )
        return reduced

    def all_finite(self, finite: bool) -> bool:
        """Return whether gradients are finite on all ranks.

        ``finite`` is True if this rank's gradients are finite. Collective over the
        strategy's replicas, so that either all replicas make the step or none does.
        """
        return finite

    def total(self, squares: Sequence[Any]) -> Any:
        """Return the squared norm of all gradients together.

        ``squares`` are the squared norms of the gradients, or of this rank's parts of
        them. Collective over the strategy's replicas.
        """
        return sum(squares)

    def gather_whole(self, reduced: list[Any], own: list[Any]) -> list[Any]:
        """Return the combined gradients of all elements.

        Collective over the strategy's replicas. ``reduced`` is the result of `reduce`,
        and ``own`` has this replica's gradients before the reduction. Called only for
        the message about a gradient that is not finite.
        """
        del own
        return reduced

    def gradients_here(self, reduced: list[Any]) -> list[Any]:
        """Return the gradients that this rank uses to update variables."""
        return reduced

    def arrays_here(self, wholes: list[list[Array]]) -> list[tuple[int, list[Array]]]:
        """Return the arrays that this rank updates, one item for each of its gradients.

        ``wholes`` has the arrays of each variable and its state. An item contains the
        number of the variable, and views of the variable's arrays.
        """
        return list(enumerate(wholes))

    def end_update(self, number: int, targets: Sequence[Any]) -> Any:
        """Synchronize the ranks after this rank has updated its arrays.

        Collective over the strategy's replicas. ``number`` is the number of the step,
        from 1. ``targets`` has a `Target` for each of this rank's gradients. `Parts`
        returns the variables' arrays, or, for a rule with two stages, the complete
        results of the first stage.
        """


class PositionCopies(Copies):
    """A backend for replicas of several ranks.

    The ranks at one position of all replicas sum their gradients. Gradients of divided
    variables differ between positions; others must be whole, see
    `hpcstrat.strategies.inside`.
    """

    def __init__(
        self,
        strategy: Any,
        pairs: Sequence[tuple[Any, Any]],
        label: str,
        op: ReduceOp,
        *,
        by_elements: bool,
    ) -> None:
        super().__init__(strategy, pairs, label, op, by_elements=by_elements)
        variables = self._variables
        self._divided = [i for i, v in enumerate(variables) if v.split is not None]
        self._whole = [i for i, v in enumerate(variables) if v.split is None]
        if self._divided and not by_elements:
            names = ", ".join(variables[i].name for i in self._divided)
            raise ValueError(
                "expected a rule that updates each element by itself for the divided "
                f"variables {names}, found another; use SGD or Adam, for example"
            )

    def reduce(self, gradients: list[Any], out: list[Array] | None) -> list[Any]:
        inside, variables = self._strategy.inside, self._variables
        names = [v.name for v in variables]
        whole = [own[i] for own in gradients for i in self._whole]
        if whole:
            named = [f"the gradient of {names[i]!r}" for i in self._whole]
            inside.require_whole("apply_gradients", whole, named * len(gradients))
        if copied := [
            i for i in self._divided if inside.has_copies(variables[i].split)
        ]:
            named = [f"the gradient of {names[i]!r}" for i in copied]
            parts = [own[i] for own in gradients for i in copied]
            splits = [variables[i].split for i in copied] * len(gradients)
            many = named * len(gradients)
            inside.require_whole("apply_gradients", parts, many, splits=splits)
        with inside.divided():
            return super().reduce(gradients, out)

    def all_finite(self, finite: bool) -> bool:
        if not self._divided:
            return finite
        return not int(self._strategy.inside.sum(np.int64(not finite)))

    def total(self, squares: Sequence[Any]) -> Any:
        total = sum(squares[i] for i in self._whole)
        if self._divided:
            # Only the first of the ranks with the same part adds it.
            inside, variables = self._strategy.inside, self._variables
            firsts = {i: inside.first_copies(variables[i].split) for i in self._divided}
            mine = [i for i, ranks in firsts.items() if inside.position in ranks]
            own = np.float64(sum(squares[i] for i in mine))
            total = total + float(self._strategy.inside.sum(own))
        return total


class Parts(Copies):
    """A backend: each rank updates a part of each variable, and has that part's state.

    This is ZeRO stage 1 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054). A
    rule with two stages runs its first stage on parts; the ranks exchange the results,
    and run the second stage on all elements.
    """

    sums_in_place = False
    other_ranks_wait = True

    def gradients_here(self, reduced: list[Any]) -> list[Any]:
        dense = [g.to_dense() if isinstance(g, IndexedSlices) else g for g in reduced]
        self._wholes = [gradient.reshape(-1) for gradient in dense]
        return [w[part_of_rank(w.size, self._strategy)] for w in self._wholes]

    def arrays_here(self, wholes: list[list[Array]]) -> list[tuple[int, list[Array]]]:
        flats = [whole.reshape(-1) for whole, *_ in wholes]
        return [
            (index, [flat[part_of_rank(flat.size, self._strategy)], *wholes[index][1:]])
            for index, flat in enumerate(flats)
        ]

    def end_update(self, number: int, targets: Sequence[Any]) -> Any:
        arrays = [variable.component for variable in self._variables]
        exchanged = arrays if self._by_elements else self._wholes
        label = f"{self._label}, updated parts"
        limit = self._strategy.collectives.timeout_seconds
        exchange_parts(self._strategy, exchanged, label, limit)
        return exchanged
