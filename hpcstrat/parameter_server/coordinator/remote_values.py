"""RemoteValue and PerWorkerValues: the results of scheduled functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

WAITING, READY, KEPT, FAILED = range(4)


class RemoteValue:
    """The result of a scheduled function, which its worker keeps if it is large.

    ``ClusterCoordinator.schedule`` returns it. The worker sends a result of up to
    16 KiB when the function ends, and a larger result when the program calls `fetch`.

    Parameters
    ----------
    coordinator : ClusterCoordinator
        The coordinator that scheduled the function.
    number : int
        Number of the call.
    recipe : tuple, optional
        The function and its arguments, only for a value that its worker keeps. A spare
        rank makes this value again if the worker is lost.
    """

    def __init__(self, coordinator: Any, number: int, recipe: Any = None) -> None:
        self._coordinator = coordinator
        self._number = number
        self._recipe = recipe
        self._state = WAITING
        # By state: bytes (READY), the worker's rank (KEPT), or an exception (FAILED).
        self._content: Any = None

    def fetch(self) -> Any:
        """Wait for the function and return its result.

        Not collective; call it on the coordinator.

        Returns
        -------
        object
            A copy of the function's result.

        Raises
        ------
        CancelledError
            If the function did not run, because an earlier function had failed.
        UnavailableError
            If a parameter server is lost, or the worker that keeps the result is lost.
        Exception
            The exception that the function raised.
        """
        self._coordinator.wait_for(self)
        if self._state == FAILED:
            raise self._content
        return self._coordinator.load(self)

    def get(self) -> Any:
        """Wait for the function and return its result, like `fetch`.

        Not collective; call it on the coordinator.

        Returns
        -------
        object
            A copy of the function's result.
        """
        return self.fetch()

    def _settle(self, state: int, content: Any) -> None:
        self._state, self._content = state, content

    def _handle(self) -> NoReturn:
        """Raise ValueError, because a RemoteValue cannot be sent to a worker."""
        raise ValueError(
            "expected no RemoteValue in a scheduled function or its arguments, found "
            "one; fetch it first"
        )

    def __del__(self) -> None:
        if self._state == KEPT:
            self._coordinator.drop(self._content, self._number)

    def __repr__(self) -> str:
        words = ("waiting", "ready", "on its worker", "failed")
        return f"<RemoteValue {self._number}, {words[self._state]}>"


class PerWorkerValues:
    """One value for each worker; a scheduled function gets the value of its worker.

    Parameters
    ----------
    values : sequence of RemoteValue
        The values, in the order of the workers' indices.

    Raises
    ------
    AssertionError
        If an item of ``values`` is not a RemoteValue.
    """

    def __init__(self, values: Sequence[RemoteValue]) -> None:
        for value in values:
            if not isinstance(value, RemoteValue):
                raise AssertionError(
                    f"expected RemoteValues, one for each worker, found {value!r:.80}; "
                    "schedule functions that return the values"
                )
        self._values = tuple(values)

    @property
    def values(self) -> tuple[RemoteValue, ...]:
        """The values, in the order of the workers' indices."""
        return self._values

    def _handle(self) -> tuple[str, int, Any]:
        """Return the handle: the numbers under which the workers keep the values."""
        return "per_worker", 0, tuple(value._number for value in self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self._values)})"


class PerWorkerDataset(PerWorkerValues):
    """A data set on each worker; ``iter`` returns an argument for scheduled functions.

    ``ClusterCoordinator.create_per_worker_dataset`` returns it.
    """

    def __iter__(self) -> PerWorkerIterator:
        found: PerWorkerIterator = self._values[0]._coordinator.iterate(self)
        return found


class PerWorkerIterator(PerWorkerValues):
    """An iterator on each worker, as an argument of scheduled functions."""

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise NotImplementedError(
            "expected next() of a per-worker iterator in a scheduled function, found "
            "it on the coordinator; pass the iterator as an argument to schedule"
        )
