"""`read_state`, which reads all objects of a program for a checkpoint."""

from __future__ import annotations

from typing import Any

from hpcstrat.checkpoint.agreement import among_some_ranks, require_same_state
from hpcstrat.checkpoint.file.schema import Header
from hpcstrat.checkpoint.objects import Objects
from hpcstrat.engine.observe.job_timeline import measure

__all__ = ["read_state"]


def read_state(
    objects: Objects, strategy: Any, step: int, kind: str, metrics: dict[str, float]
) -> tuple[Header, dict[str, Any], dict[str, Any]]:
    """Return the header and the values of all objects at a step, and the variables.

    Collective over the strategy's replicas, which agree on everything. ``kind`` names
    the call in errors.
    """
    collectives = strategy.all_ranks.collectives
    try:
        variables = objects.variables()
        with among_some_ranks(strategy, "state of objects"):
            iterators, python = objects.states()
    except Exception as error:
        # Notify the other ranks, which would wait in the next collective call.
        collectives.fail(kind, error)
        raise
    require_same_state(collectives, python)
    given = f"metrics {metrics} and " if metrics else ""
    collectives.barrier(
        f"{kind} of step {step} with {given}{objects.describe(variables)}"
    )
    # For a timeline, measure clock offsets (they drift), here just after a barrier.
    channel = collectives.channel
    measure(None if channel is None else channel.topology)
    with among_some_ranks(strategy, f"reading of variables for a {kind}"):
        values = objects.values(variables)
    header = Header(
        step,
        strategy.num_replicas_in_sync,
        objects.entries(variables, values),
        iterators,
        python,
        metrics,
        group_of=() if strategy.split is None else tuple(strategy.split.group_of),
        ranks_per_replica=strategy.inside.size,
    )
    if strategy.logical:
        header.math_threads = strategy.settings.math_threads or 1
    return header, values, variables
