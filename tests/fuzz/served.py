"""The operations of a program with parameter servers, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hpcstrat as hs
from tests.fuzz.machine import Machine
from tests.fuzz.program import Op
from tests.fuzz.replica import act

__all__ = ["made", "schedule"]


def made(machine: Machine, op: Op, settings: Any) -> Any:
    """Return the strategy on ranks that run the program; return None later on others.

    The other ranks serve in this call, until the program restarts or ends.
    """
    options = {"num_ps": op.servers, "comm": machine.comm, "settings": settings}
    shards = hs.partitioners.FixedShardsPartitioner(op.shards) if op.shards else None
    if op.way == "shared":
        try:
            strategy = hs.ParameterServerStrategyV1(**options)
        except SystemExit:
            return None
        strategy.variable_partitioner = shards
        return strategy
    if machine.comm.rank:
        hs.Server(**options).join()
        return None
    return hs.ParameterServerStrategy(variable_partitioner=shards, **options)


class _Calling:
    """The machine as seen by a scheduled function, with the number of the call."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.variables, self.optimizers = machine.variables, machine.optimizers
        self.rank = number
        # Each call runs as a single replica.
        self.size = 1

    def struck(self, op: Op) -> bool:
        return False


def _function(body: list[Op]) -> Callable[[_Calling], list[Any]]:
    def call(calling: _Calling) -> list[Any]:
        found = []
        for op in body:
            if op.kind == "fail" and op.call == calling.rank:
                raise KeyError("planted")
            value = None if op.kind == "fail" else act(calling, op, None)
            # Drop results of writes, because workers write in any order.
            found.append(None if op.kind in ("update", "scatter") else value)
        return found

    return call


def schedule(machine: Machine, op: Op) -> Any:
    """Call a function many times, on any workers; return the result of each call."""
    function = _function(op.body)
    if machine.strategy.__class__ is hs.ParameterServerStrategyV1:
        # Without a coordinator, each worker makes its own calls.
        index, count = machine.strategy.worker_index, machine.workers.size
        numbers = range(index, op.calls, count)
        run = machine.strategy.run
        return [run(function, (_Calling(machine, number),)) for number in numbers]
    coordinator = hs.coordinator.ClusterCoordinator(machine.strategy)
    values = [
        coordinator.schedule(function, (_Calling(machine, number),))
        for number in range(op.calls)
    ]
    coordinator.join()
    return coordinator.fetch(values)
