"""`Waitable`, the interface of headers, steps and requests for which a call waits.

The code that moves the data of a call is a generator: it yields the `Waitable` for
which it waits, and is resumed when this `Waitable` has arrived. `Channel.drive` runs
such a generator to its end; a `PendingCall` runs it as far as possible without waiting.
The generator of a whole call is called an algorithm, and yields `HEADER` first, or the
values that the header carries. If a rank fails before the header, the header reports
the error to the other ranks. After the header no rank may fail alone, because the other
ranks would wait for its data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from hpcstrat.engine.topology.kept_requests import keep

__all__ = [
    "HEADER",
    "EveryRankError",
    "Exchange",
    "HeaderPayload",
    "LengthsDifferError",
    "Message",
    "WaitSteps",
    "Waitable",
    "exhaust",
]


class Waitable(Protocol):
    """Something to wait for: a header or step of other ranks, a request, or a GPU."""

    # The bytes that are moved meanwhile, if known: no rank sleeps while they may move.
    nbytes: int = 0

    def agreed(self) -> bool:
        """Return whether the wait is over; False also if ranks made different calls.

        Never blocks. Drives MPI's progress if needed.
        """
        ...

    def missing(self) -> list[int]:
        """Return the ranks that have not arrived; ``[-1]`` if they are not known."""
        return [] if self.agreed() else [-1]


WaitSteps = Iterator[Any]
"""The steps of a call: `HEADER`, or the `HeaderPayload` that its header carries, then
each `Waitable` for which the channel waits."""


class HeaderPayload(Protocol):
    """Values sent in a header, see `hpcstrat.engine.channel.wire_headers`."""

    # Sizes in bytes of the values of this worker, and of each other worker; only the
    # values of two workers may have different sizes.
    sizes: tuple[int, int]

    def gather(self) -> None:
        """Write the sum of this worker's values behind the header of its message."""
        ...

    def take(self, hop: int) -> None:
        """Copy the values received in a hop into the buffer that later hops send."""
        ...

    def finish(self) -> None:
        """Add the sums of all workers, for this worker's ranks."""
        ...


HEADER: Final = None
"""An algorithm yields this after all work that does not need the header of the call."""


def exhaust(steps: WaitSteps) -> None:
    """Run the algorithm of a single replica to its end; it never waits."""
    for awaited in steps:
        assert awaited is HEADER


class EveryRankError(Exception):
    """An error that every rank raises at the same point; becomes a ValueError."""


class LengthsDifferError(Exception):
    """The lengths of arrays have changed: all ranks exchange them, and call again."""

    def __init__(self, call: Any) -> None:
        super().__init__(f"the lengths of the arrays in {call.text} have changed")
        self.call = call


class Exchange(Waitable):
    """Nonblocking MPI calls; ``arrays`` are kept alive until all calls are complete."""

    # A default for `__del__`, in case an interrupt ends the constructor.
    requests: Any = ()

    def __init__(self, *arrays: Any) -> None:
        # Append each request right after its MPI call, in case the next call fails.
        self.requests, self._arrays = [], arrays

    def agreed(self) -> bool:
        """Return whether all requests are complete."""
        requests = self.requests
        if requests and type(requests[0]).Testall(requests):
            self.requests = requests = []
        return not requests

    def __del__(self) -> None:
        # If an error has ended the wait, MPI may still use the arrays.
        if self.requests:
            keep(self.requests, self._arrays)


class Message(Exchange):
    """One nonblocking MPI call, which the constructor makes; it moves ``nbytes``."""

    def __init__(
        self, call: Callable[..., Any], *arguments: Any, nbytes: int = 0
    ) -> None:
        super().__init__(*arguments)
        self.nbytes = nbytes
        self.requests.append(call(*arguments))
