"""Chains of datasets on replicas: each sample once, in order, on any number of them."""

from __future__ import annotations

import itertools
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.data import DatasetOptions
from hpcstrat.data.batches import piece
from tests.mpi.ranks.dealing import joined
from tests.mpi.ranks.effort import seeds
from tests.mpi.ranks.outcomes import assert_usable, outcome

pytestmark = pytest.mark.rule


def make(seed: int) -> Any:
    """Return a random chain for a seed, with its input options; equal on every rank."""
    chance = random.Random(seed)
    dataset = batched(rows(chance, seed), chance)
    held = chance.choice([1, 1, 3])
    return dataset, hs.InputOptions(experimental_per_replica_buffer_size=held)


def rows(chance: random.Random, seed: int) -> Any:
    """Return a random dataset of rows, which may be a stream."""
    dataset = hs.Dataset.range(chance.randrange(1, 40))
    if chance.random() < 0.5:
        dataset = dataset.concatenate(hs.Dataset.range(100, 100 + chance.randrange(9)))
    if chance.random() < 0.6:
        dataset = dataset.shuffle(chance.choice([None, 4, 9]), seed)
    elif chance.random() < 0.5:
        dataset = dataset.shuffle(seed=seed, blocks=chance.randrange(1, 5), window=2)
    if chance.random() < 0.5:
        dataset = dataset.map(lambda x, rng: x + rng.integers(1) * 7, seed=1)
    if chance.random() < 0.2:
        dataset = dataset.cache()
    if chance.random() < 0.3:
        dataset = dataset.filter(lambda x: x % 3 != 1)
    return dataset


def batched(dataset: Any, chance: random.Random) -> Any:
    """Return the dataset in random batches."""
    dataset = dataset.batch(chance.randrange(1, 12), chance.random() < 0.3)
    if chance.random() < 0.4:
        dataset = dataset.repeat(chance.randrange(1, 4))
    if chance.random() < 0.3:
        dataset = dataset.map(lambda x: x * 2)
    if chance.random() < 0.3:
        dataset = dataset.skip(1).take(5)
    if chance.random() < 0.6:
        dataset = dataset.prefetch(chance.randrange(1, 5))
    return dataset


def pieces(batches: list[Any], count: int) -> list[list[list[int]]]:
    return [
        [batch[slice(*piece(len(batch), count, r))] for r in range(count)]
        for batch in batches
    ]


def gathered(strategy: Any, job: Any, iterator: Any, steps: int) -> list[Any]:
    """Return the parts of all replicas in some steps, or up to the end."""
    own = []
    for _ in range(steps):
        batch = next(iterator, None)
        if batch is None:
            break
        own.append(strategy.local_value(batch).tolist())
    return [list(step) for step in zip(*job.allgather(own), strict=True)]


@pytest.mark.parametrize("seed", seeds(60))
def test_chains_are_those_of_one_process_and_go_on_anywhere(
    make_strategy: Any, job: Any, seed: int
) -> None:
    chance = random.Random(-seed)
    alone, _ = make(seed)
    epochs = [[batch.tolist() for batch in alone] for _ in range(3)]
    with make_strategy() as strategy:
        dataset, options = make(seed)
        distributed = strategy.experimental_distribute_dataset(dataset, options)
        for epoch in epochs[:2]:
            found = gathered(strategy, job, iter(distributed), 1000)
            assert found == pieces(epoch, job.size)
        left = chance.randrange(len(epochs[2]) + 1)
        iterator = iter(distributed)
        found = gathered(strategy, job, iterator, left)
        assert found == pieces(epochs[2][:left], job.size)
        state = distributed.state()
        del iterator
    # Half of the ranks, or fewer, continue from the saved position.
    count = chance.randrange(1, job.size + 1)
    comm = job.Split(0 if job.rank < count else 1, job.rank)
    if job.rank < count:
        with make_strategy(comm=comm) as strategy:
            dataset, options = make(seed)
            distributed = strategy.experimental_distribute_dataset(dataset, options)
            distributed.restore_state(state)
            rest = gathered(strategy, comm, iter(distributed), 1000)
            assert rest == pieces(epochs[2][left:], count) or left == len(epochs[2])
            assert distributed.state()["epoch"] == 3
    comm.Free()
    job.Barrier()
    names = [t.name for t in threading.enumerate() if "hpcstrat-reader" in t.name]
    for _ in range(100):
        names = [t.name for t in threading.enumerate() if "hpcstrat-reader" in t.name]
        if not names:
            break
        time.sleep(0.01)
    assert not names


