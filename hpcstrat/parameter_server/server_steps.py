"""Optimizer steps on servers, which hold the variables and the optimizers' state."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.errors import NonFiniteError
from hpcstrat.optimizers.gradients import clip_to_norm, merged_rows, require_names
from hpcstrat.optimizers.non_finite import are_finite
from hpcstrat.optimizers.optimizer import Optimizer
from hpcstrat.optimizers.rules import is_of_elements
from hpcstrat.parameter_server.client import Client
from hpcstrat.parameter_server.handles import pickled
from hpcstrat.parameter_server.server_variables import ServerVariable


def _checked(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, ServerVariable]]:
    given = [(g, v) for g, v in pairs if g is not None]
    if not given:
        raise ValueError(
            "expected a gradient for at least one variable, found none; check which "
            "variables the loss depends on"
        )
    require_names(variable for _, variable in given)
    checked: list[tuple[Any, ServerVariable]] = []
    for gradient, variable in given:
        if not isinstance(variable, ServerVariable):
            raise ValueError(
                f"expected variables on parameter servers, found {variable!r:.80}; "
                "create it in the strategy's scope"
            )
        if isinstance(gradient, IndexedSlices):
            values = variable._rows("apply_gradients", gradient)
            rows = IndexedSlices(values, gradient.indices, variable.shape)
            checked.append((merged_rows(rows), variable))
        else:
            checked.append((variable._converted("apply_gradients", gradient), variable))
    return checked


def _conditioned(
    optimizer: Optimizer, pairs: list[tuple[Any, ServerVariable]], non_finite: str
) -> list[tuple[Any, ServerVariable]] | None:
    """Return the clipped gradients, or None if the step is to be skipped."""
    limit = optimizer.clip_global_norm
    if limit is not None:
        # Clip copies, so that the caller's gradients do not change.
        pairs = [(copy.deepcopy(gradient), variable) for gradient, variable in pairs]
        given = [g for g, _ in pairs]
        arrays = [g.values if isinstance(g, IndexedSlices) else g for g in given]
        clip_to_norm(arrays, limit)
    if non_finite not in ("raise", "skip"):
        return pairs
    bad = next((v.name for g, v in pairs if not are_finite([g])), None)
    if bad is None:
        return pairs
    if non_finite == "skip":
        return None
    raise NonFiniteError(
        f"expected finite gradients, found others for {bad!r}; lower the learning "
        "rate, or look at the batch"
    )


def _require_whole(
    optimizer: Optimizer, pairs: list[tuple[Any, ServerVariable]]
) -> None:
    """Raise ValueError if a rule needs whole variables, but a variable is in shards.

    For example, a rule that divides by the norm of a variable needs the whole variable.
    """
    if is_of_elements(type(optimizer)):
        return
    for _, variable in pairs:
        if variable.num_shards > 1:
            raise ValueError(
                f"expected a rule that treats each element by itself for "
                f"{variable.name!r}, which lies in {variable.num_shards} shards, found "
                f"{type(optimizer).__name__}; keep the variable in one shard, take "
                "another rule, or say elementwise = True in its class, if it is so"
            )


def apply_at_servers(
    client: Client, optimizer: Optimizer, pairs: Iterable[Any], non_finite: str
) -> bool:
    """Send each server its parts of the gradients; the server makes the step.

    Return False if the step is skipped because of a non-finite gradient. The server
    counts the steps of each shard, because some rules need the number of the step.
    """
    optimizer.require_alone()
    if not isinstance(optimizer.iterations, ServerVariable):
        raise ValueError(
            "expected an optimizer that was made in the strategy's scope, found "
            f"{type(optimizer).__name__} that was made elsewhere, whose steps could "
            "not be counted; make it in the scope"
        )
    found = _checked(pairs)
    _require_whole(optimizer, found)
    checked = _conditioned(optimizer, found, non_finite)
    if checked is None:
        return False
    rate = optimizer.learning_rate
    if callable(rate):
        rate = rate(int(optimizer.iterations.numpy()))
    key, rule = optimizer.key, optimizer.rule()
    by_server: dict[int, list[tuple[int, Any]]] = {}
    for gradient, variable in checked:
        for server, number, part in variable.gradient_parts(gradient):
            by_server.setdefault(server, []).append((number, part))
    for server, steps in by_server.items():
        # Hold the lock, so that no other thread sends another rule before this step.
        with client.lock:
            if not client.knows_rule(server, key, rule):
                client.post(server, "rule", key, pickled(rule))
            client.post(server, "steps", key, float(rate), steps)
    optimizer.iterations.assign_add(np.ones((), np.int64), read_value=False)
    client.done()
    return True
