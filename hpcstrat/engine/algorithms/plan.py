"""Plans of calls: a plan is made once for each kind of call, and run many times.

The compiled kernel makes the calls of a `KernelPlan`, and can repeat them without
Python code. It waits only for microseconds; the channel makes all longer waits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, Waitable, WaitSteps, exhaust
from hpcstrat.engine.channel.wire_headers import HeaderValues
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CollectiveError

__all__ = [
    "CopyPlan",
    "KernelPlan",
    "Kinds",
    "Plan",
    "StartMessages",
    "cached_piece_bytes",
    "is_plain",
    "repeat_nothing",
    "repeater",
    "without_memory",
]

Kinds = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
"""Shapes and dtypes of arrays."""

StartMessages = Callable[[Sequence[Array], Sequence[Array]], Waitable]
"""A function that starts a call's messages between its arrays and results."""

# Two ranks reduce large arrays in pieces of this size: four places of it, which are
# used in turn, stay in the cache of a core.
_CACHED_PIECE_BYTES = 64 << 10
# Return codes of the kernel.
_DONE, _HEADER_AWAITED, _, _DIFFERS, _, _HEADER_SENT, _NOT_READ = range(7)


class Plan:
    """A call for arrays of given shapes and dtypes; ``allocate`` makes the results.

    The methods that make the call are collective over ``topology.replica_comm``. A
    single replica has no ``channel``.
    """

    # True if the call can be started now and awaited later.
    starts = True
    # The source and the result of a `move` that may be the same memory.
    own = (-1, -1)

    def __init__(
        self,
        call: Call,
        results: Kinds,
        channel: Channel | None,
        allocate: Any,
    ) -> None:
        self.call, self.results = call, results
        self.channel: Any = channel
        self.allocate: Callable[[Kinds], list[Array]] = allocate

    def repeat(self, arrays: Any, outs: Any, timeout_seconds: float | None) -> Any:
        """Make the whole call in the kernel if possible; else return None."""

    def run(
        self,
        arrays: Sequence[Array],
        results: Sequence[Array],
        timeout_seconds: float | None,
    ) -> None:
        """Make the call in steps, and wait in each of them."""
        steps = self.steps(arrays, results, waits=True)
        if self.channel is None:
            exhaust(steps)
        else:
            self.channel.drive(steps, self.call, timeout_seconds)

    def move(
        self,
        arrays: Sequence[Array],
        outs: Sequence[Array] | None,
        timeout_seconds: float | None,
    ) -> Sequence[Array]:
        """Make a call that moves data; return ``outs``, or new arrays."""
        given = list(arrays), None if outs is None else list(outs)
        found: Sequence[Array] | None = self.repeat(*given, timeout_seconds)
        if found is None:
            found = self.allocate(self.results) if outs is None else outs
            # Copy arrays that results would overwrite.
            arrays = [
                array.copy() if self._overwrites(outs or (), i, array) else array
                for i, array in enumerate(arrays)
            ]
            self.run(arrays, found, timeout_seconds)
        return found

    def _overwrites(self, outs: Sequence[Array], index: int, array: Array) -> bool:
        return any(
            np.may_share_memory(array, out)
            and ((index, j) != self.own or array.ctypes.data != out.ctypes.data)
            for j, out in enumerate(outs)
        )

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool = False
    ) -> WaitSteps:
        """Make the call step by step; see `hpcstrat.engine.channel.waitable`.

        ``waits`` says whether the caller waits for each step, so that the program
        cannot write to the arrays meanwhile.
        """
        raise NotImplementedError


class CopyPlan(Plan):
    """A call of a single replica, or without elements: no rank sends anything."""

    def run(
        self,
        arrays: Sequence[Array],
        results: Sequence[Array],
        timeout_seconds: float | None,
    ) -> None:
        """Copy the arrays, without the steps of a call if there is a single replica."""
        if self.channel is None:
            _copy(arrays, results)
        else:
            super().run(arrays, results, timeout_seconds)

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool = False
    ) -> WaitSteps:
        """Copy the arrays; see `Plan.steps`."""
        yield HEADER
        _copy(arrays, results)


def _copy(arrays: Sequence[Array], results: Sequence[Array]) -> None:
    # A root that broadcasts has no results.
    for result, array in zip(results, arrays, strict=False):
        call_without_fp_warnings(assign, result, ..., array)


