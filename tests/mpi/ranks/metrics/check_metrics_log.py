"""The metrics log, which replica 0 writes for all replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs

pytestmark = pytest.mark.rule


def _records(folder: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in record.items() if k != "time"}
        for record in hs.metrics.read_log(folder)
    ]


def test_numbers_are_those_of_all_of_one_or_of_replica_0(
    strategy: Any, job: Any, folder: Path
) -> None:
    size, mine = job.size, float(strategy.replica_id)
    log = hs.metrics.Log(folder, strategy=strategy)
    log.scalars(1, {"a/b": mine + 1}, c=2 * mine)
    log.scalars(2, x=mine, of="mean")
    log.scalars(2, x=mine, y=np.float32(1), of="sum")
    log.scalars(3, x=mine, of=size - 1)

    def step() -> None:
        replica = hs.get_replica_context().replica_id_in_sync_group
        log.scalars(4, x=float(replica), of="sum")
        log.scalars(5, x=float(replica))
        log.text(5, "name", f"of {replica}", of=size - 1)

    strategy.run(step)
    losses = strategy.run(lambda: mine)
    log.scalars(6, x=losses, of="sum")
    log.text(7, "name", f"of {strategy.replica_id}")
    job.Barrier()
    total = sum(range(size))
    assert _records(folder) == [
        {"step": 1, "scalars": {"a/b": 1, "c": 0}},
        {"step": 2, "scalars": {"x": total / size}},
        {"step": 2, "scalars": {"x": total, "y": size}},
        {"step": 3, "scalars": {"x": size - 1}},
        {"step": 4, "scalars": {"x": total}},
        {"step": 5, "scalars": {"x": 0}},
        {"step": 5, "text": {"name": f"of {size - 1}"}},
        {"step": 6, "scalars": {"x": total}},
        {"step": 7, "text": {"name": "of 0"}},
    ]
    job.Barrier()


def test_a_restore_on_all_replicas_cuts_it_once(
    strategy: Any, job: Any, folder: Path
) -> None:
    with strategy.scope():
        weights = hs.Variable(1.0, name="weights")
    log = hs.metrics.Log(folder, strategy=strategy)
    with hs.CheckpointManager(folder, weights=weights, log=log) as manager:
        for step in (1, 2, 3):
            log.scalars(step, loss=1)
            if step < 3:
                manager.save(step, asynchronous=step == 1)
        manager.restore()
        log.scalars(3, loss=2)
    job.Barrier()
    found = [(r["step"], r["scalars"]["loss"]) for r in _records(folder)]
    assert found == [(1, 1), (2, 1), (3, 2)]
    job.Barrier()


@pytest.mark.parametrize("what", ["number", "picture"])
def test_what_cannot_be_logged_on_one_replica_is_an_error_on_all(
    what: str, make_strategy: Any, job: Any, folder: Path
) -> None:
    strategy, last = make_strategy(), job.size - 1
    log = hs.metrics.Log(folder, strategy=strategy)
    mine = object() if strategy.replica_id == last else 1.0

    def bad() -> None:
        if what == "number":
            log.scalars(1, x=mine, of="sum")
        else:
            log.picture(1, "name", mine, of=last)

    if what == "picture":
        pytest.importorskip("PIL")
    if what == "picture" and last == 0:
        pytest.skip("one replica waits for nobody")
    with pytest.raises((hs.ReplicaError, TypeError, ValueError)) as caught:
        bad()
    assert (type(caught.value) in (TypeError, ValueError)) == (
        strategy.replica_id == last
    )
    log.scalars(2, x=1.0, of="sum")
    job.Barrier()
    assert [r["step"] for r in _records(folder)] == [2]
    job.Barrier()


def test_a_restore_that_cannot_truncate_the_log_is_an_error_on_all(
    make_strategy: Any, job: Any, folder: Path
) -> None:
    strategy = make_strategy(on_error="raise")
    with strategy.scope():
        weights = hs.Variable(1.0, name="weights")
    log = hs.metrics.Log(folder, strategy=strategy)
    with hs.CheckpointManager(folder, weights=weights, log=log) as manager:
        manager.save(1)
        log.scalars(2, loss=1)
        # A folder of this name is in the way of the removed lines.
        in_the_way = folder / "metrics.removed.jsonl"
        if strategy.replica_id == 0:
            in_the_way.mkdir()
        kind = OSError if strategy.replica_id == 0 else hs.ReplicaError
        with pytest.raises(kind, match="Is a directory"):
            manager.restore()
        if strategy.replica_id == 0:
            in_the_way.rmdir()
        job.Barrier()
        manager.restore()
        log.scalars(2, loss=2)
    job.Barrier()
    assert [record["scalars"]["loss"] for record in _records(folder)] == [2]
    job.Barrier()
