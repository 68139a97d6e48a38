"""The chain of a dataset, compared with lists, and read in slices of any size."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from hpcstrat.data import (
    INFINITE,
    UNKNOWN,
    ArraySpec,
    Dataset,
    DatasetOptions,
    mix,
)
from hpcstrat.data.batched import Batched
from hpcstrat.data.rows import Rows
from hpcstrat.engine.tree import tree_map


def plain(element: Any) -> Any:
    """Return an element with its arrays replaced by lists."""
    return tree_map(lambda leaf: leaf.tolist(), element)


class _Drawn:
    """Draws a chain with random access, and its epochs as lists."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.dataset, self.epoch = self.source()
        for _ in range(self.random.randrange(5)):
            self.step()

    def source(self) -> Any:
        count = self.random.randrange(1, 9)
        if self.random.random() < 0.5:
            return Dataset.range(count), lambda epoch: list(range(count))
        values = [self.random.randrange(100) for _ in range(count)]
        return Dataset.from_tensor_slices(np.array(values)), lambda epoch: values

    def step(self) -> None:
        epoch, chance = self.epoch, self.random
        kind = chance.choice(
            [
                "take",
                "skip",
                "repeat",
                "shard",
                "map",
                "shuffle",
                "cache",
                "concatenate",
            ]
        )
        number = chance.randrange(1, 5)
        if kind == "take":
            self.dataset = self.dataset.take(number)
            self.epoch = lambda e: epoch(e)[:number]
        elif kind == "skip":
            self.dataset = self.dataset.skip(number)
            self.epoch = lambda e: epoch(e)[number:]
        elif kind == "repeat":
            self.dataset = self.dataset.repeat(number)
            self.epoch = lambda e: [
                row for q in range(number) for row in epoch(e * number + q)
            ]
        elif kind == "shard":
            index = chance.randrange(number)
            self.dataset = self.dataset.shard(number, index)
            self.epoch = lambda e: epoch(e)[index::number]
        elif kind == "map":
            self.dataset = self.dataset.map(lambda x: x * 3 + number)
            self.epoch = lambda e: [x * 3 + number for x in epoch(e)]
        elif kind == "shuffle":
            parent = self.dataset
            self.dataset = parent.shuffle(chance.choice([None, 2, 3]), number)
            stage: Any = self.dataset.stage
            count = parent.cardinality()

            def shuffled(e: int) -> list[int]:
                order = stage.rows(slice(0, count), e)
                assert sorted(order) == list(range(count))
                return [epoch(e)[row] for row in order]

            self.epoch = shuffled
        elif kind == "cache":
            self.dataset = self.dataset.cache()
            self.epoch = lambda e: epoch(0)
        else:
            other, rows = self.source()
            self.dataset = self.dataset.concatenate(other)
            self.epoch = lambda e: epoch(e) + rows(e)


@pytest.mark.parametrize("seed", range(150))
def test_chains_are_what_they_are_as_lists(seed: int) -> None:
    drawn = _Drawn(seed)
    assert isinstance(drawn.dataset.stage, Rows)
    chance = drawn.random
    size, drop = chance.randrange(1, 5), chance.random() < 0.3
    batched = drawn.dataset.batch(size, drop)
    times = chance.randrange(1, 3)
    whole = (
        batched.repeat(times)
        .take(chance.choice([-1, 3, 5]))
        .skip(chance.choice([0, 1]))
    )
    stage = whole.stage
    assert isinstance(stage, Batched)
    for epoch in range(2):
        rows = drawn.epoch(epoch)
        assert [int(row) for row in drawn.dataset] == rows
        assert len(drawn.dataset) == len(rows)
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        batches = [b for b in batches if len(b) == size or not drop]
        assert [plain(batch) for batch in batched] == batches
        assert len(batched) == len(batches)
    expected = [plain(batch) for batch in whole]
    assert len(whole) == len(expected)
    assert sum(map(len, expected)) == stage.num_rows
    position = 0
    for batch in expected:
        first, last = sorted(chance.randrange(len(batch) + 1) for _ in "ab")
        part = stage.read(stage.batch_at(0, position), first, last)
        assert plain(part) == batch[first:last]
        assert part.dtype == np.int64
        position = stage.stop(position, 0)
        assert position - len(batch) == stage.rows_before(expected.index(batch)) or (
            expected.count(batch) > 1
        )
    assert position == stage.num_rows
    ahead = whole.prefetch(3)
    assert [plain(batch) for batch in ahead] == expected


