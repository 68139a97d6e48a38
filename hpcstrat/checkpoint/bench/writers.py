"""Those who try a file system together: ranks, or threads that stand for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from hpcstrat.checkpoint.agreement import explained
from hpcstrat.errors import CheckpointError

__all__ = ["Writers", "run_in_threads", "together"]


class Writers(Protocol):
    """The ranks that write together: the part of mpi4py's communicator that is used."""

    @property
    def rank(self) -> int:
        """Number of this one, from 0."""

    @property
    def size(self) -> int:
        """Number of all."""

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all members, in order.

        Collective over the group.
        """


def together(group: Writers, what: str, action: Callable[[], Any]) -> Any:
    """Run an action on all; raise the first error of any of them on all.

    Collective over ``group``; the action makes no collective call. Raises
    CheckpointError: the action's own, or what explains another error.
    """
    # All tell their outcome, or those without an error would go on alone.
    text, result = "", None
    try:
        result = action()
    except CheckpointError as error:
        text = str(error)
    except Exception as error:
        text = explained(what, error)
    for said in group.allgather(text):
        if said:
            raise CheckpointError(said)
    return result


class _WritingThread:
    """One of several threads that stand for ranks."""

    def __init__(
        self, rank: int, values: list[Any], barrier: threading.Barrier
    ) -> None:
        self.rank, self.size = rank, len(values)
        self._values, self._barrier = values, barrier

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all members, in order."""
        self._values[self.rank] = sendobj
        self._barrier.wait()
        values = list(self._values)
        # None gives its next value before all have taken these.
        self._barrier.wait()
        return values


def run_in_threads(size: int, action: Callable[[Writers], Any]) -> Any:
    """Run an action in threads that stand for ranks; return the first one's result.

    The first is this thread. Each gets the group as it sees it; the action raises on
    all of them, or on none.
    """
    values: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    members = [_WritingThread(rank, values, barrier) for rank in range(size)]

    def _run(member: _WritingThread) -> None:
        # Each thread says the same; what this one says is shown.
        try:
            action(member)
        except (CheckpointError, threading.BrokenBarrierError):
            return
        except BaseException:
            # The others would wait for this one.
            barrier.abort()
            raise

    threads = [
        threading.Thread(target=_run, args=(member,), daemon=True)
        for member in members[1:]
    ]
    try:
        for thread in threads:
            thread.start()
        return action(members[0])
    finally:
        # Those that wait for this one, if it failed alone, wait no longer.
        barrier.abort()
        for thread in threads:
            thread.join()
