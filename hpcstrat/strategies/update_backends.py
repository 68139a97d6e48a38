"""Update backends: which ranks update each variable, and by which sums of gradients.

`Strategy.update_backend` returns the class for a kind of strategy. `Copies` is for
variables with a copy on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array


class UpdateBackend(Protocol):
    """The part of an optimizer's step that depends on where variables are.

    A backend is made for gradients of one kind, that is their number, shapes and types,
    and serves all steps with such gradients; it uses only the kind of the gradients in
    ``pairs``. A step calls the methods in the order in which they stand here.
    ``by_elements`` says whether the optimizer's rule treats each element by itself.
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
        """Combine the lists of gradients of this process's replicas with all others.

        Collective over the strategy's replicas. Results go into ``out`` if it is given,
        and may be overwritten; the gradients are not modified.
        """

    def all_finite(self, finite: bool) -> bool:
        """Whether gradients are finite on all ranks; ``finite`` is whether they are
        here.

        Collective over the strategy's replicas: all make the step, or none.
        """

    def total(self, squares: Any) -> Any:
        """Return the square of the norm for clipping from that of this rank's
        gradients.

        Collective over the strategy's replicas.
        """

    def gather_whole(self, reduced: list[Any], own: list[Any]) -> list[Any]:
        """Return combined gradients of all elements; ``own`` are this rank's gradients.

        Collective over the strategy's replicas. For the message about one that is not
        finite.
        """

    def gradients_here(self, reduced: list[Any]) -> list[Any]:
        """Return the gradients by which this rank updates."""

    def arrays_here(self, wholes: list[list[Array]]) -> list[tuple[int, list[Array]]]:
        """Return the arrays that this rank updates, an item for each gradient here.

        ``wholes`` are the arrays of each variable and its state. An item has the number
        of the variable, and views of its arrays.
        """

    def update(self, optimizer: Any, gradients: list[Any], routine: Any) -> None:
        """Call ``optimizer.update_here(gradients, routine)``, with exchanges around it.

        Collective over the strategy's replicas. ``routine.targets`` has the arrays to
        update for each gradient here; ``optimizer.iterations`` counts the step
        afterwards.
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
        # Not the gradients, which the backend would keep alive.
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
