"""Optimizers whose state is divided between the ranks have the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import assert_same_bits, outcome

pytestmark = pytest.mark.rule

SHAPES = [(), (3,), (7, 5), (301, 97), (0,)]
RULES = [
    lambda **more: hs.optimizers.SGD(0.1, momentum=0.9, **more),
    lambda **more: hs.optimizers.Adam(0.01, **more),
    lambda **more: hs.optimizers.AdamW(0.01, 0.1, exclude=["v1"], **more),
    lambda **more: hs.optimizers.Adagrad(0.1, **more),
    lambda **more: hs.optimizers.LAMB(0.1, exclude=["v1"], **more),
]


def variables(strategy: Any, dtype: Any = np.float32) -> list[Any]:
    rng = np.random.default_rng(1)
    with strategy.scope():
        return [
            hs.Variable(rng.standard_normal(shape).astype(dtype), name=f"v{number}")
            for number, shape in enumerate(SHAPES)
        ]


def train(
    strategy: Any, optimizer: Any, targets: list[Any], first: int = 0, stop: int = 4
) -> None:
    def step(number: int) -> None:
        replica = hs.get_replica_context().replica_id_in_sync_group
        rng = np.random.default_rng([number, replica])
        gradients = [rng.standard_normal(v.shape).astype(v.dtype) for v in targets]
        pairs: list[Any] = list(zip(gradients, targets, strict=True))
        if number == 2:
            # The gradient of one variable has only some rows.
            rows = hs.IndexedSlices(pairs[2][0][:2], [replica % 7, 3], (7, 5))
            pairs[2] = rows, targets[2]
        optimizer.apply_gradients(pairs)

    for number in range(first, stop):
        strategy.run(step, args=(number,))


def bits(optimizer: Any, targets: list[Any]) -> list[bytes]:
    state = optimizer.checkpoint_variables().items()
    found = [*((v.name, v) for v in targets), *state]
    return [variable.numpy().tobytes() for _, variable in sorted(found)]


@pytest.mark.parametrize("rule", RULES, ids=["sgd", "adam", "adamw", "adagrad", "lamb"])
@pytest.mark.parametrize(
    "more", [{}, {"clip_global_norm": 0.5}, {"aggregation": "mean"}]
)
def test_the_bits_are_those_of_whole_state(
    strategy: Any, job: Any, rule: Any, more: dict[str, Any]
) -> None:
    results = []
    for sharded in (False, True):
        targets = variables(strategy)
        with strategy.scope():
            optimizer = rule(sharded=sharded, **more)
        train(strategy, optimizer, targets)
        results.append(bits(optimizer, targets))
    assert results[0] == results[1]
    assert_same_bits(job, *(np.frombuffer(one, np.uint8) for one in results[1]))


def test_each_rank_keeps_a_part(strategy: Any, job: Any) -> None:
    targets = variables(strategy)
    with strategy.scope():
        optimizer = hs.optimizers.Adam(0.01, sharded=True)
    optimizer.build(targets)
    slots = optimizer.checkpoint_variables()
    whole = sum(v.component.size for v in targets)
    own = sum(
        slot.component.size for name, slot in slots.items() if name != "iterations"
    )
    assert own <= 2 * whole / job.size + 2 * len(SHAPES)
    assert slots["first_moment/v3"].shape == SHAPES[3]
    total = job.allreduce(own)
    assert total == 2 * whole


def test_checkpoints_know_nothing_of_it(strategy: Any, job: Any, folder: Path) -> None:
    targets = variables(strategy)
    with strategy.scope():
        optimizer = hs.optimizers.Adam(0.01)
    train(strategy, optimizer, targets)
    wanted = bits(optimizer, targets)
    for number, (before, after) in enumerate([(True, False), (False, True)]):
        place = folder / str(number)
        targets = variables(strategy)
        with strategy.scope():
            optimizer = hs.optimizers.Adam(0.01, sharded=before)
        train(strategy, optimizer, targets, 0, 2)
        hs.CheckpointManager(place, w=targets, optimizer=optimizer).save(2)
        # Restore into state that does not exist yet, and into state that exists.
        for steps in (0, 1):
            targets = variables(strategy)
            with strategy.scope():
                optimizer = hs.optimizers.Adam(0.01, sharded=after)
            train(strategy, optimizer, targets, 0, steps)
            hs.CheckpointManager(place, w=targets, optimizer=optimizer).restore()
            train(strategy, optimizer, targets, 2)
            assert bits(optimizer, targets) == wanted


@pytest.mark.parametrize("rule", [hs.optimizers.Adam, hs.optimizers.LAMB])
def test_with_logical_replicas(job: Any, rule: Any) -> None:
    from mpi4py import MPI

    results = []
    for comm, sharded in ((MPI.COMM_SELF, False), (None, True)):
        with hs.MultiWorkerMirroredStrategy(logical_replicas=4, comm=comm) as strategy:
            targets = variables(strategy)
            with strategy.scope():
                optimizer = rule(0.01, sharded=sharded)
            train(strategy, optimizer, targets)
            results.append(bits(optimizer, targets))
    assert results[0] == results[1]


def test_what_cannot_be_divided_is_refused(strategy: Any, job: Any) -> None:
    class Other(hs.optimizers.LAMB):
        def update(self, step: Any, gradient: Any, value: Any, *slots: Any) -> None:
            value -= gradient / np.abs(gradient).max()

    with strategy.scope():
        error = outcome(Other, 0.01, sharded=True)
        assert isinstance(error, ValueError), repr(error)
        assert "Other" in str(error)
