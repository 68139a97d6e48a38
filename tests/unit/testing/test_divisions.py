"""Results that differ between divisions of ranks into replicas are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs


def _train(ranks_per_replica: int) -> dict[str, Any]:
    with hs.MultiWorkerMirroredStrategy(
        ranks_per_replica=ranks_per_replica
    ) as strategy:
        inside, whole = strategy.inside, np.arange(12.0)
        own = whole[inside.part(12)]
        with strategy.scope():
            variable = hs.Variable(own, name="field", split=0)
        return {
            "field": variable.numpy(),
            "sum": inside.sum(own.sum()),
            "twice": inside.sum(inside.sum(own.sum())),
            "own": own,
        }


def _some(*names: str) -> Any:
    train = _train

    def chosen(ranks_per_replica: int) -> dict[str, Any]:
        found = train(ranks_per_replica)
        return {name: found[name] for name in names}

    return chosen


def test_equal_results_are_accepted() -> None:
    hs.testing.compare_divisions(_some("field", "sum"), [(2, 2)], rtol=0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("twice", "'twice' of one rank.*difference of 66.0 on rank 0 of 2 with 2 in"),
        (
            "own",
            r"'own' of one rank.*shape \(12,\), found.*\(6,\) on rank 0 of 2",
        ),
    ],
)
def test_other_results_are_named(name: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        hs.testing.compare_divisions(_some(name), [(2, 2)])
