"""Iterators over distributed data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

from hpcstrat.context import current
from hpcstrat.errors import OutOfRangeError
from hpcstrat.observe.timeline import traced
from hpcstrat.typing import Replicas, Tree

__all__ = ["DistributedIterator", "Optional", "ReducibleDataset"]


class Optional:
    """An element, or the end of the data."""

    def __init__(self, present: bool, element: Tree = None) -> None:
        self._present = present
        self._element = element

    def has_value(self) -> bool:
        """Whether there is an element; False at the end."""
        return self._present

    def get_value(self) -> Tree:
        """Return the element; raises ValueError at the end."""
        if not self._present:
            raise ValueError("expected an element, found the end; ask has_value first")
        return self._element


class DistributedIterator:
    """Gives per-replica batches; made by ``iter`` of a distributed data set.

    The elements end by StopIteration, on all replicas at the same step. Every method
    raises ValueError in replica context, and is collective over the strategy's replicas
    where the data set is an iterable.
    """

    def __init__(self, elements: Iterator[Tree]) -> None:
        self._elements = elements

    def __iter__(self) -> Self:
        """Return the iterator itself."""
        return self

    @traced("next", "data")
    def __next__(self) -> Tree:
        """Return the next element."""
        entry = current()
        if entry is not None and entry.replica_context is not None:
            raise ValueError(
                "expected next() of a distributed data set in cross-replica context, "
                "found it inside a replica function; call it outside strategy.run"
            )
        return next(self._elements)

    def get_next(self) -> Tree:
        """Return the next element; at the end OutOfRangeError, on all replicas."""
        element: Any = next(self, _END)
        if element is _END:
            raise OutOfRangeError(
                "expected another batch, found the end of the data set; use a for loop,"
                " or get_next_as_optional"
            )
        return element

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or an `Optional` without a value at the end."""
        element: Any = next(self, _END)
        return Optional(False) if element is _END else Optional(True, element)


_END = object()


class ReducibleDataset:
    """What all distributed data sets share."""

    _strategy: Replicas

    def __iter__(self) -> DistributedIterator:
        """Begin an iteration."""
        raise NotImplementedError

    def reduce(self, initial_state: Any, reduce_func: Callable[..., Any]) -> Any:
        """Combine all elements by a function.

        Collective over the strategy's replicas.

        Parameters
        ----------
        initial_state : object
            The first state.
        reduce_func : callable
            Takes the state and an element, returns the next state.

        Returns
        -------
        object
            The last state.
        """
        state = initial_state
        # The function is the program's, and may fail on one replica alone.
        with self._strategy.together("reduce of a data set"):
            for element in self:
                state = reduce_func(state, element)
        return state
