"""Rows of batches that always go to the replicas that own and cache them."""

from __future__ import annotations

from itertools import chain as joined
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.data import DatasetOptions
from hpcstrat.data.batches import owned_first, piece
from tests.mpi.ranks.dealing import all_steps
from tests.mpi.ranks.effort import examples

pytestmark = pytest.mark.rule

OWN = hs.InputOptions(own_rows=True)


class Counted:
    """A dataset that counts how often each of its rows was read."""

    def __init__(self, num_rows: int) -> None:
        self.reads = np.zeros(num_rows, np.int64)

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        return np.int64(index)


def _chain(dataset: Any, draw: np.random.Generator) -> Any:
    """Return shuffled batches, after random steps that keep random access."""
    if draw.integers(2):
        dataset = dataset.cache()
    dataset = dataset.shuffle(seed=int(draw.integers(9)))
    if draw.integers(2):
        dataset = dataset.repeat(2)
    if draw.integers(2):
        dataset = dataset.map(lambda row: row * 1)
    if draw.integers(2):
        dataset = dataset.take(max(1, dataset.cardinality() - 3))
    batch, drop = int(draw.integers(1, 14)), bool(draw.integers(2))
    if draw.integers(5):
        dataset = dataset.batch(batch, drop_remainder=drop)
    else:
        dataset = dataset.padded_batch(batch, drop_remainder=drop)
    if not draw.integers(4):
        dataset = dataset.skip(1).repeat(2)
    if not draw.integers(4):
        dataset = dataset.cache()
    if draw.integers(2):
        dataset = dataset.map(lambda rows: rows + 0)
    return dataset.prefetch(2) if draw.integers(2) else dataset


def test_each_replica_gets_as_many_of_its_own_rows_as_there_are() -> None:
    draw = np.random.default_rng(5)
    for _ in range(examples(600)):
        length, count = int(draw.integers(0, 40)), int(draw.integers(1, 9))
        owners = draw.integers(0, count, length)
        order = owned_first(owners, count)
        assert sorted(order) == list(range(length))
        for replica in range(count):
            first, last = piece(length, count, replica)
            own = (owners[order[first:last]] == replica).sum()
            assert own == min(last - first, (owners == replica).sum())


def test_batches_have_the_same_rows_as_without(strategy: Any, job: Any) -> None:
    draw = np.random.default_rng(7)
    for _ in range(examples(24)):
        chain = _chain(hs.Dataset.range(int(draw.integers(4, 50))), draw)
        usual = strategy.experimental_distribute_dataset(chain)
        own = strategy.experimental_distribute_dataset(chain, OWN)
        for _ in range(2):
            dealt, wanted = (
                all_steps(strategy, job, iter(each), 100) for each in (own, usual)
            )
            assert len(dealt) == len(wanted)
            for one, other in zip(dealt, wanted, strict=True):
                assert sorted(joined(*one)) == sorted(joined(*other))
                assert [len(part) for part in one] == [len(part) for part in other]


def test_a_cache_keeps_own_rows_and_few_others_are_read_again(strategy: Any) -> None:
    num_rows, batch = 480, 48
    source = Counted(num_rows)
    chain = hs.Dataset(source).cache().shuffle(seed=3).batch(batch)
    distributed = strategy.experimental_distribute_dataset(chain, OWN)
    count, rank = strategy.num_replicas_in_sync, strategy.replica_id
    first, last = -(-rank * num_rows // count), -(-(rank + 1) * num_rows // count)
    others = 0
    for epoch in range(4):
        source.reads[:] = 0
        for _ in distributed:
            pass
        if epoch:
            others += int(source.reads.sum())
            # Only rows that did not fit into a batch of the first epoch are read now.
            assert source.reads[first:last].max() <= 1
    # Rows are drawn at random, so a batch has more rows of one replica than of another.
    assert others <= 3 * num_rows // count // 4
    assert others == 0 or count > 1


def test_rows_come_once_where_another_number_of_replicas_goes_on(
    strategy: Any, job: Any
) -> None:
    def distributed(strategy: Any) -> Any:
        chain = hs.Dataset.range(101).cache().shuffle(seed=2).batch(9)
        return strategy.experimental_distribute_dataset(chain, OWN)

    first = distributed(strategy)
    seen: list[int] = []
    for _, batch in zip(range(5), first, strict=False):
        seen += _gathered(strategy, batch, job)
    with hs.MultiWorkerMirroredStrategy(logical_replicas=job.size + 2) as other:
        rest = distributed(other)
        rest.restore_state(first.state())
        for batch in rest:
            seen += _gathered(other, batch, job)
    assert sorted(seen) == list(range(101))


def test_rows_of_taken_batches_come_once_where_another_batch_size_goes_on(
    strategy: Any, job: Any
) -> None:
    rows = hs.Dataset.range(40).shuffle(seed=2)
    order = [int(row) for row in rows][:12]
    for size, count in ((3, 4), (6, 2), (12, 1), (2, 6)):
        first = strategy.experimental_distribute_dataset(rows.batch(4).take(3), OWN)
        seen = _gathered(strategy, next(iter(first)), job)
        other = rows.batch(size).take(count)
        rest = strategy.experimental_distribute_dataset(other, OWN)
        rest.restore_state(first.state())
        for batch in rest:
            seen += _gathered(strategy, batch, job)
        assert sorted(seen) == sorted(order)


def _gathered(strategy: Any, batch: Any, job: Any) -> list[int]:
    if strategy.logical:
        parts = strategy.experimental_local_results(batch)
    else:
        parts = (strategy.local_value(batch),)
    own = [int(row) for part in parts for row in part]
    return [row for part in job.allgather(own) for row in part]


def test_logical_replicas_have_the_same_rows_on_any_number_of_ranks() -> None:
    with hs.MultiWorkerMirroredStrategy(logical_replicas=4) as logical:
        _require_rows_of_owners(logical)


def _require_rows_of_owners(logical: Any) -> None:
    chain = hs.Dataset.range(60).shuffle(seed=4).batch(13)
    distributed = logical.experimental_distribute_dataset(chain, OWN)
    order = [int(row) for row in hs.Dataset.range(60).shuffle(seed=4)]
    for number, batch in enumerate(distributed):
        whole = np.array(order[13 * number : 13 * number + 13])
        dealt = whole[owned_first(whole * 4 // 60, 4)]
        parts = logical.experimental_local_results(batch)
        for replica, part in zip(logical.local_replicas, parts, strict=True):
            first, last = piece(len(whole), 4, replica)
            assert part.tolist() == dealt[first:last].tolist()


def test_endless_repetitions_have_owners_too(strategy: Any) -> None:
    chain = hs.Dataset.range(9).repeat().batch(2)
    batches = iter(strategy.experimental_distribute_dataset(chain, OWN))
    for _ in range(9):
        next(batches)


@pytest.mark.parametrize("kind", ["iterable", "stream", "rows", "files"])
def test_what_cannot_be_dealt_so_is_refused(strategy: Any, kind: str) -> None:
    policy = DatasetOptions(auto_shard_policy="off")
    data: Any = {
        "iterable": [np.arange(3)],
        "stream": hs.Dataset.from_generator(lambda: iter([1])).batch(2),
        "rows": hs.Dataset.range(6),
        "files": hs.Dataset.range(6).batch(2).with_options(policy),
    }[kind]
    with pytest.raises(ValueError, match="random access, in batches, for own_rows"):
        strategy.experimental_distribute_dataset(data, OWN)
