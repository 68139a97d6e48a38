"""Iterables on several workers: batches are compared, or one worker deals them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.dealing import all_steps, epoch_rows, flat, good, joined
from tests.mpi.ranks.outcomes import assert_usable, outcome

pytestmark = pytest.mark.calls


SINGLE = {"single_pipeline": True}


class Again:
    """An iterable that calls a function for each new iterator."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


def batch_of(rows: Any) -> Any:
    rows = np.asarray(rows)
    return {"x": np.stack([rows, -rows], axis=1), "y": (rows * 0.5,)}


def shuffled(rng: Any, num_rows: int = 15, size: int = 4) -> Again:
    """Return an iterable of batches whose order changes with each iteration."""

    def make() -> Iterator[Any]:
        order = rng.permutation(num_rows)
        for start in range(0, num_rows, size):
            yield batch_of(order[start : start + size])

    return Again(make)


def workers_of(strategy: Any) -> tuple[int, int]:
    """Return the number of workers, and the number of this worker."""
    if strategy.num_replicas_in_sync == 1:
        return 1, 0
    return strategy.topology.num_workers, strategy.topology.worker_id


def assert_told_alike(error: Any, job: Any, *words: str) -> None:
    """Check that every rank raised an error with the same text."""
    assert type(error) is hs.CollectiveError, error
    assert len(set(job.allgather(str(error)))) == 1
    for word in words:
        assert word in str(error), error


def test_a_generator_without_a_seed_is_an_error_on_several_workers(
    strategy: Any, job: Any
) -> None:
    # Each process draws a different order, as an unseeded generator does.
    rng = np.random.default_rng(100 + job.rank)
    dataset = strategy.experimental_distribute_dataset(shuffled(rng))
    if workers_of(strategy)[0] == 1:
        for _ in range(3):
            rows = flat(epoch_rows(strategy, dataset, job))
            assert sorted(rows) == list(range(15))
        return
    iterator = iter(dataset)
    for batch in range(2):
        error = outcome(next, iterator)
        assert_told_alike(
            *(error, job, f"batch {batch} of iteration 0", "worker 0", "worker 1"),
            *("hash", "first row", "seed", "distribute_datasets_from_function"),
            *("hpcstrat.Dataset", "single_pipeline=True", "compare_every=0"),
        )
        first = strategy.broadcast_object(str(error))
        assert str(error) == first
    assert_usable(strategy, job)


def test_first_rows_and_hashes_of_batches_that_differ_are_shown(
    strategy: Any, job: Any
) -> None:
    workers, own = workers_of(strategy)
    rows = [[3, 1, 2], [7 if own == workers - 1 else 5, 6, 4]]
    iterator = iter(strategy.experimental_distribute_dataset(map(batch_of, rows)))
    next(iterator)
    error = outcome(next, iterator)
    if workers == 1:
        assert error is None
        return
    assert_told_alike(error, job, "batch 1 of iteration 0", "5, -5", "7, -7", "3.5")
    hashes = re.findall(r"in all ([0-9a-f]{16})", str(error))
    assert len(set(hashes)) == 2, error
    first = job.bcast(strategy.topology.worker_replicas[0], root=job.size - 1)
    assert error.ranks == (first,)
    assert_usable(strategy, job)


