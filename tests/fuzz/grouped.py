"""The operations of a program with groups, on one rank."""

from __future__ import annotations

from typing import Any

import hpcstrat as hs
from tests.fuzz.machine import Machine
from tests.fuzz.program import Op

__all__ = ["end_round", "made", "round"]


def made(machine: Machine, op: Op, **options: Any) -> Any:
    """Form groups of the ranks; return the strategy of this rank's group."""
    try:
        machine.groups = hs.SyncGroups(
            size=op.size,
            every=op.every,
            delay=op.delay,
            outer=hs.optimizers.SGD(**op.outer) if op.outer else None,
            comm=machine.comm,
            replicas_per_worker=op.per_worker,
            **options,
        )
    finally:
        machine.world.allgather(machine.groups is not None)
    return machine.groups.strategy


def round(machine: Machine, op: Op) -> bool:  # noqa: A001 - the operation's name
    return bool(machine.groups.step())


def end_round(machine: Machine, op: Op) -> None:
    machine.groups.end_round()
