"""A call that the compiled kernel makes: its start, its header, its steps, its results.

The kernel itself waits only for microseconds; the channel makes all longer waits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, HeaderStep, WaitSteps
from hpcstrat.engine.channel.wire_headers import (
    HEADER_BYTES,
    WireHeaders,
    WorkerValues,
)
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CollectiveError

__all__ = [
    "SMALL_BYTES",
    "KernelCall",
    "SentValues",
    "cached_piece_bytes",
    "repeat_nothing",
    "repeater",
]

SMALL_BYTES = 32 << 10
"""The kernel allocates results below this size; larger results use recycled memory."""

# Two ranks copy large arrays in pieces of this size: four places of it, which are used
# in turn, stay in the cache of a core.
_CACHED_PIECE_BYTES = 64 << 10
# Return codes of the kernel.
_DONE, _HEADER_AWAITED, _, _DIFFERS, _, _HEADER_SENT, _NOT_READ = range(7)


def repeat_nothing(*_: Any) -> Any:
    """Return None, so that every call is made by Python code, not by the kernel."""


def repeater(channel: Any) -> Any:
    """Return a function of the channel's kernel that makes an earlier call again.

    It returns None if Python code must make the call. See `KernelCall.keep`.
    """
    kernel = getattr(channel, "kernel", None)
    return repeat_nothing if kernel is None else kernel.repeater()


def cached_piece_bytes(piece_bytes: int, topology: Topology) -> int:
    """Return the size of the pieces of large arrays; the same on every rank.

    Two ranks of a worker that share cores with other ranks, or with each other, copy
    large pieces, because each piece costs them a switch. Workers of one rank send all
    values in one piece.
    """
    if topology.worker_comm.size != 2 or topology.shares_cores:
        return piece_bytes
    return min(piece_bytes, _CACHED_PIECE_BYTES)


class SentValues:
    """The `HeaderPayload` of a call whose values the kernel copies and adds.

    ``nbytes`` is the size in bytes of the values of each worker. With two workers, the
    kernel's places are parts of the messages; with more, values are copied.
    """

    def __init__(self, values: WorkerValues, headers: WireHeaders, nbytes: int) -> None:
        self.nbytes, self.place_bytes = nbytes, values.place_bytes
        places, me = values.places[:, :nbytes], headers.worker
        most = max(headers.counts)
        # The values of this worker and of the next workers, in the messages it sends.
        sent = _blocks(headers.out, most, nbytes)
        # Destination and source of copies: before the first message, and, for each
        # hop, of the received values.
        self._gathered: list[tuple[Array, Array]] = []
        self._taken: list[list[tuple[Array, Array]]] = [[] for _ in headers.counts]
        if headers.num_workers > 2:
            self._gathered = [(sent[0], places[me])]
            for hop, count in enumerate(headers.counts):
                came = _blocks(headers.came[hop], count, nbytes)
                first = (me + (1 << hop)) % headers.num_workers
                until_last = min(count, headers.num_workers - first)
                later = max(0, min(count, most - (1 << hop)))
                self._taken[hop] = [
                    (places[first : first + until_last], came[:until_last]),
                    (places[: count - until_last], came[until_last:]),
                    (sent[1 << hop :][:later], came[:later]),
                ]
        # Lets the kernel find the records of all workers, and add their values.
        self.finish = values.kernel.arrive
        self.exchange = headers.exchange(nbytes)

    def gather(self) -> None:
        """Copy this worker's values from its place behind the header of its message."""
        for to, source in self._gathered:
            to[...] = source

    def take(self, hop: int) -> None:
        """Copy the values received in a hop to their places, and to later messages."""
        for to, source in self._taken[hop]:
            to[...] = source


def _blocks(message: Array, count: int, nbytes: int) -> Array:
    """Return the values behind a message's header, one row for each worker."""
    behind = message[HEADER_BYTES : HEADER_BYTES + count * nbytes]
    return behind.reshape(count, nbytes)