def test_without_an_end_reading_begins_anywhere() -> None:
    dataset = Dataset.range(10).shuffle(seed=1).repeat().batch(4)
    assert dataset.cardinality() == INFINITE
    with pytest.raises(TypeError, match="no end"):
        len(dataset)
    stage: Any = dataset.stage
    iterator = iter(dataset)
    taken = [plain(next(iterator)) for _ in range(5)]
    for number, batch in enumerate(taken):
        assert plain(stage.read(stage.batch_at(0, 4 * number), 0, 4)) == batch
    rows = [row for batch in taken for row in batch]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]
    far = stage.read(stage.batch_at(0, 10 * 10**9), 0, 4)
    assert len(set(plain(far))) == 4


def test_elements_keep_their_structure() -> None:
    dataset = Dataset.from_tensor_slices(
        {"x": [[1, 2], [3, 4], [5, 6]], "y": ([7.0, 8.0, 9.0],)}
    )
    assert dataset.element_spec == {
        "x": ArraySpec((2,), np.dtype(np.int32)),
        "y": (ArraySpec((), np.dtype(np.float32)),),
    }
    batch = next(iter(dataset.batch(2)))
    assert plain(batch) == {"x": [[1, 2], [3, 4]], "y": ([7.0, 8.0],)}
    pairs = Dataset.zip(Dataset.range(3), Dataset.range(3, 6)).map(lambda a, b: a + b)
    assert [int(x) for x in pairs] == [3, 5, 7]
    nested = Dataset.zip({"a": Dataset.range(2), "b": Dataset.range(2).filter(bool)})
    assert [plain(x) for x in nested] == [{"a": 0, "b": 1}]
    assert nested.cardinality() == UNKNOWN


def test_streams_go_on_behind_an_element_that_fails() -> None:
    def no_three(x: Any) -> Any:
        if x == 3:
            raise ValueError("three")
        return x

    chains = {
        "map": Dataset.range(6).map(no_three),
        "filter": Dataset.range(6).map(no_three).filter(lambda x: True),
        "take": Dataset.range(9).map(no_three).take(6),
        "prefetch": Dataset.range(6).filter(lambda x: no_three(x) >= 0).prefetch(2),
        "zip": Dataset.zip(Dataset.range(6).map(no_three)).map(lambda x: x),
    }
    for name, dataset in chains.items():
        found: list[int] = []
        iterator = iter(dataset)
        failed = 0
        while True:
            try:
                found.append(int(next(iterator)))
            except StopIteration:
                break
            except ValueError:
                failed += 1
        assert (found, failed) == ([0, 1, 2, 4, 5], 1), name


def test_random_numbers_belong_to_the_row() -> None:
    def noise(x: Any, *, rng: np.random.Generator) -> Any:
        return x + rng.random()

    dataset = Dataset.range(8).map(noise, seed=4)
    batched: Any = dataset.batch(4).stage
    whole = batched.read(batched.batch_at(0, 4), 0, 4)
    np.testing.assert_array_equal(
        batched.read(batched.batch_at(0, 4), 2, 3), whole[2:3]
    )
    first, second = [list(map(float, dataset)) for _ in range(2)]
    assert whole.tolist() == first[4:]
    assert first != second


def test_batches_that_a_function_changes_are_cut_afterwards() -> None:
    dataset = Dataset.range(6).batch(4).map(lambda x: x - x.max())
    stage: Any = dataset.stage
    assert plain(stage.read(stage.batch_at(0, 0), 1, 3)) == [-2, -1]
    shorter: Any = Dataset.range(6).batch(4).map(lambda x: x[:2]).stage
    with pytest.raises(ValueError, match="as many as it got"):
        shorter.read(shorter.batch_at(0, 0), 0, 1)