SIZES = (2, 3, 4, 6)
KEPT: Any = {2: lambda x: x % 2 != 1, 3: lambda x: x % 3 != 1}


def recipe(chance: random.Random) -> list[tuple[str, Any]]:
    """Return the names and arguments of a random chain's methods."""
    steps: list[tuple[str, Any]] = []
    for name in chance.sample(["shuffle", "take", "skip", "repeat"], 2):
        steps.append((name, chance.choice([2, 20])))
    if chance.random() < 0.4:
        kinds = ["filter", "interleave", "sample", "rebatch", "zip", "concatenate"]
        steps.append((chance.choice(kinds), chance.choice([2, 3])))
    size = chance.choice(SIZES)
    steps.append(("batch", (size, chance.random() < 0.3)))
    for name in chance.sample(["map", "prefetch", "repeat", "skip", "take"], 3):
        # The same number of rows is another number of batches.
        count = chance.choice([12, 24]) // size
        batches = chance.choice([2, -1]) if name == "repeat" else count
        steps.append((name, batches if name != "skip" else batches // 2))
    return steps


def changed(steps: list[tuple[str, Any]], chance: random.Random) -> list[Any]:
    """Return the recipe with another batch size, and perhaps with other arguments."""
    size = next(argument[0] for name, argument in steps if name == "batch")
    other = chance.choice(SIZES)
    found: list[Any] = []
    for name, argument in steps:
        if name == "batch":
            found.append((name, (other, argument[1])))
        elif name in ("take", "skip") and ("batch", (other, False)) in found:
            found.append((name, argument * size // other))
        elif name in ("map", "prefetch") or chance.random() < 0.9:
            found.append((name, argument))
        else:
            found.append((name, 3))
    return found


def cook(steps: list[tuple[str, Any]]) -> Any:
    """Return the chain of a recipe."""
    data = hs.Dataset.range(24)
    special: dict[str, Any] = {
        "batch": lambda a: data.batch(*a),
        "map": lambda _: data.map(lambda x: x),
        "shuffle": lambda a: data.shuffle(a, seed=1),
        "filter": lambda a: data.filter(KEPT[a]),
        "interleave": lambda a: data.interleave(hs.Dataset.from_tensors, a, 1),
        "sample": lambda a: hs.Dataset.sample_from_datasets([data] * a, seed=a),
        "rebatch": lambda a: data.batch(a).unbatch(),
        "zip": lambda a: hs.Dataset.zip((data, data.skip(a))).map(lambda x, y: x + y),
        "concatenate": lambda a: data.concatenate(hs.Dataset.range(100, 100 + a)),
    }
    for name, argument in steps:
        make = special.get(name)
        data = make(argument) if make else getattr(data, name)(argument)
    return data


@pytest.mark.parametrize("seed", seeds(120))
def test_another_chain_continues_exactly_or_is_refused(
    make_strategy: Any, job: Any, seed: int
) -> None:
    """Rows before a saved position and after it are the rows of the second chain."""
    chance = random.Random(seed)
    steps = recipe(chance)
    others = changed(steps, chance)
    with make_strategy() as strategy:
        data = strategy.experimental_distribute_dataset(cook(steps))
        count = chance.randrange(6)
        found = gathered(strategy, job, iter(data), count)
        if len(found) < count:
            # The first epoch has ended.
            found = []
        state = data.state()
    fewer = chance.randrange(1, job.size + 1)
    comm = job.Split(0 if job.rank < fewer else 1, job.rank)
    if job.rank < fewer:
        with make_strategy(comm=comm) as strategy:
            again = strategy.experimental_distribute_dataset(cook(others))
            error = outcome(again.restore_state, state)
            assert error is None or steps != others, error
            assert error is None or "restore with the data set" in str(error), error
            if error is None:
                rest = gathered(strategy, comm, iter(again), 50)
                before, after = joined(map(joined, found)), joined(map(joined, rest))
                chain = cook(others)
                chain.epoch = state["epoch"]
                whole = [r for b in itertools.islice(chain, 100) for r in b.tolist()]
                # Each of 50 batches has a row, or the epoch has ended.
                assert (before + after)[:50] == whole[:50], (steps, others)
    comm.Free()
    job.Barrier()


def test_a_take_of_other_batches_has_the_same_rows(strategy: Any, job: Any) -> None:
    chain = hs.Dataset.range(30).batch(4).take(3)
    data = strategy.experimental_distribute_dataset(chain)
    next(iter(data))
    for batch, count, rest in ((3, 4, [3, 3, 2]), (5, 3, None), (4, 2, None)):
        other = hs.Dataset.range(30).batch(batch).take(count)
        again = strategy.experimental_distribute_dataset(other)
        if rest is None:
            with pytest.raises(ValueError, match="restore with the data set"):
                again.restore_state(data.state())
            continue
        again.restore_state(data.state())
        found = gathered(strategy, job, iter(again), 99)
        assert [len(joined(step)) for step in found] == rest
        assert joined(map(joined, found)) == list(range(4, 12))


@pytest.mark.parametrize("ahead", [1, 4])
def test_a_function_that_fails_on_one_rank_is_an_error_on_all(
    make_strategy: Any, job: Any, ahead: int
) -> None:
    def broken(x: Any) -> Any:
        if x == 5 or (x == 9 and job.rank == job.size - 1):
            raise OSError(f"row {x}")
        return x

    with make_strategy(on_error="raise") as strategy:
        options = hs.InputOptions(experimental_per_replica_buffer_size=ahead)
        dataset = hs.Dataset.range(16).map(broken).batch(4)
        iterator = iter(strategy.experimental_distribute_dataset(dataset, options))
        found = []
        for _ in range(4):
            error = outcome(
                lambda: found.append(strategy.local_value(next(iterator)).tolist())
            )
            errors = job.allgather(error is not None)
            assert all(errors) or not any(errors)
            if errors[0]:
                found.append("error")
        whole = [
            joined(parts)
            for parts in zip(*job.allgather(found), strict=True)
            if "error" not in parts
        ]
        assert whole[0] == [0, 1, 2, 3]
        assert found[1] == "error"
        assert whole[-1] == [12, 13, 14, 15]
        assert next(iterator, None) is None
        assert_usable(strategy, job)


def test_examples_that_are_not_batched_are_refused(strategy: Any, job: Any) -> None:
    with pytest.raises(ValueError, match="call batch"):
        strategy.experimental_distribute_dataset(hs.Dataset.range(3))
    assert_usable(strategy, job)


def test_positions_of_the_first_version_keep_their_epoch(
    make_strategy: Any, job: Any
) -> None:
    """A checkpoint of the first version continues in the old order of its epoch."""
    num_rows = 70_000
    key = np.random.SeedSequence((2, 1))
    old = np.random.Generator(np.random.Philox(key)).permutation(num_rows)
    with make_strategy() as strategy:
        dataset = hs.Dataset(np.arange(num_rows), 1000, shuffle=True, seed=2)
        distributed = strategy.experimental_distribute_dataset(dataset)
        state = distributed.state()
        state.update(epoch=1, global_position=68_000)
        del state["order_version"]
        distributed.restore_state(state)
        found = gathered(strategy, job, iter(distributed), 9)
        assert joined(joined(found)) == old[68_000:].tolist()
        step = gathered(strategy, job, iter(distributed), 1)
        again = hs.Dataset(np.arange(num_rows), 1000, shuffle=True, seed=2)
        again.epoch = 2
        assert joined(step[0]) == next(iter(again)).tolist()


@pytest.fixture
def texts(job: Any, tmp_path: Path) -> list[str]:
    folder = Path(job.bcast(str(tmp_path)))
    names = [folder / f"{index}.txt" for index in range(4)]
    if job.rank == 0:
        for index, name in enumerate(names):
            lines = "".join(f"{10 * index + line}\n" for line in range(index + 2))
            name.write_text(lines, encoding="utf-8")
    job.Barrier()
    return [str(name) for name in names]


@pytest.mark.parametrize("policy", ["auto", "file", "data", "off"])
def test_files_are_divided_by_the_policy(
    strategy: Any, job: Any, texts: list[str], policy: str
) -> None:
    topology = strategy.topology
    lines = [[10 * i + line for line in range(i + 2)] for i in range(4)]
    dataset = (
        hs.Dataset.from_text_files(texts)
        .map(int)
        .batch(2)
        .with_options(DatasetOptions(auto_shard_policy=policy))
    )
    distributed = strategy.experimental_distribute_dataset(dataset)
    for _ in range(2):
        found = gathered(strategy, job, iter(distributed), 100)
        worker = topology.worker_id
        mine = [
            row for step in found for r in topology.worker_replicas for row in step[r]
        ]
        if policy == "data" or job.size == 1:
            assert joined(joined(found)) == joined(lines)
        elif policy == "off":
            assert mine == joined(lines)
        else:
            assert mine == joined(lines[worker :: topology.num_workers])
    state = distributed.state()
    assert state["epoch"] == 2
    distributed.check_state(state)
    with pytest.raises(ValueError, match="with as many ranks"):
        distributed.check_state({**state, "num_parts": 99})


def test_chains_go_into_checkpoints(strategy: Any, job: Any, tmp_path: Path) -> None:
    folder = job.bcast(str(tmp_path / "checkpoints"))
    for chain in (
        hs.Dataset.range(20).shuffle(seed=3).repeat().batch(4).prefetch(2),
        hs.Dataset.range(20).filter(lambda x: x != 3).batch(4),
    ):
        data = strategy.experimental_distribute_dataset(chain)
        manager = hs.CheckpointManager(folder, data=data)
        iterator = iter(data)
        gathered(strategy, job, iterator, 2)
        manager.save(1, overwrite=True)
        rest = gathered(strategy, job, iterator, 2)
        manager.restore()
        assert gathered(strategy, job, iter(data), 2) == rest
        manager.close()


class Stateful:
    """An iterable that saves its position, with a generator's state as an array."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(3)
        self._at: tuple[int, Any] | None = None
        self._position = 0
        self._order: Any = None

    def __iter__(self) -> Any:
        if self._at is None:
            self._position, self._order = 0, self._generator.permutation(20)
        else:
            (self._position, self._order), self._at = self._at, None
        while self._position < 20:
            self._position += 4
            yield self._order[self._position - 4 : self._position]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = int(state["position"]), np.asarray(state["order"])


def test_positions_of_iterables_go_into_checkpoints(
    make_strategy: Any, job: Any, tmp_path: Path
) -> None:
    folder = job.bcast(str(tmp_path / "checkpoints"))
    rest: Any = None
    count = max(job.size - 1, 1)
    comm = job.Split(0 if job.rank < count else 1, job.rank)
    with make_strategy() as strategy:
        data = strategy.experimental_distribute_dataset(Stateful())
        manager = hs.CheckpointManager(folder, data=data)
        iterator = iter(data)
        gathered(strategy, job, iterator, 2)
        manager.save(1)
        manager.close()
        rest = [joined(step) for step in gathered(strategy, job, iterator, 9)]
        assert len(rest) == 3
    if job.rank < count:
        with make_strategy(comm=comm) as strategy:
            data = strategy.experimental_distribute_dataset(Stateful())
            manager = hs.CheckpointManager(folder, data=data)
            manager.restore()
            found = gathered(strategy, comm, iter(data), 9)
            assert [joined(step) for step in found] == rest
            manager.close()
    comm.Free()