@dataclass(frozen=True, slots=True)
class _KernelWaits:
    """The waits of calls that the kernel has begun.

    It has no reference to the plan, because the kernel keeps its method `wait`.
    """

    channel: Any
    call: Call
    # The values in the header between workers, or None inside a worker.
    carried: SentValues | None

    def wait(
        self,
        timeout_seconds: float | None,
        one: Any,
        found: int,
        failed: BaseException | None = None,
    ) -> Any:
        """Wait for the ranks that the kernel found missing; then return the results.

        ``failed`` is the error of a message that the kernel has started.
        """
        channel, call, carried = self.channel, self.call, self.carried
        try:
            if carried is not None:
                state, sent = channel.state, found == _HEADER_SENT
                header = state.num_calls, state.run_fingerprint, call.digest, 0
                channel.wire.post(*header, carried, sent=sent)
                found = _HEADER_AWAITED
            if failed is not None:
                raise failed
            if found == _HEADER_AWAITED:
                agreed = channel.wait_header(call, timeout_seconds)
                found = found if agreed else _DIFFERS
            channel.state.last_call = call
        except BaseException as error:
            channel.failures.interrupted(call, error)
            raise
        if found == _DIFFERS:
            channel.failures.settle(call, timeout_seconds, carried)
        if carried is not None:
            # All values have arrived with the header: no rank waits for this one.
            one.go_on(0)
            return one.take_results()
        with channel.moving(call):
            for awaited in self.rest(one, waits=True):
                channel.wait(awaited, call)
        return one.take_results()

    def rest(self, one: Any, *, waits: bool) -> WaitSteps:
        """Make the steps of a call after its header; `KernelCall.steps` has ``waits``.

        A wait for them raises CollectiveError if the ranks are in different steps.
        """
        state = self.channel.state
        while (found := one.go_on(state.looks if waits else 0)) != _DONE:
            if found == _NOT_READ:
                raise CollectiveError(
                    "expected to read the memory of the other ranks in "
                    f"{self.call.text}, found that this failed; look whether a rank "
                    "has died, or set HPCSTRAT_NATIVE=0"
                )
            yield self.channel.steps


class KernelCall:
    """A kind of call that the kernel makes, as often as the program repeats it.

    ``one`` is the kernel's object for this kind of call, a ``Sum`` or a result of
    ``move``. ``carried`` has the values in headers between workers; None inside a
    worker. `run` and `repeat` are collective over ``topology.replica_comm``.
    """

    def __init__(
        self, channel: Channel, call: Call, one: Any, carried: SentValues | None
    ) -> None:
        self._channel, self._call, self._one = channel, call, one
        self._waits = _KernelWaits(channel, call, carried)

    def keep(
        self,
        repeat: Any,
        what: str,
        names: tuple[Any, ...],
        listed: bool,
        timeout_seconds: float | None,
    ) -> None:
        """Let the kernel's ``repeat`` make later calls of this kind itself.

        ``names`` are the operations that ``repeat`` may be called with, beside the name
        of the call; ``listed`` says whether its value is a list of arrays.
        """
        wait = functools.partial(self._waits.wait, timeout_seconds)
        carried = self._waits.carried
        exchange = () if carried is None else carried.exchange
        leave = self._channel.failures.leave
        self._one.keep(repeat, what, names, listed, wait, leave, exchange)

    def repeat(self, arrays: Any, outs: Any, timeout_seconds: float | None) -> Any:
        """Make the whole call in the kernel if possible; else return None."""
        channel = self._channel
        if channel.pending:
            # End the started calls first: their data use the same rings.
            channel.pending.drain()
        if not channel.may_repeat():
            return None
        found = self._one.reduce(arrays, outs)
        if type(found) is int:
            return self._waits.wait(timeout_seconds, self._one, found)
        return found

    def run(
        self,
        arrays: Sequence[Array],
        results: Sequence[Array],
        timeout_seconds: float | None,
    ) -> None:
        """Make the call in steps, and wait in each of them."""
        steps = self.steps(arrays, results, waits=True)
        self._channel.drive(steps, self._call, timeout_seconds)

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool
    ) -> WaitSteps:
        """Make the call step by step; see `hpcstrat.engine.channel.waitable`.

        Of several started calls, only the oldest is under way. ``waits`` says whether
        the caller waits for each step.
        """
        one, carried = self._one, self._waits.carried
        sources, targets = list(arrays), list(results)
        if not one.start(sources, targets):
            # Copy arrays that are not contiguous or not aligned.
            sources = [np.require(a, requirements=["C", "A"]) for a in arrays]
            targets = [np.require(r, requirements=["C", "A", "W"]) for r in results]
            started = one.start(sources, targets)
            assert started
        yield HEADER if carried is None else HeaderStep(carried)
        yield from self._waits.rest(one, waits=waits)
        one.take_results()
        for result, target in zip(results, targets, strict=True):
            if target is not result:
                result[...] = target
