"""The oracle: computes a program's results in one process, without hpcstrat.

The oracle has the state of all replicas: a variable is a list of its copies.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from tests.fuzz.arithmetic import combine, over_axis
from tests.fuzz.oracle_data import Reader
from tests.fuzz.oracle_optimizer import Optimizing
from tests.fuzz.oracle_variables import Copies
from tests.fuzz.program import Draw, Op, Program, ranks_per_replica
from tests.fuzz.wanted import ALIKE, ANY, EXACT, LOOSE, UNORDERED, Refused, Want

__all__ = ["Oracle", "is_plain"]

_PLAIN = (type(None), bool, int, float, str)


class Oracle:
    """Executes a program for all replicas, and collects the expected results.

    Parameters
    ----------
    program : Program
        The program to run.
    n : int
        Number of ranks.
    first, total : int
        For a group: number of its first rank, and total number of ranks.
    """

    def __init__(
        self, program: Program, n: int, first: int = 0, total: int | None = None
    ) -> None:
        self._program, self._ranks, self.first = program, n, first
        self._total = total
        self.size, self._ranks_per_replica = 0, 1
        self.raises = self.central = False
        self._after = EXACT
        self.workers: list[int] = []
        self.declared: list[Op] = []
        self.variables: dict[str, Copies] = {}
        self.optimizers: dict[str, Optimizing] = {}
        self.metrics: dict[str, list[list[float]]] = {}
        self.datasets: dict[str, Reader] = {}
        self.states: dict[str, Any] = {}
        self.policy = "off"
        self.kept: dict[str, Any] = {}
        self._saves = 0

    def wants(self) -> list[Want]:
        """Return the expected result of each operation."""
        return [self.want(op) for op in self._program.ops]

    def want(self, op: Op) -> Want:
        """Return the expected result of the next operation."""
        try:
            want: Want = getattr(self, f"_{op.kind}")(op)
        except Refused as refused:
            want = Want([None] * self.size, refused.errors)
        if self._after != EXACT:
            want.mode = self._after
        want.ranks_per_replica = self._ranks_per_replica
        return want

    def own(self, draw: Draw, **more: Any) -> list[Any]:
        """Return the arrays of all replicas for a draw."""
        first = self.first
        return [draw.value(first + rank, **more) for rank in range(self.size)]

    def take(self, declared: Oracle, kept: dict[str, Any]) -> None:
        """Adopt the declarations and the checkpoint of a group, for a restart."""
        self.declared, self.states = declared.declared, declared.states
        self.kept, self._saves = kept, declared._saves

    # Expected results of all replicas.

    def same(self, value: Any, **more: Any) -> Want:
        """Expect the same value on all replicas, with equal bits."""
        return self.each([value] * self.size, alike=True, **more)

    def each(self, values: list[Any], **more: Any) -> Want:
        """Expect a separate value on each replica."""
        return Want(values, [None] * self.size, **more)

    def everywhere(self, *names: str) -> Refused:
        """Return an expected error that every replica raises by itself."""
        return Refused([names] * self.size)

    def told(self, rank: int, name: str) -> Refused:
        """Return an expected error of one replica that the others are notified of."""
        one = rank % self.size
        return Refused(
            [
                (name,) if number == one else ("ReplicaError", name)
                for number in range(self.size)
            ]
        )

    def parted(self, op: Op) -> Want:
        """Return the expected result of a call that one replica aborts.

        Afterwards, replicas may be at different calls, or the strategy may be broken.
        """
        rank = op.fault[1] % self.size
        told = op.fault[0] in ("interrupt", "memory")
        self._after = ALIKE if told else LOOSE
        errors: list[Any] = [()] * self.size
        if op.fault[0] == "step":
            # The failing replica may see no error, if it ends before the others' error
            # arrives.
            errors[rank] = None
        return Want([ANY] * self.size, errors)

    # Methods for the operations.

    def _strategy(self, op: Op) -> Want:
        count = min(op.ranks or self._ranks, self._ranks)
        self._ranks_per_replica = ranks_per_replica(op, count)
        self.size = count // self._ranks_per_replica
        self.raises, self.policy = op.on_error == "raise", op.non_finite or "off"
        self.central = op.way == "central"
        self.workers = self._workers_of(self.size, op)
        self._all_workers = self._workers_of(self._total or self.size, op)
        return self.each([None] * self.size)

    def _workers_of(self, size: int, op: Op) -> list[int]:
        each = min(op.per_worker or size, size)
        return [number // each for number in range(size)]

    def _restart(self, op: Op) -> Want:
        declared, self.declared = self.declared, []
        self.__dict__.update(variables={}, optimizers={}, metrics={}, datasets={})
        states = self.states
        self._strategy(op)
        for one in declared:
            getattr(self, f"_{one.kind}")(one)
        saved = copy.deepcopy(self.kept)
        for name, value in saved["variables"].items():
            self.variables[name].restore(value)
        for name, state in saved["optimizers"].items():
            self.optimizers[name].restore(state)
        for name, total in saved["metrics"].items():
            self.metrics[name] = [total] + [[0.0, 0.0]] * (self.size - 1)
        for name, place in saved["datasets"].items():
            self.datasets[name].place = place
        self.states = states
        return self.each([[self._saves, saved["states"]]] * self.size)

    def _save(self, op: Op) -> Want:
        self._saves += 1
        self.kept = {
            "variables": {k: v.logical() for k, v in self.variables.items()},
            "optimizers": {k: o.saved() for k, o in self.optimizers.items()},
            "metrics": {k: np.sum(m, axis=0).tolist() for k, m in self.metrics.items()},
            "datasets": {k: d.place for k, d in self.datasets.items()},
            "states": copy.deepcopy(self.states),
        }
        refusable = not all(map(is_plain, self.states.values()))
        return self.each([self._saves] * self.size, may_refuse=refusable)

    def _variable(self, op: Op) -> Want:
        self.declared.append(op)
        self.variables[op.id] = Copies(op, self)
        return self.each([None] * self.size)

    def _optimizer(self, op: Op) -> Want:
        self.declared.append(op)
        self.optimizers[op.id] = Optimizing(op, self)
        return self.each([None] * self.size)

    def _metric(self, op: Op) -> Want:
        self.declared.append(op)
        self.metrics[op.id] = [[0.0, 0.0] for _ in range(self.size)]
        return self.each([None] * self.size)

    def _state(self, op: Op) -> Want:
        self.declared.append(op)
        self.states[op.id] = op.value
        return self.each([None] * self.size)

    def _dataset(self, op: Op) -> Want:
        self.declared.append(op)
        self.datasets[op.id] = Reader(op)
        return self.each([None] * self.size)

    def parts(self, op: Op) -> list[list[Any]]:
        """Return the arrays of all replicas, for each value of a call."""
        ragged = op.axis is not None or op.kind in ("gather", "all_gather")
        return [self.own(draw, ragged=ragged) for draw in op.values]

    def _reduce(self, op: Op) -> Want:
        if op.fault and op.fault[0] == "text":
            raise self.told(op.fault[1], "ValueError")
        if op.out == "overlap":
            raise self.everywhere("ValueError")
        parts = self.parts(op)
        if op.axis is not None:
            return self.same(over_axis(op.how, parts[0], op.axis))
        value = {f"v{i}": combine(op.how, part) for i, part in enumerate(parts)}
        if op.fault:
            return self.parted(op)
        # A single worker adds in the order of replicas, so that its bits are known.
        rounds = any(draw.style == "rounding" for draw in op.values)
        one = len(set(self.workers)) == 1 and not self._program.ops[0].ops
        return self.same(value, bits=op.how == "sum" and (one or not rounds))

    def _gather(self, op: Op) -> Want:
        return self.same(
            {f"v{i}": np.concatenate(part) for i, part in enumerate(self.parts(op))}
        )

    def _threads(self, op: Op) -> Want:
        value = [combine("sum", part) for part in self.parts(op)]
        self._after = LOOSE
        return self.each([value] * self.size)

    def _assign(self, op: Op) -> Want:
        if op.fault:
            # Other replicas learn of the error only if assignments end with an
            # agreement.
            raise self.told(op.fault[1], "ValueError")
        self.variables[op.var].assign(op.method, op.value.value(0))
        return self.each([None] * self.size)

    def _rows(self, op: Op) -> Want:
        parts = [(op.value.value(0), op.indices[0])]
        self.variables[op.var].scatter(op.method, parts, aggregated=False)
        return self.each([None] * self.size)

    def _read(self, op: Op) -> Want:
        return self.same(self.variables[op.var].read())

    def _progress(self, op: Op) -> Want:
        optimizer = self.optimizers[op.optimizer]
        return self.same([optimizer.steps, optimizer.skipped])

    def _result(self, op: Op) -> Want:
        total, count = np.sum(self.metrics[op.metric], axis=0)
        rule = next(one.rule for one in self.declared if one.id == op.metric)
        mean = total / count if count else 0.0
        return self.same(np.float64(total if rule == "Sum" else mean))

    def _reset(self, op: Op) -> Want:
        self.metrics[op.metric] = [[0.0, 0.0] for _ in range(self.size)]
        return self.each([None] * self.size)

    def _barrier(self, op: Op) -> Want:
        return self.each([None] * self.size)

    _check = _errors = _barrier

    def _differ(self, op: Op) -> Want:
        value = self.variables[op.var].value
        same = np.array_equal(value + value.dtype.type(1), value, equal_nan=True)
        if op.fault and self.size > 1 and not same and not self.central:
            raise self.everywhere("DivergenceError")
        return self.each([None] * self.size)

    def _run(self, op: Op) -> Want:
        if op.fault and not self.raises and self.size > 1:
            return self.parted(op)
        return self.each(self._body(op, None))

    def _body(self, op: Op, batches: list[Any] | None) -> list[Any]:
        """Return the results of a replica function on each replica."""
        found: list[list[Any]] = [[] for _ in range(self.size)]
        failed: int | None = None
        entered = {name: one.saved() for name, one in self.optimizers.items()}
        at = op.fault[2] if op.kind == "run" and len(op.fault or ()) > 2 else None
        try:
            for index, inner in enumerate(op.body):
                if index == at:
                    failed = op.fault[1] % self.size
                act = getattr(self, f"_in_{inner.kind}")
                if failed is not None and (self.size == 1 or self._meets(inner)):
                    break
                if failed is not None:
                    act(inner, batches, failed)
                    continue
                for rank, value in enumerate(act(inner, batches, None)):
                    found[rank].append(value)
            if at is not None:
                raise self.told(op.fault[1], op.fault[0])
        except Refused:
            if self.raises:
                for name, optimizer in self.optimizers.items():
                    optimizer.run_failed(entered[name])
            raise
        return found

    def _meets(self, op: Op) -> bool:
        """Return whether an operation of a replica function needs all replicas."""
        if op.kind in ("own", "measure"):
            return False
        if op.kind in ("update", "scatter"):
            return self.variables[op.var].on_write
        if op.kind == "apply":
            return self.optimizers[op.optimizer].meets()
        return True

    def _in_all_reduce(self, op: Op, batches: Any, failed: Any) -> list[Any]:
        if op.fault and op.fault[0] == "text":
            raise self.told(op.fault[1], "ValueError")
        if op.fault:
            self._after = ALIKE
            raise self.everywhere()
        parts = self.parts(op)
        value = {f"v{i}": combine(op.how, part) for i, part in enumerate(parts)}
        return [value] * self.size

    def _in_all_gather(self, op: Op, batches: Any, failed: Any) -> list[Any]:
        return list(self._gather(op).values)

    def _in_started(self, op: Op, batches: Any, failed: Any) -> list[Any]:
        return [[combine(op.how, part) for part in self.parts(op)]] * self.size

    def _in_merge(self, op: Op, batches: Any, failed: Any) -> list[Any]:
        return [combine(op.how, self.parts(op)[0])] * self.size

    def _in_update(self, op: Op, batches: Any, failed: Any) -> list[Any]:
        variable = self.variables[op.var]
        if op.fault:
            raise self.told(op.fault[1], "ValueError")
        parts = self.own(op.value)
        return variable.update(op.method, parts, failed)

    def _in_scatter(self, op: Op, batches: Any, failed: Any) -> list[Any]:
        parts = [
            (part, op.indices[(self.first + rank) % len(op.indices)])
            for rank, part in enumerate(self.own(op.value))
        ]
        return self.variables[op.var].scatter(op.method, parts, aggregated=True)

    def _in_own(self, op: Op, batches: Any, failed: Any) -> list[Any]:
        return [np.array(part) for part in self.variables[op.var].parts]

    def _in_measure(self, op: Op, batches: Any, failed: Any) -> list[Any]:
        parts = self.own(op.value, ragged=True)
        for rank, totals in enumerate(self.metrics[op.metric]):
            if rank != failed:
                value = parts[rank]
                self.metrics[op.metric][rank] = [
                    totals[0] + float(value.sum()),
                    totals[1] + value.size,
                ]
        return [None] * self.size

    def _in_apply(self, op: Op, batches: Any, failed: Any) -> list[Any]:
        return self.optimizers[op.optimizer].apply(op, batches, failed)

    def _epoch(self, op: Op) -> Want:
        reader = self.datasets[op.dataset]
        found: list[list[Any]] = [[] for _ in range(self.size)]
        if reader.unordered:
            rows = np.sort(reader.rows)
            return self.each([rows] * self.size, mode=UNORDERED)
        own = slice(self.first, self.first + self.size)
        for number, every in enumerate(reader.epoch(self._all_workers, op.steps)):
            batches = every[own]
            if op.fault and op.fault[2] == number and self.size > 1:
                return self.parted(op)
            inner = self._body(op, batches)
            rows = np.concatenate(batches) if op.gathers else None
            for rank in range(self.size):
                found[rank].append([batches[rank], inner[rank], rows])
        return self.each(found, mode=EXACT)


def is_plain(value: Any) -> bool:
    """Return whether a value is unchanged by JSON."""
    if isinstance(value, dict):
        return all(type(k) is str and is_plain(v) for k, v in value.items())
    if type(value) is list:
        return all(map(is_plain, value))
    return type(value) in _PLAIN
