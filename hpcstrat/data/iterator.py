"""Iterators over distributed data sets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from hpcstrat.data.dataset import Dataset
from hpcstrat.data.file_lists import digest_of
from hpcstrat.data.order import ORDER_VERSION
from hpcstrat.data.rows import UNKNOWN
from hpcstrat.engine.context import current
from hpcstrat.engine.observe.timeline import traced
from hpcstrat.engine.typing import Replicas, Tree
from hpcstrat.errors import OutOfRangeError

__all__ = [
    "DistributedIterator",
    "EpochPlace",
    "Optional",
    "ReducibleDataset",
    "ResumableDataset",
]


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
        """Return whether there is an element.

        Not collective.

        Returns
        -------
        bool
            False at the end of the data.
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
            If there is no element, because the data have ended.
        """
        if not self._present:
            raise ValueError("expected an element, found the end; ask has_value first")
        return self._element

    def __repr__(self) -> str:
        """Show the element, if there is one."""
        return f"Optional({self._element!r})" if self._present else "Optional(no value)"


class DistributedIterator:
    """An iterator over per-replica batches, made by ``iter`` of a distributed data set.

    Parameters
    ----------
    elements : iterator of tree
        Iterator that raises StopIteration at the end, on all replicas at the same step.
    dataset : DistributedDataset or DealtDataset
        The data set of the elements.
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

        Collective over the strategy's replicas, unless the data set has random access.

        Returns
        -------
        tree
            The element.

        Raises
        ------
        OutOfRangeError
            At the end of the data, on all replicas.
        ValueError
            If it is called in replica context.
        """
        element: Any = next(self, _END)
        if element is _END:
            raise OutOfRangeError(
                "expected another batch, found the end of the data set; use a for loop,"
                " or get_next_as_optional"
            )
        return element

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or the end of the data.

        Collective over the strategy's replicas, unless the data set has random access.

        Returns
        -------
        Optional
            The element; without a value at the end of the data.

        Raises
        ------
        ValueError
            If it is called in replica context.
        """
        element: Any = next(self, _END)
        return Optional(False) if element is _END else Optional(True, element)

    def __repr__(self) -> str:
        """Describe the iterator."""
        return f"<{type(self).__name__} of this process's parts of batches>"


_END = object()

_RESTORE = "restore with the data set that was saved"


@dataclass(slots=True)
class EpochPlace:
    """Epoch and position of an iteration, in examples of all replicas or in steps.

    ``failed`` of the steps of a stream before the position have raised errors.
    """

    epoch: int
    position: int
    failed: int = 0


class ReducibleDataset:
    """Base class of all distributed data sets."""

    _strategy: Replicas

    @property
    def distribute_strategy(self) -> Replicas:
        """The strategy to whose replicas the batches are distributed."""
        return self._strategy

    @property
    def element_spec(self) -> Tree:
        """Shapes and dtypes of the arrays of a global batch, as ArraySpec."""
        raise ValueError(
            "expected a hpcstrat.Dataset, which knows the arrays of its batches before "
            "they are read, found an iterable or a function; look at the first batch"
        )

    def __iter__(self) -> DistributedIterator:
        """Begin an iteration over the data set."""
        raise NotImplementedError

    def reduce(self, initial_state: Any, reduce_func: Callable[..., Any]) -> Any:
        """Combine all elements with a function.

        Collective over the strategy's replicas.

        Parameters
        ----------
        initial_state : object
            The first state.
        reduce_func : callable
            Function that takes the state and an element, and returns the next state.

        Returns
        -------
        object
            The last state.
        """
        # All replicas must stop if the program's function fails on one replica.
        with self._strategy.together("reduce of a data set"):
            return functools.reduce(reduce_func, self, initial_state)


