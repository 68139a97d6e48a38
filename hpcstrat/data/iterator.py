"""Iterators over distributed data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

from hpcstrat.engine.context import current
from hpcstrat.engine.observe.timeline import traced
from hpcstrat.engine.typing import Replicas, Tree
from hpcstrat.errors import OutOfRangeError

__all__ = ["DistributedIterator", "EpochPlace", "Optional", "ReducibleDataset"]


class Optional:
    """An element, or the end of the data.

    Parameters
    ----------
    present : bool
        Whether there is an element.
    element : tree
        The element.
    """

    def __init__(self, present: bool, element: Tree = None) -> None:
        self._present = present
        self._element = element

    def has_value(self) -> bool:
        """Whether there is an element.

        Not collective.

        Returns
        -------
        bool
            False at the end.
        """
        return self._present

    def get_value(self) -> Tree:
        """Return the element.

        Not collective.

        Returns
        -------
        tree
            The element.

        Raises
        ------
        ValueError
            At the end.
        """
        if not self._present:
            raise ValueError("expected an element, found the end; ask has_value first")
        return self._element

    def __repr__(self) -> str:
        """Show the element, if there is one."""
        return f"Optional({self._element!r})" if self._present else "Optional(no value)"


class DistributedIterator:
    """Gives per-replica batches; made by ``iter`` of a distributed data set.

    Parameters
    ----------
    elements : iterator of tree
        Raises StopIteration at the end, on all replicas at the same step.
    dataset : DistributedDataset or DealtDataset
        Whose elements they are.
    """

    def __init__(self, elements: Iterator[Tree], dataset: ReducibleDataset) -> None:
        self._elements = elements
        self._dataset = dataset

    @property
    def element_spec(self) -> Tree:
        """Shapes and dtypes of the arrays of a global batch, as ArraySpec."""
        return self._dataset.element_spec

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
        """Return the next element.

        Collective over the strategy's replicas where the data set is an iterable, else
        not collective.

        Returns
        -------
        tree
            The element.

        Raises
        ------
        OutOfRangeError
            At the end, on all replicas.
        ValueError
            In replica context.
        """
        element: Any = next(self, _END)
        if element is _END:
            raise OutOfRangeError(
                "expected another batch, found the end of the data set; use a for loop,"
                " or get_next_as_optional"
            )
        return element

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or the end.

        Collective over the strategy's replicas where the data set is an iterable, else
        not collective.

        Returns
        -------
        Optional
            Without a value at the end.

        Raises
        ------
        ValueError
            In replica context.
        """
        element: Any = next(self, _END)
        return Optional(False) if element is _END else Optional(True, element)

    def __repr__(self) -> str:
        """Say what its elements are."""
        return f"<{type(self).__name__} of this process's parts of batches>"


_END = object()


class EpochPlace:
    """The position of an iteration; read by the state of its data set.

    The position counts examples over all replicas, or global steps.
    """

    __slots__ = ("epoch", "position")

    def __init__(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.position = position


class ReducibleDataset:
    """The base of all distributed data sets."""

    _strategy: Replicas

    @property
    def distribute_strategy(self) -> Replicas:
        """The strategy between whose replicas it is divided."""
        return self._strategy

    @property
    def element_spec(self) -> Tree:
        """Shapes and dtypes of the arrays of a global batch, as ArraySpec."""
        raise ValueError(
            "expected a hpcstrat.Dataset, which knows the arrays of its batches before "
            "they are read, found an iterable or a function; look at the first batch"
        )

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