class KernelPlan(Plan):
    """A call that the kernel makes; ``one`` is its object for this kind of call.

    ``carried`` has the values in headers between workers; None inside a worker. If they
    are too long for a header, ``messages`` moves them after it.
    """

    def __init__(
        self,
        call: Call,
        results: Kinds,
        channel: Channel,
        allocate: Any,
        *,
        one: Any,
        carried: HeaderValues | None,
        messages: StartMessages | None = None,
    ) -> None:
        super().__init__(call, results, channel, allocate)
        self._one, self._carried, self._messages = one, carried, messages
        # The kernel keeps this function, which therefore must not refer to the plan.
        self._wait = _waiter(channel, call, carried, messages)

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
        wait = functools.partial(self._wait, timeout_seconds)
        carried, exchange = self._carried, ()
        if carried is not None:
            exchange = self.channel.wire.exchange(*carried.sizes)
        leave = self.channel.failures.leave
        continues = self._messages is not None
        self._one.keep(repeat, what, names, listed, wait, leave, exchange, continues)

    def repeat(self, arrays: Any, outs: Any, timeout_seconds: float | None) -> Any:
        """Make the whole call in the kernel if possible; else return None."""
        if self.channel.pending:
            # End the started calls first: their data use the same rings.
            self.channel.pending.drain()
        if not self.channel.may_repeat():
            return None
        found = self._one.reduce(arrays, outs)
        if type(found) is int:
            return self._wait(timeout_seconds, self._one, found)
        return found

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool = False
    ) -> WaitSteps:
        """Make the call step by step; see `Plan.steps`.

        Of several started calls, only the oldest is under way.
        """
        one, carried = self._one, self._carried
        sources, targets = list(arrays), list(results)
        if not one.start(sources, targets):
            # Copy arrays that are not contiguous or not aligned.
            sources = [np.require(a, requirements=["C", "A"]) for a in arrays]
            targets = [np.require(r, requirements=["C", "A", "W"]) for r in results]
            started = one.start(sources, targets)
            assert started
        yield HEADER if carried is None else carried
        yield from _rest(self.channel, self.call, one, self._messages, waits=waits)
        one.take_results()
        for result, target in zip(results, targets, strict=True):
            if target is not result:
                result[...] = target


def _waiter(
    channel: Any,
    call: Call,
    carried: HeaderValues | None,
    messages: StartMessages | None,
) -> Callable[..., Any]:
    """Return a function that waits for the ranks that the kernel found missing.

    The function returns the results of the kernel's object ``one``. ``failed`` is the
    error of a message that the kernel has started. If there are ``messages``, ``found``
    may be _DONE: then the headers of all ranks have arrived.
    """

    def wait(
        timeout_seconds: float | None,
        one: Any,
        found: int,
        failed: BaseException | None = None,
    ) -> Any:
        try:
            if carried is not None and found != _DONE:
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
            channel.failures.interrupted(call.text, error)
            raise
        if found == _DIFFERS:
            channel.failures.settle(call, timeout_seconds, carried)
        if carried is not None and messages is None:
            # All values have arrived with the header: no rank waits for this one.
            one.go_on(0)
        else:
            rest = _rest(channel, call, one, messages, waits=True)
            channel.advance(rest, call, waits=True)
        return one.take_results()

    return wait


def _rest(
    channel: Any, call: Call, one: Any, messages: StartMessages | None, *, waits: bool
) -> WaitSteps:
    """Make the steps of a call after its header; `Plan.steps` explains ``waits``."""
    if messages is not None:
        yield messages(*(v if type(v) is list else [v] for v in one.held()))
    while (found := one.go_on(channel.state.looks if waits else 0)) != _DONE:
        if found == _NOT_READ:
            raise CollectiveError(
                f"expected to read the memory of the other ranks in {call.text}, found "
                "that this failed; look whether a rank has died, or set "
                "HPCSTRAT_NATIVE=0"
            )
        yield channel.steps


def repeat_nothing(*_: Any) -> Any:
    """Return None, so that every call is made by Python code, not by the kernel."""


def repeater(channel: Any) -> Any:
    """Return the kernel's function that repeats calls; see `KernelPlan.keep`."""
    kernel = getattr(channel, "kernel", None)
    return repeat_nothing if kernel is None else kernel.repeater()


def cached_piece_bytes(piece_bytes: int, topology: Topology) -> int:
    """Return the size of the pieces of a reduction; the same on every rank.

    Two ranks of a worker that share cores with other ranks, or with each other, copy
    large pieces, because each piece costs them a switch. Workers of one rank send all
    values in one piece.
    """
    if topology.worker_comm.size != 2 or topology.shares_cores:
        return piece_bytes
    return min(piece_bytes, _CACHED_PIECE_BYTES)


def without_memory(kinds: Kinds) -> list[Array]:
    """Return arrays of these shapes and dtypes, without memory for each element."""
    return [np.broadcast_to(np.empty((), dtype), shape) for shape, dtype in kinds]


def is_plain(array: Array) -> bool:
    """Return whether an array needs no copy: it is aligned and C-contiguous."""
    flags = array.flags
    return flags.c_contiguous and (is_device(array) or flags.aligned)
