"""The memory of `hs.elastic` on any number of ranks; other tests kill ranks."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.elastic.watching import reports
from tests.mpi.ranks.aggregations import AGGREGATIONS

pytestmark = pytest.mark.calls


def _make(strategy: Any) -> dict[str, Any]:
    on_read = {"synchronization": "on_read"}
    with strategy.scope():
        weights = hs.Variable(np.zeros(3), name="weights", aggregation="sum")
        made: dict[str, Any] = {
            "weights": weights,
            "parts": {
                name: hs.Variable(np.zeros(()), name=name, aggregation=name, **on_read)
                for name in AGGREGATIONS
            },
            "optimizer": hs.optimizers.Adam(0.1),
        }
    made["dataset"] = strategy.experimental_distribute_dataset(
        hs.Dataset(np.arange(40.0), 8, shuffle=True)
    )
    made["noise"] = strategy.random("noise", seed=3)
    return made


def _train(strategy: Any, made: dict[str, Any], iterator: Any) -> None:
    batch = next(iterator)

    def step(rows: Any) -> None:
        gradient = np.full(3, rows.sum() + made["noise"].shared.random())
        made["optimizer"].apply_gradients([(gradient, made["weights"])])
        for part in made["parts"].values():
            part.assign_add(rows.sum() + made["noise"].generator.random())

    strategy.run(step, args=(batch,))


def _state(strategy: Any, made: dict[str, Any]) -> list[Any]:
    parts = [part.component.copy() for part in made["parts"].values()]
    numbers = [made["noise"].generator.random(), made["noise"].shared.random()]
    return [made["weights"].numpy(), *parts, *numbers, made["dataset"].state()]


def _same(first: list[Any], second: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("copies", [False, True])
def test_restore_goes_on_where_the_last_commit_was(strategy: Any, copies: bool) -> None:
    memory = hs.elastic.Memory(partner_copies=copies)
    memory.begin(strategy, 1)
    made = _make(strategy)
    memory.track(**made)
    assert memory.restore() is None
    iterator = iter(made["dataset"])
    for step in range(1, 4):
        _train(strategy, made, iterator)
        memory.commit(step, losses=(step,), best={step: np.float32(0.1)})
    # Train on without a loss, to know the expected state.
    _train(strategy, made, iterator)
    whole = _state(strategy, made)

    # Make all objects anew, twice; the second time starts from a restored state.
    for generation in (2, 3):
        memory.begin(strategy, generation)
        made = _make(strategy)
        memory.track(**made)
        assert memory.restore() == 3
        assert repr(memory.state) == repr(
            {"losses": (3,), "best": {3: np.float32(0.1)}}
        )
        _train(strategy, made, iter(made["dataset"]))
        again = _state(strategy, made)
        assert _same(whole, again), (whole, again)


def test_commits_without_calls_in_between_keep_ranks_together(
    strategy: Any, job: Any
) -> None:
    memory = hs.elastic.Memory()
    memory.begin(strategy, 1)
    with strategy.scope():
        count = hs.Variable(0, name="count", synchronization="on_read", dtype="int64")
    memory.track(count=count)
    assert memory.restore() is None
    for step in range(20):
        count.component[...] = step
        memory.commit(step)
    memory.begin(strategy, 2)
    memory.track(count=count)
    count.component[...] = -1
    assert memory.restore() == 19
    assert count.component == 19


def test_commits_report_progress_to_the_watcher(
    strategy: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(folder / "socket")
    monkeypatch.setenv("HPCSTRAT_WATCH_SOCKET", path)
    monkeypatch.setattr(reports, "_last_report", [-1.0])
    memory = hs.elastic.Memory()
    memory.begin(strategy, 1)
    memory.track(**_make(strategy))
    assert memory.restore() is None
    with socket.socket(socket.AF_UNIX) as server:
        if strategy.rank == 0:
            server.bind(path)
            server.listen()
        # Reports are at least one second apart.
        memory.commit(7)
        memory.commit(8)
        strategy.barrier()
        if strategy.rank == 0:
            line, _ = server.accept()
            with line, line.makefile() as lines:
                assert json.loads(lines.readline()) == {"kind": "progress", "step": 7}
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.accept()


def test_other_objects_are_refused_on_every_rank(strategy: Any) -> None:
    memory = hs.elastic.Memory()
    memory.begin(strategy, 1)
    with strategy.scope():
        small = hs.Variable(np.zeros(3), name="small")
        large = hs.Variable(np.zeros(4), name="large")
    memory.track(it=small)
    memory.restore()
    memory.commit(1)
    memory.begin(strategy, 2)
    memory.track(it=large)
    with pytest.raises(hs.errors.CheckpointMismatchError, match=r"shape \(3,\)"):
        memory.restore()
    strategy.barrier()


def test_state_that_would_change_is_refused(strategy: Any) -> None:
    memory = hs.elastic.Memory()
    memory.begin(strategy, 1)
    memory.track()
    memory.restore()
    with pytest.raises(ValueError, match=r"ndarray at state\['what'\]"):
        memory.commit(1, what=np.ones(2))
    memory.commit(1, what=[1, None, "text"])


def test_abandoned_strategy_is_closed_and_the_others_work(
    strategy: Any, job: Any
) -> None:
    comm = job.Dup()
    other = hs.MultiWorkerMirroredStrategy(comm=comm)
    total = other.reduce("sum", 1, axis=None)
    assert total == other.num_replicas_in_sync
    assert other.lost_ranks is None
    # Each rank abandons the strategy by itself, as after a loss.
    other.abandon()
    if job.size > 1:
        with pytest.raises(hs.CollectiveError, match="closed"):
            other.barrier()
    other.close()
    strategy.barrier()
