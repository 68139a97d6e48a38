"""Random streams: independent, repeatable, saved, and restored on other job sizes.

Jobs of other sizes are strategies over the first ranks of this job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.errors import CheckpointMismatchError, CollectiveError, ReplicaError

pytestmark = pytest.mark.rule


DRAWS = 10_000
FIRST = [8993393713734408655, 43150526051168253]
FIRST_SHARED = [10756711358996851723, 805372543079748514]


def _words(generator: Any, count: int = DRAWS) -> Any:
    return generator.bit_generator.random_raw(count)


def _key(name: str, seed: int, birth: int, replica: int) -> Any:
    """Return the generator of a stream, made by NumPy alone."""
    import hashlib

    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    words = np.frombuffer(digest, "<u4").tolist()
    sequence = np.random.SeedSequence(seed, spawn_key=(*words, birth, replica))
    return np.random.Philox(key=sequence.generate_state(2, np.uint64))


def test_streams_are_those_of_the_recipe(strategy: Any) -> None:
    # The streams are the same on every run and machine, for any number of replicas.
    streams, replica = strategy.random("dropout", seed=7), strategy.replica_id
    own, shared = _key("dropout", 7, 0, replica), _key("dropout", 7, 0, 2**32 - 1)
    assert np.array_equal(_words(streams.generator, 99), own.random_raw(99))
    assert np.array_equal(_words(streams.shared, 99), shared.random_raw(99))


def test_the_first_words_are_these() -> None:
    # Fixed words of the streams: a change would change the numbers of every program.
    streams = hs.get_strategy().random("a", seed=1)
    assert _words(streams.generator, 2).tolist() == FIRST
    assert _words(streams.shared, 2).tolist() == FIRST_SHARED


def test_streams_of_names_seeds_and_replicas_share_no_word(
    strategy: Any, job: Any
) -> None:
    made = [strategy.random(n, seed=s) for n in ("a", "b", "") for s in (0, 1)]
    own = [_words(streams.generator) for streams in made]
    shared = [_words(streams.shared) for streams in made]
    everywhere = np.concatenate([*job.allgather(np.concatenate(own)), *shared])
    assert len(np.unique(everywhere)) == everywhere.size
    for words in job.allgather(shared):
        assert np.array_equal(words, shared)


def test_both_are_drawn_inside_of_run(strategy: Any, job: Any) -> None:
    streams = strategy.random("noise")

    def replica_fn() -> Any:
        return streams.generator.random(), streams.shared.random()

    own, shared = strategy.local_value(strategy.run(replica_fn))
    assert len(set(job.allgather(own))) == job.size
    assert len(set(job.allgather(shared))) == 1


def test_uniform_numbers_of_replicas_are_uncorrelated(strategy: Any, job: Any) -> None:
    own = strategy.random("x", seed=3).generator.standard_normal(DRAWS)
    table = np.corrcoef(np.atleast_2d(job.allgather(own)))
    assert np.all(np.abs(np.atleast_2d(table) - np.eye(job.size)) < 0.05)


def test_children_are_refused_because_they_are_not_saved(strategy: Any) -> None:
    with pytest.raises(TypeError, match="spawning"):
        strategy.random("x").generator.spawn(1)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "1", None, True])
def test_a_bad_seed_is_refused(strategy: Any, seed: Any) -> None:
    with pytest.raises(ValueError, match="0 <= seed"):
        strategy.random("x", seed=seed)
    with pytest.raises(ValueError, match="expected text"):
        strategy.random(3)


def test_a_seed_of_one_rank_is_noticed(strategy: Any, job: Any) -> None:
    if job.size == 1:
        return
    with pytest.raises(CollectiveError, match="seed=0"):
        strategy.random("x", seed=int(job.rank == 0))
    kind = ValueError if job.rank == 0 else ReplicaError
    with pytest.raises(kind):
        strategy.random("x", seed=-int(job.rank == 0))
    strategy.barrier()


def test_a_state_holds_half_drawn_words(strategy: Any) -> None:
    streams, copy = strategy.random("x", seed=5), strategy.random("x", seed=5)
    for count in range(7):
        streams.generator.integers(0, 9, 3 * count + 1, dtype=np.uint32)
        streams.shared.integers(0, 9, count, dtype=np.uint32)
        copy.restore_state(streams.state())
        for one, other in (
            (streams.generator, copy.generator),
            (streams.shared, copy.shared),
        ):
            expected = one.integers(0, 2**32, 9, dtype=np.uint32)
            found = other.integers(0, 2**32, 9, dtype=np.uint32)
            assert np.array_equal(found, expected)
        assert copy.generation == 0


def test_shared_that_has_come_to_differ_is_not_saved(strategy: Any, job: Any) -> None:
    streams = strategy.random("x")
    if job.size > 1 and job.rank == job.size - 1:
        streams.shared.random()
    if job.size > 1:
        with pytest.raises(CollectiveError, match=r"'x'\.shared") as caught:
            streams.state()
        assert str([job.size - 1]) in str(caught.value)
    streams = strategy.random("x")
    streams.generator.random(job.rank)
    assert streams.state()["state"].shape == (job.size, 12)


def test_a_restored_stream_keeps_its_generator(strategy: Any, folder: Path) -> None:
    streams = strategy.random("x", seed=2)
    kept, shared = streams.generator, streams.shared
    with strategy.scope():
        manager = hs.CheckpointManager(folder, noise=streams)
    kept.random(5)
    manager.save(1)
    own, both = kept.random(20), shared.random(20)
    assert manager.restore() == 1
    assert streams.generator is kept
    assert streams.shared is shared
    assert np.array_equal(kept.random(20), own)
    assert np.array_equal(shared.random(20), both)


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
@pytest.mark.parametrize("restored", [1, 2, 3, 4])
def test_streams_go_on_with_another_number_of_replicas(
    strategies: dict[int, Any], folder: Path, job: Any, saved: int, restored: int
) -> None:
    """Restored replicas continue their streams; new replicas get unused streams."""
    if max(saved, restored) > job.size:
        return
    past: list[Any] = []
    if strategy := strategies.get(saved):
        streams = strategy.random("s", seed=4)
        past = [_words(streams.generator), _words(streams.shared)]
        hs.CheckpointManager(
            folder, x=_variable(strategy), noise=streams, independent=True
        ).save(3)
        past += [_words(streams.generator), _words(streams.shared)]
    job.Barrier()
    future: list[Any] = []
    if strategy := strategies.get(restored):
        streams = strategy.random("s", seed=4)
        manager = hs.CheckpointManager(
            folder, x=_variable(strategy), noise=streams, independent=True
        )
        assert manager.restore() == 3
        assert streams.generation == int(saved != restored)
        state = streams.state()
        future = [_words(streams.generator), _words(streams.shared)]
        old = state["state"][: min(saved, restored), 0]
        new = state["state"][min(saved, restored) :, 0]
        assert not old.any()
        assert (new == streams.generation).all()
        if job.rank >= saved:
            expected = _key("s", 4, 1, job.rank).random_raw(DRAWS)
            assert np.array_equal(future[0], expected)
    if past and future:
        assert np.array_equal(future[0], past[2])
        assert np.array_equal(future[1], past[3])
    everyone = job.allgather((past[:1], past[2:3], future[:1]))
    before = [a for words, _, _ in everyone for a in words]
    after = [a for _, words, _ in everyone for a in words]
    fresh = [a for _, _, words in everyone[saved:] for a in words]
    every = np.concatenate([*before, *after, *fresh])
    assert len(np.unique(every)) == every.size


def _variable(strategy: Any) -> Any:
    with strategy.scope():
        return hs.Variable(0.0, name="x")


def test_shrinking_and_growing_never_repeats_a_stream(
    strategies: dict[int, Any], job: Any
) -> None:
    state, drawn = None, []
    for count in (job.size, 1, job.size, 1, job.size):
        if strategy := strategies.get(count):
            streams = strategy.random("s")
            if state is not None:
                streams.restore_state(state)
            drawn.append(_words(streams.generator, 1000))
            state = streams.state()
        state = job.bcast(state)
    every = np.concatenate([words for own in job.allgather(drawn) for words in own])
    assert len(np.unique(every)) == every.size
    assert state["generation"] == (4 if job.size > 1 else 0)


def test_the_file_has_the_documented_layout(
    strategy: Any, folder: Path, job: Any
) -> None:
    streams = strategy.random("x", seed=2**63 - 1)
    streams.generator.random(job.rank)
    with strategy.scope():
        path = hs.CheckpointManager(folder, noise=streams).save(1)
    state = streams.state()
    with h5py.File(path, "r", locking=False) as file:
        group = file["rng/noise"]
        assert sorted(group.attrs) == ["bit_generator", "generation", "root_entropy"]
        assert group.attrs["bit_generator"] == b"Philox"
        assert group.attrs["root_entropy"] == 2**63 - 1
        assert group["state"].shape == (job.size, 12)
        assert group["state"].dtype == "<u8"
        assert np.array_equal(group["state"], state["state"])
        assert np.array_equal(group["shared"], state["shared"])
        assert "iterators" not in file


def test_other_streams_do_not_fit(strategy: Any, folder: Path) -> None:
    with strategy.scope():
        value = hs.Variable(1.0, name="x")
        hs.CheckpointManager(folder, v=value).save(1)
        hs.CheckpointManager(folder, v=value, r=strategy.random("x")).save(2)
        for path, streams, message in (
            (1, strategy.random("x"), "rng/r is not in the checkpoint"),
            (2, strategy.random("x", seed=1), "that of seed 0"),
            (2, strategy.random("y"), "another name"),
        ):
            before = streams.state()
            manager = hs.CheckpointManager(folder, v=value, r=streams)
            with pytest.raises(CheckpointMismatchError, match=message):
                manager.restore(folder / f"ckpt-{path:010d}.h5")
            assert np.array_equal(streams.state()["state"], before["state"])
        data = strategy.experimental_distribute_dataset(hs.Dataset(np.zeros(8), 4))
        with pytest.raises(CheckpointMismatchError, match="iterators/r is not in"):
            hs.CheckpointManager(folder, v=value, r=data).restore()


def test_a_save_without_one_rank_is_noticed(
    strategy: Any, folder: Path, job: Any
) -> None:
    if job.size == 1:
        return
    streams = strategy.random("x")
    with strategy.scope():
        manager = hs.CheckpointManager(folder, noise=streams)
    with pytest.raises(CollectiveError, match="random streams 'x'"):
        manager.save(1) if job.rank else strategy.barrier()
    with pytest.raises(ValueError if job.rank == 0 else ReplicaError):
        manager.save(-1 if job.rank == 0 else 2)
    assert manager.checkpoints == []
    manager.save(3)


def test_streams_of_another_strategy_are_not_mixed(
    strategy: Any, make_strategy: Any, folder: Path
) -> None:
    other = make_strategy()
    with strategy.scope():
        value = hs.Variable(1.0, name="x")
    with pytest.raises(ValueError, match="of one strategy"):
        hs.CheckpointManager(folder, v=value, r=other.random("x"))
    other.close()
