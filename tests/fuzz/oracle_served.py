"""The oracle of programs whose variables are on parameter servers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.fuzz.oracle import Oracle
from tests.fuzz.program import Op
from tests.fuzz.wanted import Refused, Want

__all__ = ["OracleOfServed"]

_OF_ONE = ("assign", "rows", "save")
_STARTS = ("strategy", "restart")


def _writes(op: Op) -> bool:
    """Return whether functions that are called several times write variables."""
    return (
        op.kind == "schedule"
        and op.calls > 1
        and any(one.kind in ("apply", "scatter", "update") for one in op.body)
    )


class OracleOfServed(Oracle):
    """Executes a program of a coordinator, or of workers that share variables.

    There is one replica. Calls of a function may run in any order and concurrently;
    their effect on variables must be the same in any order.
    """

    def wants(self) -> list[Want]:
        """Return the expected results, up to the operation that ends the program.

        When a call fails, calls that have not begun are dropped, so that the number of
        writes is unknown.
        """
        found: list[Want] = []
        for op in self._program.ops:
            found.append(self.want(op))
            if any(found[-1].errors) and (op.kind in _STARTS or _writes(op)):
                break
        return found

    def want(self, op: Op) -> Want:
        """Return the next operation's expected result on each rank that takes part."""
        want = super().want(op)
        if self._of_workers < 2 or len(want.values) > 1:
            return want
        count, (value,), (error,) = self._of_workers, want.values, want.errors
        others = None if op.kind in _OF_ONE else error
        return Want([value] * count, [error] + [others] * (count - 1))

    def _strategy(self, op: Op) -> Want:
        self._of_workers = 1
        if op.way not in ("served", "shared"):
            return super()._strategy(op)
        n = min(op.ranks or self._ranks, self._ranks)
        shared = op.way == "shared"
        if n < op.servers + (1 if shared else 2):
            self.size = n
            raise Refused([("ValueError",)] * n)
        super()._strategy(Op(op.kind, {**op.args, "ranks": 1}))
        # As with central storage, no value belongs to a single replica.
        self.central = True
        self._of_workers = n - op.servers if shared else 1
        return self.each([None])

    def _schedule(self, op: Op) -> Want:
        found: list[Any] = []
        errors: list[Any] = []
        for number in range(op.calls):
            self.first, error = number, None
            try:
                found.append(self._body(op, None)[0])
            except Refused as refused:
                found.append(None)
                (error,) = refused.errors
            errors.append(error)
        self.first = 0
        count = self._of_workers
        if count < 2:
            return Want([found], [next(filter(None, errors), None)])
        return Want(
            [found[worker::count] for worker in range(count)],
            [next(filter(None, errors[w::count]), None) for w in range(count)],
        )

    def _in_fail(self, op: Op, batches: Any, failed: Any) -> list[Any]:
        if op.call == self.first:
            raise self.everywhere("KeyError")
        return [None]

    def _in_update(self, op: Op, batches: Any, failed: Any) -> list[Any]:
        super()._in_update(op, batches, failed)
        return [None]

    def _in_scatter(self, op: Op, batches: Any, failed: Any) -> list[Any]:
        super()._in_scatter(op, batches, failed)
        return [None]

    def _in_compute(self, op: Op, batches: Any, failed: Any) -> list[Any]:
        return [2 * op.value.value(self.first)]

    def _in_lookup(self, op: Op, batches: Any, failed: Any) -> list[Any]:
        value = self.variables[op.var].value
        return [np.array(value[list(op.ids)])]