class ResumableDataset(ReducibleDataset):
    """Base class of distributed data sets whose iterations continue after a restore."""

    _dataset: Dataset
    # Epoch and position of the next iteration.
    _next = EpochPlace(0, 0)
    # Position of the latest iteration, if one began since the start or last restore.
    _latest: EpochPlace | None = None

    @property
    def num_rows(self) -> int:
        """Number of examples in an epoch, over all replicas; below 0 if unknown."""
        return UNKNOWN

    @property
    def element_spec(self) -> Tree:
        """Shapes and dtypes of the arrays of a global batch, as ArraySpec."""
        return self._dataset.element_spec

    @property
    def epoch(self) -> int:
        """Epoch of the latest iteration or, if that has ended, of the next iteration.

        After an assignment, the next iteration begins at the start of this epoch.
        """
        return self.state()["epoch"]

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._next, self._latest = EpochPlace(int(value), 0), None

    def _begin_at(self, place: EpochPlace) -> None:
        # Advance now: if the loop ends early, the next loop must not repeat its epoch.
        self._next, self._latest = EpochPlace(place.epoch + 1, 0), place

    def state(self) -> dict[str, int]:
        """Return the position of the latest iteration.

        Not collective; the same on every replica after the same step. The position is
        after the last batch that ``next()`` has returned: if ``next()`` raised an error
        for a batch, the position is before this batch until ``next()`` returns another.

        Returns
        -------
        dict of str to int
            ``epoch``, ``global_position`` (number of examples that all replicas have
            read in the epoch; for a stream, of steps), ``shuffle_seed``, ``num_rows``
            (-2 if not known), ``order_version``, ``order_digest`` (hash of the methods
            that determine the row at each position), and for a stream ``num_parts`` and
            ``num_failed`` (how many of the steps raised errors).
        """
        place = self._latest or self._next
        return {
            "epoch": place.epoch,
            "global_position": place.position,
            "shuffle_seed": self._dataset.seed,
            "num_rows": self.num_rows,
            "order_version": ORDER_VERSION,
            "order_digest": self._order_digest,
            **self._more_state(place),
        }

    @functools.cached_property
    def _order_digest(self) -> int:
        return digest_of([self._dataset.stage.order_words()])

    def _more_state(self, place: EpochPlace) -> dict[str, int]:
        """Return entries that a subclass adds to the state, such as ``num_parts``."""
        return {}

    def check_state(self, state: dict[str, int]) -> None:
        """Check that a state belongs to this data set.

        Not collective.

        Parameters
        ----------
        state : dict of str to int
            State from `state`, perhaps saved on another number of replicas.

        Raises
        ------
        ValueError
            If the state belongs to another data set, to other methods that determine
            the order of rows, or to another division of files.
        """
        own = self.state()
        for key in ("num_rows", "shuffle_seed", "num_parts"):
            if key in own and int(state.get(key, 0)) != own[key]:
                advice = _RESTORE
                if key == "num_parts":
                    advice += ", with as many ranks, as each worker reads its own files"
                raise ValueError(
                    f"expected the position in a data set with {key} {own[key]}, found "
                    f"{state.get(key)}; {advice}"
                )
        # States of older versions have no digest.
        if int(state.get("order_digest", self._order_digest)) != self._order_digest:
            words = self._dataset.stage.order_words()
            raise ValueError(
                f"expected the position in a data set of {words}, found one of a data "
                "set whose methods or files differ, so that its positions have other "
                f"rows; {_RESTORE}, or set epoch to begin an epoch"
            )

    def restore_state(self, state: dict[str, int]) -> None:
        """Make the next iteration continue at a saved position.

        Not collective: call it on every replica with the same state.

        Parameters
        ----------
        state : dict of str to int
            State from `state`, perhaps saved on another number of replicas.

        Raises
        ------
        ValueError
            If the state belongs to another data set.
        """
        self.check_state(state)
        self._next = EpochPlace(
            int(state["epoch"]),
            int(state["global_position"]),
            int(state.get("num_failed", 0)),
        )
        self._latest = None
        self._keep_order(int(state.get("order_version", 1)))

    def _keep_order(self, version: int) -> None:
        """Use the order of ``version`` for the rest of a restored epoch."""
