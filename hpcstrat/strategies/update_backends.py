"""Update backends: classes that sum gradients and update variables in a step.

`Strategy.update_backend` returns the backend class of a strategy. The backend decides
which ranks update each variable. `Copies` is for variables with a copy on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array


class UpdateBackend(Protocol):
    """The part of an optimizer's step that depends on where variables are stored.

    A backend is made for one list of shapes and dtypes of gradients, and is used for
    all steps whose gradients have these shapes and dtypes; it does not keep the
    gradients in ``pairs``. A step calls `reduce`, `all_finite`, `total` (for clipping),
    `gradients_here` and `update`; the first step calls `arrays_here` before `update`.
    ``by_elements`` is True if the optimizer's rule updates each element independently.
    """

    sums_whole: bool
    """True if each rank has the plain sums of all gradients, equal on all ranks.

    If not, ``sharded=True`` and `Optimizer.apply_combined`, which do not call `reduce`,
    are refused."""

    sums_in_place: bool
    """Whether gradients can be summed in the memory that the update then reads."""

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
        """Sum or average gradients over all replicas of all processes.

        Collective over the strategy's replicas. ``gradients`` has a list for each
        replica of this process; the lists are not modified. Results are written to
        ``out`` if it is given. The next call may overwrite the results.
        """

    def all_finite(self, finite: bool) -> bool:
        """Return whether gradients are finite on all ranks.

        ``finite`` is True if this rank's gradients are finite. Collective over the
        strategy's replicas, so that either all replicas make the step or none does.
        """

    def total(self, squares: Any) -> Any:
        """Return the squared norm of all gradients together.

        ``squares`` is the squared norm of this rank's part of the gradients. Collective
        over the strategy's replicas.
        """

    def gather_whole(self, reduced: list[Any], own: list[Any]) -> list[Any]:
        """Return the combined gradients of all elements.

        Collective over the strategy's replicas. ``reduced`` is the result of `reduce`,
        and ``own`` has this replica's gradients before the reduction. Called only for
        the message about a gradient that is not finite.
        """

    def gradients_here(self, reduced: list[Any]) -> list[Any]:
        """Return the gradients that this rank uses to update variables."""

    def arrays_here(self, wholes: list[list[Array]]) -> list[tuple[int, list[Array]]]:
        """Return the arrays that this rank updates, one item for each of its gradients.

        ``wholes`` has the arrays of each variable and its state. An item contains the
        number of the variable, and views of the variable's arrays.
        """

    def update(self, optimizer: Any, gradients: list[Any], routine: Any) -> None:
        """Call ``optimizer.update_here(gradients, routine)`` and synchronize the ranks.

        Collective over the strategy's replicas. ``routine.targets`` has the arrays to
        update for each of this rank's gradients.
        """


class Copies:
    """A backend in which each rank updates its copy of every variable."""

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
        # Storing ``pairs`` would keep the gradients' memory allocated.
        self._variables = [variable for _, variable in pairs]
        self._label, self._op = label, op

    def reduce(self, gradients: list[Any], out: list[Array] | None) -> list[Any]:
        reduced: list[Any] = self._strategy.replicas.reduce_parts(
            self._op, gradients, self._label, out
        )
        return reduced

    def all_finite(self, finite: bool) -> bool:
        return finite

    def total(self, squares: Any) -> Any:
        return squares

    def gather_whole(self, reduced: list[Any], own: list[Any]) -> list[Any]:
        del own
        return reduced

    def gradients_here(self, reduced: list[Any]) -> list[Any]:
        return reduced

    def arrays_here(self, wholes: list[list[Array]]) -> list[tuple[int, list[Array]]]:
        return list(enumerate(wholes))

    def update(self, optimizer: Any, gradients: list[Any], routine: Any) -> None:
        optimizer.update_here(gradients, routine)
