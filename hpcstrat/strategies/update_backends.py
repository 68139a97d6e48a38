"""Update backends: the ranks that update each variable, and by which sums.

`Strategy.update_backend` returns the class for a kind of strategy. The one here is for
variables of which each rank has a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array


class UpdateBackend(Protocol):
    """The part of a step that depends on where variables are.

    One is made for gradients of one kind, that is their number, shapes and types, and
    serves all steps with such gradients. The methods come in the order of the calls; of
    gradients in ``pairs`` only the kind is looked at. ``by_elements`` says whether the
    optimizer's rule treats each element by itself.
    """

    sums_whole: bool
    """Whether each rank has the whole sums, which are the same everywhere.

    If not, ``sharded=True`` and `Optimizer.apply_combined` are refused."""

    sums_in_place: bool
    """Whether sums can be made in the memory in which they are used."""

    def __init__(
        self,
        strategy: Any,
        pairs: Sequence[tuple[Any, Any]],
        label: str,
        op: ReduceOp,
        *,
        by_elements: bool,
    ) -> None: ...

    def reduce(self, gradients: list[Any], out: list[Array] | None) -> list[Any]:
        """Combine the lists of gradients of this process's replicas, over all.

        Collective over the strategy's replicas. The results may be overwritten, and go
        into ``out`` where it is given; the gradients are not modified.
        """

    def all_finite(self, finite: bool) -> bool:
        """Whether gradients are finite on all ranks, given that they are here.

        Collective over the strategy's replicas. All make the step, or none.
        """

    def total(self, squares: Any) -> Any:
        """Return the square of the norm by which to clip, given that of this rank's.

        Collective over the strategy's replicas.
        """

    def gather_whole(self, reduced: list[Any], own: list[Any]) -> list[Any]:
        """Return combined gradients of all elements, given this rank's ``own``.

        Collective over the strategy's replicas; to say which of them is not finite.
        """

    def gradients_here(self, reduced: list[Any]) -> list[Any]:
        """Return the gradients by which this rank updates."""

    def arrays_here(self, wholes: list[list[Array]]) -> list[tuple[int, list[Array]]]:
        """Return the arrays that this rank updates, one item for each gradient here.

        ``wholes`` are the arrays of each variable and its state. An item has the number
        of the variable, and views of its arrays.
        """

    def update(self, optimizer: Any, gradients: list[Any], routine: Any) -> None:
        """Call ``optimizer.update_here(gradients, routine)``, between what else is due.

        Collective over the strategy's replicas. ``routine.targets`` has, for each
        gradient here, the arrays that are updated; ``optimizer.iterations`` counts the
        step afterwards.
        """


class Copies:
    """Each rank updates its copy of every variable, by the whole sums."""

    sums_whole = True
    sums_in_place = True

    def __init__(
        self,
        strategy: Any,
        pairs: Sequence[tuple[Any, Any]],
        label: str,
        op: ReduceOp,
        *,
        by_elements: bool,
    ) -> None:
        del by_elements
        self._strategy = strategy
        # Not the gradients, which would live as long as this.
        self._variables = [variable for _, variable in pairs]
        self._label, self._op = label, op

    def reduce(self, gradients: list[Any], out: list[Array] | None) -> list[Any]:
        """Combine gradients over replicas."""
        reduced: list[Any] = self._strategy.replicas.reduce_parts(
            self._op, gradients, self._label, out
        )
        return reduced

    def all_finite(self, finite: bool) -> bool:
        """Return what is given: all ranks have the same sums."""
        return finite

    def total(self, squares: Any) -> Any:
        """Return what is given: the sums are whole."""
        return squares

    def gather_whole(self, reduced: list[Any], own: list[Any]) -> list[Any]:
        """Return the combined gradients."""
        del own
        return reduced

    def gradients_here(self, reduced: list[Any]) -> list[Any]:
        """Return all."""
        return reduced

    def arrays_here(self, wholes: list[list[Array]]) -> list[tuple[int, list[Array]]]:
        """Return all."""
        return list(enumerate(wholes))

    def update(self, optimizer: Any, gradients: list[Any], routine: Any) -> None:
        """Update all variables."""
        optimizer.update_here(gradients, routine)
