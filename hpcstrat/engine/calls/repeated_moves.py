"""The plans of calls that move arrays, and the lengths of arrays that ranks expect.

The lengths of arrays may differ between ranks, and from call to call. The ranks
exchange them once. Later headers have a hash of the lengths that a rank expects all
ranks to have, so that a change on any rank is noticed by all, and makes them exchange
the lengths again. If the lengths change often, the ranks exchange them in every call
for a while. An exchange of lengths is itself a gather of integers with a plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from hpcstrat.engine.algorithms.blocks import MoveBlocks, gathered_blocks
from hpcstrat.engine.algorithms.move_plan import plan_move
from hpcstrat.engine.algorithms.plan import KernelPlan, Kinds, Plan, repeater
from hpcstrat.engine.arrays.recycling import Recycler
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.entries import enter
from hpcstrat.engine.channel.waitable import LengthsDifferError
from hpcstrat.engine.typing import Array

__all__ = ["Move", "RepeatedMoves", "kept", "kinds_of"]

_Kept = TypeVar("_Kept")

# Limits of the plans that are kept: kinds of calls, and lengths for each kind.
_MOST_KINDS, _MOST_LENGTHS = 2048, 64
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
    # Returns the blocks for the lengths of all ranks, and the kinds of new results.
    plan: Callable[[Any], tuple[MoveBlocks, Kinds]]
    # The arguments by which the kernel finds the call when it repeats it: the names of
    # the call and of the operation, and the value that the program has passed. None if
    # the kernel is not to repeat it.
    given: tuple[str, Any, Any] | None
    # This rank's lengths as integers, of which all ranks have the same number. None if
    # the header compares the lengths, which ``plan`` then does not need.
    integers: Sequence[int] | None = None
    # Returns the lengths of all ranks for their integers, of which each rank has a row,
    # or the error that all ranks raise because the lengths do not fit each other. None
    # if the lengths are the rows.
    read_lengths: Callable[[tuple[tuple[int, ...], ...]], Any] | None = None
    # The lengths of all ranks if those of all are equal to this rank's.
    equal: Any = None


class _Kind:
    """A kind of call, as one rank knows it; only the plans differ between ranks."""

    def __init__(self) -> None:
        # The plans of calls by this rank's own lengths, and by those of all ranks.
        self.plans: dict[Hashable, Plan] = {}
        self.plans_of_all: dict[Hashable, Plan] = {}
        # The plan of the exchange of lengths.
        self.exchange: Plan | None = None
        # True until the ranks have first found that their lengths differ.
        self.is_new = True
        # Number of changes of the lengths, and of the next calls that exchange them.
        self._changes = self._exchanges = 0
        self._next_exchanges = _FEWEST_EXCHANGES

    def plan(self, own: Hashable) -> Plan | None:
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


class RepeatedMoves:
    """Makes calls that move arrays, by plans that are kept for later calls."""

    def __init__(self, collectives: Any) -> None:
        # The `Collectives` of the replicas.
        self._collectives = collectives
        self._kinds: dict[Hashable, _Kind] = {}
        self._recycler = Recycler()
        # The kernel's function, which may raise LengthsDifferError; see `repeat`.
        self.repeat_in_kernel = repeater(collectives.channel)

    def close(self) -> None:
        """Forget the plans, which hold shared memory."""
        self._kinds.clear()

    def call(
        self,
        make: Callable[..., Any],
        what: str,
        name: Any,
        value: Any,
        out: Any,
        *given: Any,
    ) -> Any:
        """Repeat an earlier call in the kernel; else make it by ``make``, as an entry.

        Collective over ``topology.replica_comm``. ``make`` gets all other arguments. A
        call is known by its name, the name of the operation, and the arrays, so that
        two operations must not have equal names.
        """
        try:
            found = self.repeat_in_kernel(what, name, value, out)
        except LengthsDifferError as error:
            self._kind(error.call).change()
            found = None
        if found is None:
            call = self._call_inside, make, what, name, value, out
            found = enter(self._collectives.channel, what, *call, *given)
        return found

    def _call_inside(
        self,
        make: Callable[..., Any],
        what: str,
        name: Any,
        value: Any,
        out: Any,
        *given: Any,
    ) -> Any:
        # Only here may the call be a part of another call of this thread.
        found = self.repeat(what, name, value, out, True)
        return make(what, name, value, out, *given) if found is None else found

    def repeat(self, *given: Any) -> Any:
        """Make an earlier call again in the kernel; return None if it cannot."""
        try:
            return self.repeat_in_kernel(*given)
        except LengthsDifferError as error:
            self._kind(error.call).change()
        return None

    def _kind(self, call: Call) -> _Kind:
        """Return what this rank knows of a call's kind, whatever the lengths."""
        mark = call.text, call.digest ^ call.lengths
        return kept(self._kinds, mark, _Kind, _MOST_KINDS)

    def make_known(
        self,
        call: Call,
        arrays: Sequence[Array],
        outs: Sequence[Array] | None,
        plan: Callable[[], tuple[MoveBlocks, Kinds]],
        given: tuple[str, Any, Any] | None = None,
    ) -> Sequence[Array]:
        """Make a call whose header has all sizes, which are the same on all ranks.

        ``plan`` returns its blocks, and the kinds of new results; see `make`.
        """
        own = outs is None, len(arrays), *kinds_of([*arrays, *(outs or ())])
        return self.make(Move(call, arrays, outs, own, lambda _: plan(), given))

    def make(self, move: Move) -> Sequence[Array]:
        """Make a call by a plan, which is made at the first call of its kind.

        Collective over ``topology.replica_comm``. Call this only from an entry, see
        `hpcstrat.engine.channel.entries`.
        """
        channel: Any = self._collectives.channel
        if channel is not None:
            channel.failures.refuse(move.call)
        kind = self._kind(move.call)
        while True:
            plan = kind.plan(move.own)
            expected = move.equal if kind.is_new else None
            try:
                if plan is not None:
                    return self._run(plan, move)
                if move.integers is None or expected is not None:
                    return self._first(kind, move, expected, True)
                lengths = self._exchange(kind, move)
                break
            except LengthsDifferError:
                kind.change()
        if isinstance(lengths, Exception):
            # All ranks raise this error.
            if channel is not None:
                channel.failures.told_at = channel.num_calls
            raise lengths
        # A second header reports an error on one rank, such as a lack of memory.
        given = move.call.text, self._first, kind, move, lengths, kind.learn()
        return cast("Sequence[Array]", self._collectives.call(*given))

    def _exchange(self, kind: _Kind, move: Move) -> Any:
        """Return the lengths of all ranks, or the error that all ranks raise.

        Raises LengthsDifferError if other ranks expect lengths, and do not exchange
        them.
        """
        own, size = np.array(move.integers, np.int64), self._collectives.size
        if kind.exchange is None:
            blocks = gathered_blocks(
                ((own.size,),) * size, (8,), (1,), self._collectives.rank
            )
            planned = blocks, [((size * own.size,), own.dtype)]
            call = move.call.with_lengths("an exchange of lengths")
            exchange = Move(call, [own], None, None, lambda _: planned, None)
            kind.exchange = self.planned(exchange, None)
        [found] = kind.exchange.move([own], None, self._collectives.timeout_seconds)
        rows = tuple(map(tuple, found.reshape(size, own.size).tolist()))
        return rows if move.read_lengths is None else move.read_lengths(rows)

    def plan(
        self, call: Call, own: Hashable, make: Callable[[], Plan | None]
    ) -> Plan | None:
        """Return the plan of a call whose header compares all lengths."""
        plans: Any = self._kind(call).plans
        found: Plan | None = kept(plans, own, make, _MOST_LENGTHS)
        return found

    def _first(
        self, kind: _Kind, move: Move, lengths: Any, keeps: bool
    ) -> Sequence[Array]:
        """Run a plan for the lengths of all ranks: a new one, or one after an exchange.

        The kernel may repeat only plans that ``kind`` drops when the lengths change.
        """
        # A field's additions belong to its last plan, so that it needs a new one.
        plans = {} if keeps or move.read_lengths else kind.plans_of_all
        make = functools.partial(self.planned, move, lengths)
        plan = kept(plans, (move.own, lengths), make, _MOST_LENGTHS)
        if keeps:
            kept(kind.plans, move.own, lambda: plan, _MOST_LENGTHS)
            if move.given is not None:
                self.keep(plan, *move.given)
        return self._run(plan, move)

    def _run(self, plan: Plan, move: Move) -> Sequence[Array]:
        return plan.move(move.arrays, move.outs, self._collectives.timeout_seconds)

    def planned(self, move: Move, lengths: Any) -> Plan:
        """Make a plan for the lengths of all ranks, None if the header has them."""
        blocks, results = move.plan(lengths)
        kinds = kinds_of(move.arrays), kinds_of(move.outs) if move.outs else results
        call = move.call if lengths is None else move.call.with_lengths(lengths)
        channel, allocate = self._collectives.channel, self._recycler.arrays
        return plan_move(call, blocks, kinds, channel, allocate)

    def keep(self, plan: Plan, what: str, name: Any, value: Any) -> None:
        """Let the kernel repeat calls with these arguments by a plan, if it can."""
        if isinstance(plan, KernelPlan) and type(value) in (list, np.ndarray):
            seconds = self._collectives.timeout_seconds
            given = what, (name,), type(value) is list, seconds
            plan.keep(self.repeat_in_kernel, *given)


def kept(
    plans: dict[Hashable, _Kept], key: Hashable, make: Callable[[], _Kept], most: int
) -> _Kept:
    """Return what ``plans`` keep for a key, or make and keep it.

    At most ``most`` are kept, because a program may always use new shapes.
    """
    found = plans.get(key)
    if found is None:
        found = make()
        if len(plans) >= most:
            plans.clear()
        plans[key] = found
    return found


def kinds_of(arrays: Sequence[Array]) -> Kinds:
    """Return the shapes and dtypes of arrays."""
    return [(array.shape, array.dtype) for array in arrays]
