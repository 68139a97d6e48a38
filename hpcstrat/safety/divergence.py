"""Mirrored variables that have come to differ between replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcstrat.safety.comparison import Copy
from hpcstrat.safety.tolerance import compare
from hpcstrat.variables import SyncOnReadVariable, Variable

__all__ = ["check_mirrored"]


def check_mirrored(strategy: Any, variables: Mapping[str, Variable]) -> None:
    """Compare every mirrored variable between replicas.

    Collective over the strategy's replicas.

    Parameters
    ----------
    strategy : Strategy
        Whose replicas, and whose tolerance.
    variables : mapping of str to Variable
        By name, the same on every replica; SyncOnRead ones are passed over, plain ones
        must be equal, too.

    Raises
    ------
    DivergenceError
        On every replica, naming the first variable that differs, the replicas whose
        copy is not that of most of them, and its first element that differs.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    copies = [
        Copy(name, variable.component)
        for name, variable in variables.items()
        if not isinstance(variable, SyncOnReadVariable)
    ]
    what = f"comparison of {len(copies)} mirrored variables"
    strategy.collectives.barrier(what)
    comm = strategy.topology.replica_comm
    with strategy.collectives.moving(what):
        error = compare(comm, copies, strategy.settings.divergence_tolerance)
    if error is not None:
        raise error
