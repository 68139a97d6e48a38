"""Requests and steps for which a collective call waits, in one form.

What moves data in a call is a generator: it works, yields what it waits for, and goes
on once that has come. `Channel.drive` takes one to its end, and a `PendingCall` as far
as it comes without waiting. An algorithm, which is a call's whole work, yields `HEADER`
first: what it does before may fail on one rank, which the header tells the others.
After the header no rank may fail alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Protocol

from hpcstrat.engine.topology.kept_requests import keep

__all__ = [
    "HEADER",
    "EveryRankError",
    "Exchange",
    "HeaderPayload",
    "HeaderStep",
    "Message",
    "WaitSteps",
    "Waitable",
    "exhaust",
]


class Waitable(Protocol):
    """Something that comes from other ranks, or from a device."""

    def agreed(self) -> bool:
        """Whether it has come; False also where ranks have announced different calls.

        Never blocks. Drives MPI's progress where that is needed.
        """
        ...

    def missing(self) -> list[int]:
        """Return the ranks that it waits for; ``[-1]`` where it is not known which."""
        return [] if self.agreed() else [-1]


WaitSteps = Iterator[Waitable]
"""The things for which a call waits, one after the other."""


class HeaderPayload(Protocol):
    """Values that travel in a header, see `hpcstrat.engine.channel.wire_headers`."""

    # Size of the values of each worker.
    nbytes: int

    def gather(self) -> None:
        """Write the sum of the worker's values behind the header."""
        ...

    def take(self, step: int) -> None:
        """Copy what has come in a step to where a later step sends it from."""
        ...

    def finish(self) -> None:
        """Add up what has come, for this worker's ranks."""
        ...


class HeaderStep(Waitable):
    """Stands for the header of a call, which only the channel can post."""

    def __init__(self, carried: HeaderPayload | None = None) -> None:
        # Values that travel in the header.
        self.carried = carried

    def agreed(self) -> bool:
        """Refuse: `Channel.agree` awaits it, or a `PendingCall` posts it."""
        raise AssertionError("an algorithm yields its header once, before all else")


HEADER: Final = HeaderStep()
"""An algorithm yields it once it has done all that it can do before the header."""


def exhaust(steps: WaitSteps) -> None:
    """Run the call of a single replica to its end; it never has to wait."""
    for awaited in steps:
        assert awaited is HEADER


class EveryRankError(Exception):
    """A ValueError in the exchange of data that every rank raises in the same place."""


class Exchange(Waitable):
    """Nonblocking calls of MPI; ``arrays`` are kept until all of them are complete."""

    # For `__del__`, where an interrupt ends the initializer.
    requests: Any = ()

    def __init__(self, *arrays: Any) -> None:
        # The owner adds them one by one, as an error may come between them.
        self.requests, self._arrays = [], arrays

    def agreed(self) -> bool:
        """Whether all of them are complete."""
        requests = self.requests
        if requests and type(requests[0]).Testall(requests):
            self.requests = requests = []
        return not requests

    def __del__(self) -> None:
        # An error may have ended the wait for them.
        if self.requests:
            keep(self.requests, self._arrays)


class Message(Exchange):
    """One nonblocking call of MPI, by its active request."""

    def __init__(self, request: Any, *arrays: Any) -> None:
        self.requests, self._arrays = [request], arrays