def test_bad_chains_are_told_what_to_do() -> None:
    ragged = Dataset.range(1, 4).map(lambda x: np.full(int(x), x))
    with pytest.raises(ValueError, match="use padded_batch"):
        list(ragged.batch(2))
    padded = list(ragged.padded_batch(2))
    assert plain(padded[0]) == [[1, 0], [2, 2]]
    with pytest.raises(ValueError, match="larger padded_shapes"):
        list(ragged.padded_batch(2, padded_shapes=[2]))
    with pytest.raises(TypeError, match="cast them by map"):
        Dataset.range(2).concatenate(Dataset.from_tensor_slices([1.5]))
    with pytest.raises(ValueError, match="shuffle before repeat"):
        Dataset.range(2).repeat().shuffle()
    with pytest.raises(ValueError, match="before filter"):
        Dataset.range(2).batch(2).shuffle(blocks=2)
    with pytest.raises(ValueError, match="first dimension"):
        Dataset.from_tensor_slices(3)
    with pytest.raises(TypeError, match="pass the function"):
        Dataset.from_generator(iter([1]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cache in memory"):
        Dataset.range(2).cache("file")
    with pytest.raises(ValueError, match="buffer_size >= -1"):
        Dataset.range(2).prefetch(-2)
    with pytest.raises(FileNotFoundError, match="check the pattern"):
        Dataset.list_files("/nowhere/*.txt")
    with pytest.raises(TypeError, match="return one"):
        list(Dataset.range(2).flat_map(lambda x: [x]))
    with pytest.raises(ValueError, match="weight"):
        Dataset.sample_from_datasets([Dataset.range(2)], [-1.0])
    files = Dataset.range(2).with_options(DatasetOptions(auto_shard_policy="file"))
    with pytest.raises(ValueError, match="policy DATA"):
        files.auto_shard(2, 0)
    typed = ArraySpec((), np.dtype(np.int64))
    with pytest.raises(TypeError, match="change output_signature"):
        list(Dataset.from_generator(lambda: [1.5], output_signature=typed))


def test_generators_without_a_signature_are_probed() -> None:
    def numbers() -> Any:
        return iter(np.arange(3, dtype=np.float32))

    one = Dataset.from_generator(numbers)
    spec = ArraySpec((), np.dtype(np.float32))
    both = one.concatenate(Dataset.from_generator(numbers))
    sample = Dataset.sample_from_datasets([one, one], seed=1)
    for chain in (one, both, sample, one.map(lambda x: x * 2), one.batch(2).unbatch()):
        assert chain.element_spec == spec
    assert plain(list(both)) == [0, 1, 2, 0, 1, 2]
    assert sorted(plain(list(sample))) == [0, 0, 1, 1, 2, 2]
    empty = Dataset.from_generator(lambda: ())
    for use in (lambda: empty.element_spec, lambda: one.concatenate(empty)):
        with pytest.raises(ValueError, match="pass output_signature"):
            use()
    assert list(empty.batch(2)) == []


def test_a_stop_iteration_of_a_function_is_an_error_that_names_it() -> None:
    def stopping(*_: Any) -> Any:
        return next(iter(()))

    data = Dataset.range(9)
    for chain in (
        data.map(stopping),
        data.shuffle(3).map(stopping).batch(2).prefetch(2),
        data.filter(stopping),
        data.interleave(stopping, 2),
        data.filter(lambda x: True).map(stopping).prefetch(2),
        data.bucket_by_sequence_length(stopping, [3], [2, 2]),
        data.concatenate(Dataset.from_generator(stopping, output_signature=SCALAR)),
        data.flat_map(lambda x: Dataset.from_generator(stopping)),
    ):
        with pytest.raises(RuntimeError, match="stopping, found that it raised"):
            list(chain)
    with pytest.raises(RuntimeError, match="stopping, found that it raised"):
        data.reduce(0, stopping)


def test_parts_of_a_zip_stay_together_behind_an_error() -> None:
    def no_three(x: Any) -> Any:
        if x == 3:
            raise ValueError("three")
        return x

    stream = Dataset.range(6).filter(lambda x: True)
    zipped = Dataset.zip((stream.map(no_three), stream)).ignore_errors()
    assert plain(list(zipped)) == [(i, i) for i in (0, 1, 2, 4, 5)]


SCALAR = ArraySpec((), np.dtype(np.int64))


def readers() -> list[str]:
    """Return the prefetching threads."""
    return [t.name for t in threading.enumerate() if "hpcstrat-reader" in t.name]


def no_readers() -> bool:
    """Wait until the prefetching threads have ended."""
    gc.collect()
    for _ in range(200):
        if not readers():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("kind", ["batches", "stream"])
def test_readers_end_with_what_reads(kind: str) -> None:
    rows = Dataset.range(40)
    dataset = rows.batch(4) if kind == "batches" else rows.filter(lambda x: True)
    dataset = dataset.prefetch(3)
    assert len(list(dataset)) == (10 if kind == "batches" else 40)
    assert no_readers()
    left: Any = iter(dataset)
    next(left)
    assert readers()
    del left
    assert no_readers()

    def stop_early() -> None:
        for _ in dataset:
            raise KeyError("stop")

    with pytest.raises(KeyError):
        stop_early()
    assert no_readers()


def test_readers_make_no_more_than_they_are_asked_for() -> None:
    made: list[int] = []

    def note(x: Any) -> Any:
        made.append(int(x))
        return x

    iterator = iter(Dataset.range(100).map(note).batch(2).prefetch(3))
    next(iterator)
    time.sleep(0.2)
    assert max(made) < 2 * 4
    assert len(made) == len(set(made))


def test_the_error_of_a_reader_has_its_traceback() -> None:
    def broken(x: Any) -> Any:
        if x == 5:
            raise OSError("disk")
        return x

    iterator = iter(Dataset.range(8).map(broken).batch(2).prefetch(4))
    assert [plain(next(iterator)) for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="disk") as caught:
        next(iterator)
    assert any(entry.name == "broken" for entry in caught.traceback)
    assert plain(next(iterator)) == [6, 7]


@pytest.mark.parametrize("weights", [None, [3, 1], [0.999, 0.001]])
def test_a_mix_has_each_row_once_in_each_epoch_of_its_source(weights: Any) -> None:
    first = Dataset.range(700).shuffle(seed=1)
    second = Dataset.range(1000, 1030)
    mixed = mix([first, second], weights, seed=3)
    assert mixed.cardinality() == INFINITE
    rows = [int(row) for row in mixed.take(20_000)]
    for low, size in ((0, 700), (1000, 30)):
        own = [row - low for row in rows if low <= row < low + size]
        share = 0.5 if weights is None else weights[low > 0] / sum(weights)
        assert abs(len(own) - share * 20_000) <= 30
        for start in range(0, len(own) - size, size):
            assert sorted(own[start : start + size]) == list(range(size))
    second_rows = [row for row in rows if row >= 1000][:30]
    assert second_rows == list(range(1000, 1030))[: len(second_rows)]
    stage: Any = mixed.batch(8).stage
    assert plain(stage.read(stage.batch_at(0, 8000), 2, 5)) == rows[8002:8005]
    assert [int(row) for row in mixed.take(20_000)] == rows
    with pytest.raises(ValueError, match="mix before batch"):
        mix([first.batch(2), second])
    with pytest.raises(ValueError, match="leave out those"):
        mix([first, second], [1, 0])


def sequences() -> Dataset:
    lengths = [3, 5, 1, 8, 2, 2, 7, 4]
    return Dataset.from_tensor_slices(np.array(lengths)).map(lambda n: np.full(n, n))


def test_sequences_are_packed_whole_and_in_order() -> None:
    rows = list(sequences().pack(8))
    assert [row["values"].tolist() for row in rows] == [
        [3, 3, 3, 5, 5, 5, 5, 5],
        [1, 0, 0, 0, 0, 0, 0, 0],
        [8] * 8,
        [2, 2, 2, 2, 0, 0, 0, 0],
        [7] * 7 + [0],
        [4, 4, 4, 4, 0, 0, 0, 0],
    ]
    assert rows[3]["segments"].tolist() == [1, 1, 2, 2, 0, 0, 0, 0]
    assert rows[3]["positions"].tolist() == [0, 1, 0, 1, 0, 0, 0, 0]
    spec = sequences().pack(8).element_spec
    assert spec["values"] == ArraySpec((8,), np.dtype(np.int64))
    iterator = iter(sequences().pack(7))
    assert sum(next(iterator)["segments"].tolist()) == 3
    with pytest.raises(ValueError, match="greater length"):
        [next(iterator) for _ in range(4)]
    assert next(iterator)["values"].tolist() == [2, 2, 2, 2, 0, 0, 0]


def test_buckets_are_those_of_tf_data() -> None:
    batches = list(sequences().bucket_by_sequence_length(len, [3, 6], [2, 2, 1]))
    assert [plain(batch) for batch in batches] == [
        [[3, 3, 3, 0, 0], [5, 5, 5, 5, 5]],
        [[8] * 8],
        [[1, 0], [2, 2]],
        [[7] * 7],
        [[2, 2]],
        [[4, 4, 4, 4]],
    ]
    full = sequences().bucket_by_sequence_length(
        len, [3, 9], [2, 2, 1], pad_to_bucket_boundary=True, drop_remainder=True
    )
    assert [batch.shape for batch in full] == [(2, 8), (2, 2), (2, 8)]
    with pytest.raises(ValueError, match="one batch size more"):
        sequences().bucket_by_sequence_length(len, [3], [2])
