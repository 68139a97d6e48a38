"""The plans of calls that move arrays, and the lengths of arrays that ranks expect.

The lengths of arrays may differ between ranks, and from call to call. The ranks
exchange them once. Later headers have a hash of the lengths that a rank expects all
ranks to have, so that a change on any rank is noticed by all, and makes them exchange
the lengths again. If the lengths change often, the ranks exchange them in every call
for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from hpcstrat.engine.algorithms.blocks import MoveBlocks
from hpcstrat.engine.algorithms.move_plan import MovePlan
from hpcstrat.engine.arrays.recycling import Recycler
from hpcstrat.engine.calls.object_collectives import ObjectCollectives
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.waitable import LengthsDifferError
from hpcstrat.engine.typing import Array

__all__ = ["Move", "RepeatedMoves"]

# Limits of the plans that are kept: kinds of calls, and lengths for each kind.
_MOST_KINDS, _MOST_LENGTHS = 512, 64
# After this number of changes that ranks have noticed by their headers, they exchange
# the lengths in every call: in so many calls at first, and later in up to so many.
_MOST_CHANGES, _FEWEST_EXCHANGES, _MOST_EXCHANGES = 4, 8, 256


@dataclass(frozen=True, slots=True)
class Move:
    """A call that moves arrays in host memory between the ranks."""

    call: Call
    # This rank's arrays, and the arrays for its results; None to allocate them.
    arrays: Sequence[Array]
    outs: Sequence[Array] | None
    # The lengths and shapes of this rank's arrays, by which it finds an earlier plan.
    own: Hashable
    # Returns the blocks for the lengths of all ranks, and the shapes and dtypes of new
    # results.
    plan: Callable[[Any], tuple[MoveBlocks, Any]]
    # The kernel's function that repeats the call, the names of the call and of the
    # operation, and the value that the program has passed.
    kept: tuple[Any, str, Any, Any]
    # Returns the lengths of all ranks, by an InterruptibleComm, or the error that all
    # ranks raise because the lengths do not fit each other. None if the header compares
    # the lengths, which ``plan`` then does not need.
    exchange: Callable[[Any], Any] | None = None
    # The lengths of all ranks if those of all are equal to this rank's.
    equal: Any = None


class _Kind:
    """A kind of call, as one rank knows it; only the plans differ between ranks."""

    def __init__(self) -> None:
        # The plans of calls by this rank's own lengths.
        self.plans: dict[Hashable, MovePlan] = {}
        # True until the ranks have first found that their lengths differ.
        self.is_new = True
        # Number of changes of the lengths, and of the next calls that exchange them.
        self._changes = self._exchanges = 0
        self._next_exchanges = _FEWEST_EXCHANGES

    def plan(self, own: Hashable) -> MovePlan | None:
        """Return the plan for this rank's lengths, unless they change often."""
        return None if self._exchanges else self.plans.get(own)

    def change(self) -> None:
        """Note that the ranks expected different lengths."""
        self.plans.clear()
        self.is_new = False
        self._changes += 1
        if self._changes >= _MOST_CHANGES:
            self._changes, self._exchanges = 0, self._next_exchanges
            self._next_exchanges = min(2 * self._next_exchanges, _MOST_EXCHANGES)

    def learn(self) -> bool:
        """Note an exchange of lengths, and return whether to keep a plan for them."""
        self.is_new = False
        self._exchanges = max(0, self._exchanges - 1)
        return not self._exchanges

    def keep(self, own: Hashable, plan: MovePlan) -> None:
        """Keep a plan for this rank's lengths."""
        if len(self.plans) >= _MOST_LENGTHS:
            self.plans.clear()
        self.plans[own] = plan


class RepeatedMoves:
    """Makes calls that move arrays, by plans that are kept for later calls."""

    def __init__(self, collectives: ObjectCollectives) -> None:
        self._collectives = collectives
        self._kinds: dict[Hashable, _Kind] = {}
        self._recycler = Recycler()

    def close(self) -> None:
        """Forget the plans, which hold shared memory."""
        self._kinds.clear()

    def repeat(
        self, repeat: Any, what: str, name: Any, value: Any, out: Any, *nested: bool
    ) -> Any:
        """Repeat a call in the kernel; return None if Python code must make it."""
        try:
            return repeat(what, name, value, out, *nested)
        except LengthsDifferError as error:
            return self.change(error)

    def change(self, error: LengthsDifferError) -> None:
        """Note that the ranks have expected different lengths in a call."""
        self._kinds.setdefault(_mark(error.call), _Kind()).change()

    def make(self, move: Move) -> Sequence[Array]:
        """Make a call by a plan, which is made at the first call of its kind.

        Collective over ``topology.replica_comm``. Call this only from an entry, see
        `hpcstrat.engine.channel.entries`.
        """
        channel: Any = self._collectives.channel
        timeout_seconds = self._collectives.timeout_seconds
        channel.failures.refuse(move.call)
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        kind = self._kinds.setdefault(_mark(move.call), _Kind())
        while True:
            plan = kind.plan(move.own)
            expected = move.equal if kind.is_new else None
            try:
                if plan is not None:
                    return plan.run(move.arrays, move.outs, timeout_seconds)
                if move.exchange is None or expected is not None:
                    return self._first(kind, move, expected, True)
                channel.agree(move.call, timeout_seconds)
                break
            except LengthsDifferError:
                kind.change()
        with channel.moving(move.call) as comm:
            lengths = move.exchange(comm)
        if isinstance(lengths, Exception):
            # All ranks raise this error.
            channel.failures.told_at = channel.num_calls
            raise lengths
        # A second header reports an error on one rank, such as a lack of memory.
        given = move.call.text, self._first, kind, move, lengths, kind.learn()
        return cast("Sequence[Array]", self._collectives.call(*given))

    def _first(
        self, kind: _Kind, move: Move, lengths: Any, keeps: bool
    ) -> Sequence[Array]:
        """Make a plan for the lengths of all ranks, keep it, and run it."""
        blocks, results = move.plan(lengths)
        if move.outs is not None:
            results = [(out.shape, out.dtype) for out in move.outs]
        sources = [(array.shape, array.dtype) for array in move.arrays]
        call = move.call if lengths is None else move.call.with_lengths(lengths)
        channel: Any = self._collectives.channel
        allocate, seconds = self._recycler.arrays, self._collectives.timeout_seconds
        plan = MovePlan(call, blocks, (sources, results), channel, allocate)
        repeat, what, name, value = move.kept
        if keeps:
            kind.keep(move.own, plan)
            if type(value) in (list, np.ndarray):
                plan.keep(repeat, what, name, type(value) is list, seconds)
        return plan.run(move.arrays, move.outs, seconds)


def _mark(call: Call) -> Hashable:
    """Return what is equal in calls of one kind, whatever the lengths of the arrays."""
    return call.text, call.digest ^ call.lengths