def test_a_shuffling_loader_of_torch_is_an_error_on_several_workers(
    strategy: Any, job: Any
) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    # The replicas draw different numbers from generators with the same seed.
    torch.rand(1 + job.rank)
    source = torch.utils.data.TensorDataset(torch.arange(15.0), torch.arange(15))

    def loader() -> Any:
        return torch.utils.data.DataLoader(source, batch_size=4, shuffle=True)

    def epoch(dataset: Any) -> list[int]:
        own = []
        for batch in dataset:
            x, y = (strategy.local_value(column) for column in batch)
            np.testing.assert_array_equal(x, y)
            own.extend(int(row) for row in y)
        return sorted(joined(job.allgather(own)))

    dataset = strategy.experimental_distribute_dataset(loader())
    if workers_of(strategy)[0] == 1:
        assert epoch(dataset) == list(range(15))
    else:
        assert_told_alike(outcome(epoch, dataset), job, "batch 0 of iteration 0")
    single = strategy.experimental_distribute_dataset(
        loader(), hs.InputOptions(**SINGLE)
    )
    for _ in range(3):
        assert epoch(single) == list(range(15))
    seeded = torch.utils.data.DataLoader(
        *(source, 4), shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    dataset = strategy.experimental_distribute_dataset(seeded)
    for _ in range(2):
        assert epoch(dataset) == list(range(15))


def test_data_that_end_earlier_on_a_worker_are_an_error(
    strategy: Any, job: Any
) -> None:
    workers, own = workers_of(strategy)
    count = 3 if own == workers - 1 else 2
    elements = [batch_of(np.arange(4 * i, 4 * i + 4)) for i in range(count)]
    iterator = iter(strategy.experimental_distribute_dataset(elements))
    for _ in range(2):
        next(iterator)
    error = outcome(next, iterator)
    if workers > 1:
        assert_told_alike(error, job, "batch 2", "the end of its data", "8, -8")
        # A rank whose data have ended stays at the end.
        assert type(outcome(next, iterator)) is StopIteration
    else:
        assert error is None
    assert_usable(strategy, job)


def test_every_kth_batch_is_compared_or_none(strategy: Any, job: Any) -> None:
    workers, own = workers_of(strategy)

    def elements() -> list[Any]:
        # From the fourth batch on, each worker has different batches.
        rows = [np.arange(8) + 10 * i for i in range(7)]
        return [batch_of(r + 1000 * own * (i > 2)) for i, r in enumerate(rows)]

    for every, found in ((1, 3), (2, 4), (3, 3), (4, 4), (5, 5), (0, None), (9, None)):
        options = hs.InputOptions(compare_every=every)
        dataset = strategy.experimental_distribute_dataset(elements(), options)
        iterator, number = iter(dataset), 0
        error = None
        while error is None:
            error, number = outcome(next, iterator), number + 1
        if workers > 1 and found is not None:
            assert_told_alike(error, job, f"batch {found} of")
        else:
            assert type(error) is StopIteration
            assert number == 8
    assert_usable(strategy, job)


def kinds_of_leaves(seed: int) -> dict[str, Any]:
    """Return leaves of kinds whose bytes cannot be compared directly."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(1, 100, 6)
    padded = np.empty(6, np.dtype([("a", "i1"), ("b", "f8")], align=True))
    # Fill the padding between the fields with random bytes.
    padded.view(np.uint8)[:] = np.random.default_rng().integers(0, 255, padded.nbytes)
    padded["a"], padded["b"] = numbers, numbers
    text = [f"row {number}" for number in numbers]
    return {
        "float": numbers.astype(np.float32),
        "strided": np.repeat(numbers, 2)[::2],
        "fortran": np.asfortranarray(np.stack([numbers, -numbers], axis=1)),
        "padded": padded,
        "long": numbers.astype(np.longdouble),
        "long complex": numbers.astype(np.clongdouble),
        "text": np.array(text),
        "strings": np.array(text, dtype=np.dtypes.StringDType()),
        "dates": numbers.astype("datetime64[s]"),
    }


@pytest.mark.parametrize("kind", list(kinds_of_leaves(0)))
def test_leaves_of_every_kind_are_compared(strategy: Any, job: Any, kind: str) -> None:
    workers, own = workers_of(strategy)
    for differs in (False, True):
        leaf = kinds_of_leaves(own if differs else 0)[kind]
        # Arrays of objects are not compared.
        objects = np.zeros(6, [("object", object)])
        objects["object"] = [object() for _ in range(6)]
        batch = (leaf, np.zeros((6, 0)), objects)
        iterator = iter(strategy.experimental_distribute_dataset([batch]))
        error = outcome(next, iterator)
        if differs and workers > 1:
            assert_told_alike(error, job, "batch 0 of iteration 0")
        else:
            assert error is None, error
    assert_usable(strategy, job)


def test_one_pipeline_deals_to_all_replicas(strategy: Any, job: Any) -> None:
    rng, touched = np.random.default_rng(), 0
    for num_rows, size in ((20, 6), (3, 5), (16, 4), (0, 3)):

        def make(num_rows: int = num_rows, size: int = size) -> Iterator[Any]:
            nonlocal touched
            touched += 1
            order = rng.permutation(num_rows)
            for start in range(0, num_rows, size):
                yield batch_of(order[start : start + size])

        dataset = strategy.experimental_distribute_dataset(
            Again(make), hs.InputOptions(**SINGLE)
        )
        for _ in range(2):
            steps = epoch_rows(strategy, dataset, job)
            assert sorted(flat(steps)) == list(range(num_rows))
            lengths = [sum(map(len, step)) for step in steps]
            full, rest = divmod(num_rows, size)
            assert lengths == [size] * full + [rest] * (rest > 0)
            for step in steps:
                most = -(-sum(map(len, step)) // job.size)
                assert [len(part) for part in step][: rest or None]
                assert max(map(len, step)) == most
    assert touched == (8 if job.rank == 0 else 0)


@pytest.mark.parametrize("policy", ["auto", "file", "off", "data"])
def test_one_pipeline_reads_all_files(strategy: Any, job: Any, policy: str) -> None:
    class Files:
        auto_shard_policy, files, batch_size = policy, ["a", "b"], 4

        def shard_files(self, num_shards: int, index: int) -> Any:
            raise AssertionError("one pipeline reads them all")

        def __iter__(self) -> Iterator[Any]:
            return (batch_of(np.arange(i, i + 4)) for i in (0, 4, 8))

    dataset = strategy.experimental_distribute_dataset(
        Files(), hs.InputOptions(**SINGLE)
    )
    assert flat(epoch_rows(strategy, dataset, job)) == list(range(12))


def test_one_function_deals_to_all_replicas(strategy: Any, job: Any) -> None:
    seen = []

    def make(context: Any) -> Any:
        seen.append(context)
        return [batch_of([3 * i, 3 * i + 1, 3 * i + 2]) for i in range(5)]

    dataset = strategy.distribute_datasets_from_function(
        make, hs.InputOptions(**SINGLE)
    )
    assert seen == ([hs.InputContext(1, 0, job.size)] if job.rank == 0 else [])
    assert sorted(flat(epoch_rows(strategy, dataset, job))) == list(range(15))


def test_errors_of_the_one_pipeline_are_raised_on_all(
    make_strategy: Any, job: Any
) -> None:
    def read(number: int) -> Any:
        if number in (1, 4):
            raise OSError(f"cannot read {number}")
        return np.arange(10 * number, 10 * number + 5)

    class Elements:
        def __iter__(self) -> Iterator[Any]:
            return map(read, range(6))

    with make_strategy(on_error="raise") as strategy:
        dataset = strategy.experimental_distribute_dataset(
            Elements(), hs.InputOptions(**SINGLE)
        )
        for _ in range(2):
            steps = all_steps(strategy, job, iter(dataset), 10)
            assert [isinstance(step[0], str) for step in steps] == [
                number in (1, 4) for number in range(6)
            ]
            found = [joined(step) for step in good(steps)]
            assert found == [read(number).tolist() for number in (0, 2, 3, 5)]
        assert_usable(strategy, job)


def test_ranks_with_other_pipelines_are_a_mismatch(strategy: Any, job: Any) -> None:
    options = hs.InputOptions(single_pipeline=job.rank == 0)
    error = outcome(strategy.experimental_distribute_dataset, [np.zeros(4)], options)
    assert (type(error) is hs.CollectiveError) == (job.size > 1), error
    assert_usable(strategy, job)


def test_one_pipeline_for_rows_that_every_replica_reads_is_refused(
    strategy: Any, job: Any
) -> None:
    error = outcome(
        strategy.experimental_distribute_dataset,
        hs.Dataset(np.zeros(4), 2),
        hs.InputOptions(**SINGLE),
    )
    assert type(error) is ValueError
    assert "hpcstrat.Dataset" in str(error)
    assert_usable(strategy, job)
