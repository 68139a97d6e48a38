"""Ranks of a replica that read different data raise an error, or are warned about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.options import InputReplicationMode
from hpcstrat.errors import CollectiveError, ReplicaError
from tests.mpi.ranks.outcomes import outcome

BATCHES, ROWS = 3, 12
WAYS = ("iterable", "single", "function", "per_replica")


@pytest.fixture(scope="module")
def replicas(job: Any) -> Iterator[list[Any]]:
    """Yield strategies with several ranks per replica, of one and of more workers."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                hs.MultiWorkerMirroredStrategy(
                    ranks_per_replica=count, replicas_per_worker=each
                )
            )
            for count in range(2, job.size + 1)
            if job.size % count == 0
            for each in sorted({1, job.size // count})
        ]


class Source:
    """Global batches; ``changed`` is called with the number of each batch."""

    def __init__(self, worker: int, changed: Callable[[int], int | None]) -> None:
        self.worker, self.changed, self.number = worker, changed, -1

    def __iter__(self) -> Source:
        self.number = -1
        return self

    def __next__(self) -> Any:
        self.number += 1
        added = self.changed(self.number)
        if added is None:
            self.number = BATCHES
        if self.number >= BATCHES:
            raise StopIteration
        return np.arange(ROWS) + 100 * self.number + 10_000 * self.worker + added


def distributed(
    strategy: Any, way: str, changed: Callable[[int], int | None], **options: Any
) -> Any:
    """Distribute batches; with functions, those of each worker are different."""
    if way in ("iterable", "single"):
        settings = hs.InputOptions(single_pipeline=way == "single", **options)
        source = Source(0, changed)
        return strategy.experimental_distribute_dataset(source, settings)
    mode = InputReplicationMode["PER_REPLICA" if way == "per_replica" else "PER_WORKER"]
    settings = hs.InputOptions(experimental_replication_mode=mode, **options)
    return strategy.distribute_datasets_from_function(
        lambda context: Source(context.input_pipeline_id, changed), settings
    )


def first_error(data: Any) -> Exception | None:
    """Return the first error in an iteration, or None."""

    def iterate() -> None:
        for _ in data:
            pass

    error: Exception | None = outcome(iterate)
    return error


@pytest.mark.parametrize("way", WAYS)
def test_equal_batches_are_dealt(replicas: list[Any], way: str) -> None:
    for strategy in replicas:
        for every in (0, 1, 2):
            data = distributed(strategy, way, lambda _: 0, compare_every=every)
            for _ in range(2):
                batches = [np.array(strategy.local_value(one)) for one in data]
                # A function's batches are those of one replica each.
                assert len(batches) == (
                    -(-BATCHES // len(strategy.topology.worker_replicas))
                    if way == "function"
                    else BATCHES
                )
                for found in strategy.inside.collectives.all_gather_object(
                    batches, "batches"
                ):
                    assert all(map(np.array_equal, found, batches))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", ["value", "end"])
def test_another_batch_of_one_rank_is_an_error_on_all(
    replicas: list[Any], way: str, fault: str
) -> None:
    for strategy in replicas:
        inside = strategy.inside
        last = inside.position == inside.size - 1 and strategy.replica_id == 0

        def changed(number: int, last: bool = last) -> int | None:
            if not last or number < BATCHES - 1:
                return 0
            return 1 if fault == "value" else None

        error = first_error(distributed(strategy, way, changed))
        assert isinstance(error, CollectiveError)
        assert "the same batches on all ranks of a replica" in str(error)
        # The strategy can still be used.
        total = strategy.reduce("sum", np.ones(2), axis=None)
        assert (total == strategy.num_replicas_in_sync).all()
        if fault == "value":
            data = distributed(strategy, way, changed, compare_every=0)
            assert first_error(data) is None


@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_one_rank_is_raised_on_all(replicas: list[Any], way: str) -> None:
    for strategy in replicas:
        inside = strategy.inside
        last = inside.position == inside.size - 1 and strategy.replica_id == 0

        def changed(number: int, last: bool = last) -> int:
            if last and number == BATCHES - 1:
                raise OSError("the disk is gone")
            return 0

        error = first_error(distributed(strategy, way, changed))
        assert isinstance(error, OSError if last else ReplicaError), repr(error)
        assert "the disk is gone" in str(error)


def test_arrays_that_differ_inside_of_a_replica_are_warned_about(
    replicas: list[Any], job: Any, caplog: Any
) -> None:
    odd = job.rank == job.size - 1
    for strategy in replicas:
        caplog.clear()
        rows = np.arange(float(ROWS)) + odd
        strategy.experimental_distribute_dataset(hs.Dataset(rows, 4))
        found = [r.getMessage() for r in caplog.records if r.name == "hpcstrat.data"]
        assert len(found) == (job.rank == 0)
        assert all(f"on rank {job.size - 1} than on rank 0" in one for one in found)
        caplog.clear()
        fields = hs.Dataset(np.ones((ROWS, 4))).split(0).batch(4)
        strategy.experimental_distribute_dataset(fields)
        assert not caplog.records


def test_files_that_differ_inside_of_a_replica_are_refused(
    replicas: list[Any], job: Any, folder: Path
) -> None:
    name = "b" if job.rank == job.size - 1 else "a"
    np.save(folder / f"{job.rank}.npy", np.zeros(3))
    job.Barrier()
    if job.rank == 0:
        for made in "ab":
            np.save(folder / f"{made}.npy", np.zeros((ROWS, 2)))
    job.Barrier()
    for strategy in replicas:
        rows = hs.Dataset.from_files(folder / f"{name}.npy").batch(4)
        with pytest.raises(CollectiveError, match=r"expected the same files"):
            strategy.experimental_distribute_dataset(rows)
