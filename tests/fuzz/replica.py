"""The operations of a program inside of ``run``, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import hpcstrat as hs
from tests.fuzz.faults import memory_runs_out, raised
from tests.fuzz.program import Op

if TYPE_CHECKING:
    from tests.fuzz.machine import Machine

__all__ = ["act", "step_of"]


def step_of(machine: Machine, op: Op) -> Callable[..., list[Any]]:
    """Return the replica function of a ``run`` operation."""

    fails = op.kind == "run" and len(op.fault or ()) > 2

    def step(batch: Any = None) -> list[Any]:
        found = []
        for index, inner in enumerate(op.body):
            if fails and op.fault[2] == index and machine.struck(op):
                raise raised(op.fault[0])
            found.append(act(machine, inner, batch))
        if fails and op.fault[2] >= len(op.body) and machine.struck(op):
            raise raised(op.fault[0])
        return found

    return step


def act(machine: Any, op: Op, batch: Any) -> Any:
    """Do an operation of a replica function, and return its result."""
    return _ACTS[op.kind](machine, op, batch)


def _all_reduce(machine: Machine, op: Op, batch: Any) -> Any:
    context = hs.get_replica_context()
    value = machine.arrays(op)
    out = value if op.out == "self" else None
    if op.fault and op.fault[0] == "memory" and machine.struck(op):
        with memory_runs_out():
            return context.all_reduce(op.how, value, out=out)
    return context.all_reduce(op.how, value, out=out)


def _all_gather(machine: Machine, op: Op, batch: Any) -> Any:
    return hs.get_replica_context().all_gather(machine.arrays(op), 0)


def _started(machine: Machine, op: Op, batch: Any) -> Any:
    context = hs.get_replica_context()
    values = [draw.value(machine.rank) for draw in op.values]
    handles = [context.start_all_reduce(op.how, value) for value in values]
    return [handle.wait() for handle in handles]


def _merge(machine: Machine, op: Op, batch: Any) -> Any:
    value = machine.arrays(op)["v0"]
    return hs.get_replica_context().merge_call(
        lambda strategy, part: strategy.reduce(op.how, part), args=(value,)
    )


def _update(machine: Machine, op: Op, batch: Any) -> Any:
    variable = machine.variables[op.var]
    value = op.value.value(machine.rank)
    if machine.struck(op):
        value = np.zeros((*value.shape, 2), value.dtype)
    return getattr(variable, op.method)(value)


def _scatter(machine: Machine, op: Op, batch: Any) -> Any:
    indices = np.array(op.indices[machine.rank % len(op.indices)])
    rows = hs.IndexedSlices(op.value.value(machine.rank), indices)
    return getattr(machine.variables[op.var], op.method)(rows)


def _own(machine: Machine, op: Op, batch: Any) -> Any:
    return np.array(machine.variables[op.var].value())


def _measure(machine: Machine, op: Op, batch: Any) -> None:
    value = op.value.value(machine.rank, ragged=True)
    machine.metrics[op.metric].update_state(value)


def _apply(machine: Machine, op: Op, batch: Any) -> bool:
    pairs = []
    without, lacking = op.lacks or (None, 0)
    lacks = bool(op.lacks) and (machine.rank - lacking) % machine.size == 0
    for index, (name, draw) in enumerate(zip(op.over, op.gradients, strict=True)):
        variable = machine.variables[name]
        gradient: Any = None
        if draw is not None and not (without == index and lacks):
            gradient = draw.value(machine.rank)
        if op.rows and gradient is not None:
            indices = np.array(op.rows[machine.rank % len(op.rows)])
            gradient = hs.IndexedSlices(gradient, indices, variable.shape)
        if batch is not None and gradient is not None:
            gradient = gradient * 0 + batch.sum() / 4
        pairs.append((gradient, variable))
    if op.fault and op.fault[0] == "shape" and machine.struck(op):
        pairs[0] = (np.zeros(77), pairs[0][1])
    return bool(machine.optimizers[op.optimizer].apply_gradients(pairs))


def _compute(machine: Machine, op: Op, batch: Any) -> Any:
    return 2 * op.value.value(machine.rank)


def _lookup(machine: Machine, op: Op, batch: Any) -> Any:
    return hs.embedding_lookup(machine.variables[op.var], np.array(op.ids))


_ACTS: dict[str, Callable[[Any, Op, Any], Any]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "started": _started,
    "merge": _merge,
    "update": _update,
    "scatter": _scatter,
    "own": _own,
    "measure": _measure,
    "apply": _apply,
    "compute": _compute,
    "lookup": _lookup,
}
