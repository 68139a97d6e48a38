"""The oracle of programs with groups: an oracle per group, and common rounds."""

from __future__ import annotations

import copy
from typing import Any

from tests.fuzz.arithmetic import Rule, combine
from tests.fuzz.oracle import Oracle
from tests.fuzz.program import Op, Program
from tests.fuzz.wanted import Want

__all__ = ["OracleOfGroups"]

_DILOCO = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}


class OracleOfGroups:
    """Executes a program with groups, and collects the expected results.

    Parameters
    ----------
    program : Program
        The program to run.
    n : int
        Number of ranks.
    """

    def __init__(self, program: Program, n: int) -> None:
        self._program, self._ranks, self._size = program, n, 0
        self._groups: list[Oracle] = []
        self._rule = Rule("SGD", {})
        # The outer parameters: their values, the rule's state, and each group's values
        # at the start of the sum in progress.
        self._outer: dict[str, Any] = {}
        self._slots: dict[str, Any] = {}
        self._starts: list[dict[str, Any]] = []
        self._gradient: dict[str, Any] | None = None
        self._since, self._under_way = 0, -1
        self._saved: Any = None

    def wants(self) -> list[Want]:
        """Return the expected results, up to the operation that ends the program."""
        found = []
        for op in self._program.ops:
            act = getattr(self, f"_{op.kind}", self._in_each)
            found.append(act(op))
            if op.kind in ("strategy", "restart") and any(found[-1].errors):
                break
        return found

    def _in_each(self, op: Op) -> Want:
        return _joined([g.want(_within(op, g, self._size)) for g in self._groups])

    def _form(self, op: Op) -> Want | None:
        """Form groups; return an error of all ranks if the sizes are wrong."""
        n = self._size = min(op.ranks or self._ranks, self._ranks)
        size = min(op.per_worker or n, n) if op.size is None else op.size
        if op.size is not None and n % size:
            return Want([None] * n, [("ValueError",)] * n)
        firsts = range(0, n, size)
        made = [Oracle(self._program, min(size, n - f), f, n) for f in firsts]
        self._every, self._delay = op.every, op.delay
        self._rule = Rule("SGD", op.outer or _DILOCO)
        self._groups = made
        return None

    def _strategy(self, op: Op) -> Want:
        refused = self._form(op)
        return refused or self._in_each(_alone(op))

    def _variable(self, op: Op) -> Want:
        want = self._in_each(op)
        floats = op.start.dtype.startswith("float") and op.trainable is not False
        if floats and op.sync != "on_read":
            self._outer[op.id] = op.start.value(0)
            self._slots[op.id] = self._rule.start(self._outer[op.id])
        return want

    def _own(self, group: Oracle) -> dict[str, Any]:
        return {name: group.variables[name].value for name in self._outer}

    def _round(self, op: Op) -> Want:
        if not self._outer:
            return Want([None] * self._size, [("ValueError",)] * self._size)
        self._since += 1
        met = False
        if self._under_way >= 0:
            self._under_way += 1
            if self._under_way >= self._delay:
                self._merge()
                met = True
        if self._since >= self._every:
            self._begin(self._delay)
            met = met or not self._delay
        return Want([met] * self._size, [None] * self._size)

    def _end_round(self, op: Op) -> Want:
        if not self._outer:
            return Want([None] * self._size, [("ValueError",)] * self._size)
        if self._under_way >= 0:
            self._merge()
        if self._since:
            self._begin(0)
        else:
            self._take_outer()
        return Want([None] * self._size, [None] * self._size)

    def _begin(self, delay: int) -> None:
        self._gradient = {}
        for name, outer in self._outer.items():
            # The mean weights each group by its number of replicas.
            changes = [
                outer - group.variables[name].value
                for group in self._groups
                for _ in range(group.size)
            ]
            self._gradient[name] = combine("mean", changes)
        self._since = 0
        if delay:
            self._starts = [copy.deepcopy(self._own(g)) for g in self._groups]
            self._under_way = 0
        else:
            self._finish()
            self._take_outer()

    def _finish(self) -> None:
        """Apply the sum in progress to the outer parameters, if there is one."""
        if self._gradient is not None:
            for name, gradient in self._gradient.items():
                self._outer[name] = self._rule.step(
                    *(self._outer[name], gradient, self._slots[name], 0)
                )
            self._gradient = None

    def _merge(self) -> None:
        self._finish()
        for group, starts in zip(self._groups, self._starts, strict=True):
            for name, outer in self._outer.items():
                variable = group.variables[name]
                variable.set(variable.value + (outer - starts[name]))
        self._under_way = -1

    def _take_outer(self) -> None:
        for group in self._groups:
            for name, outer in self._outer.items():
                group.variables[name].set(outer)

    def _save(self, op: Op) -> Want:
        self._finish()
        counts = self._since, self._under_way
        kept = self._outer, self._slots, self._starts, counts
        want = self._in_each(op)
        # Groups with different gradients may have different state, which save may
        # refuse.
        forms = [[o.form() for o in g.optimizers.values()] for g in self._groups]
        want.may_refuse = any(form != forms[0] for form in forms)
        self._saved = copy.deepcopy(kept), [group.kept for group in self._groups]
        return want

    def _restart(self, op: Op) -> Want:
        before = self._groups
        refused = self._form(op)
        if refused:
            return refused
        kept, groups = copy.deepcopy(self._saved)
        same = len(groups) == len(self._groups)
        if not same and op.per_replica is None:
            return Want([None] * self._size, [("CheckpointError",)] * self._size)
        first = op.per_replica == "first" and not same
        wants = []
        for index, group in enumerate(self._groups):
            saved = groups[0 if first else index % len(groups)]
            group.take(before[0], saved)
            wants.append(group.want(_alone(op)))
        self._gradient = None
        self._outer, self._slots, starts, counts = kept
        self._since, self._under_way = counts
        if starts:
            self._starts = [
                starts[0 if first else index % len(starts)]
                for index in range(len(self._groups))
            ]
        return _joined(wants)


def _joined(wants: list[Want]) -> Want:
    """Return the expected results of the replicas of all groups."""
    values = [value for want in wants for value in want.values]
    errors = [error for want in wants for error in want.errors]
    return Want(values, errors, bits=all(want.bits for want in wants))


def _alone(op: Op) -> Op:
    """Return the strategy operation of a group, with the group's size."""
    return Op(op.kind, {**op.args, "ranks": None})


def _within(op: Op, group: Oracle, total: int) -> Op:
    """Return an operation in one group, without the faults of other groups."""
    args = dict(op.args)
    for name, place in (("fault", 1), ("lacks", 1)):
        if args.get(name):
            fault = list(args[name])
            fault[place] = fault[place] % total - group.first
            theirs = 0 <= fault[place] < group.size
            args[name] = tuple(fault) if theirs else None
    if op.body:
        args["body"] = [_within(one, group, total) for one in op.body]
    return Op(op.kind, args)
