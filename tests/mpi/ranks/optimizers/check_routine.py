"""A step goes from the optimizer to its routine, and from there to backend and rule."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs

pytestmark = pytest.mark.rule

_STEP = {"optimizer", "routine", "update_backends", "step_slices", "adam", "lamb"}


def _calls(step: Any) -> set[tuple[str, str]]:
    """Return which module of a step calls a function of which other one."""
    found = set[tuple[str, str]]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event != "call" or frame.f_back is None:
            return
        pair = [
            f.f_globals.get("__name__", "").rpartition(".")[2]
            for f in (frame.f_back, frame)
        ]
        if pair[0] != pair[1] and _STEP.issuperset(pair):
            found.add((pair[0], pair[1]))

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("kind", ["copies", "central", "parts", "two stages"])
def test_no_module_of_a_step_calls_back_into_one_that_called_it(
    kind: str, make_strategy: Any, topology_layout: Any
) -> None:
    each = topology_layout.replicas_per_worker
    strategy = (
        hs.CentralStorageStrategy(replicas_per_worker=each)
        if kind == "central"
        else make_strategy()
    )
    with strategy.scope():
        shapes = {"large": (90, 80), "small": (3,), "other": (4, 5)}
        variables = [hs.Variable(np.ones(s), name=n) for n, s in shapes.items()]
        rule = hs.optimizers.LAMB if kind == "two stages" else hs.optimizers.Adam
        sharded = kind in ("parts", "two stages")
        optimizer = rule(0.1, sharded=sharded, clip_global_norm=1.0)
    pairs = [(np.ones(v.shape), v) for v in variables]
    for _ in range(3):
        found = _calls(lambda: strategy.run(lambda: optimizer.apply_gradients(pairs)))
        order = ["optimizer", "routine"]
        assert found <= {
            (first, second)
            for first in order
            for second in _STEP
            if second not in order[: order.index(first) + 1]
        } | {("lamb", "adam"), ("step_slices", "update_backends")}
        assert ("optimizer", "routine") in found
