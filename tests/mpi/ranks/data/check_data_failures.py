"""The batch after a failure of ``next``: all replicas skip only the failed batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.dealing import all_steps, good, joined, rows, step_of
from tests.mpi.ranks.outcomes import ERRORS, assert_usable, outcome

pytestmark = pytest.mark.calls


CASES = 12


def raise_error(number: int) -> None:
    error = ERRORS[number % len(ERRORS)][0]()
    raise error


class Column:
    """A column in which some rows cannot be read."""

    def __init__(self, length: int, bad: dict[int, int]) -> None:
        self.shape = (length,)
        self.bad = bad

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, place: Any) -> Any:
        found = np.arange(len(self))[place]
        for row in np.atleast_1d(found):
            if int(row) in self.bad:
                raise_error(self.bad[int(row)])
        return found


def test_bad_rows_are_skipped_with_their_batch_by_all(
    make_strategy: Any, job: Any
) -> None:
    rng = np.random.default_rng(3)
    with make_strategy(on_error="raise") as strategy:
        for case in range(CASES):
            length, size = int(rng.integers(1, 30)), int(rng.integers(1, 8))
            bad = {int(row): case + i for i, row in enumerate(rng.integers(0, 30, 3))}
            source = hs.Dataset(
                Column(length, bad), size, shuffle=bool(case % 2), seed=case
            )
            distributed = strategy.experimental_distribute_dataset(source)
            order = source.order(0)
            order = np.arange(length) if order is None else order
            batches = [order[i : i + size].tolist() for i in range(0, len(order), size)]
            steps = all_steps(strategy, job, iter(distributed), 40)
            assert len(steps) == len(batches)
            for step, batch in zip(steps, batches, strict=True):
                assert isinstance(step[0], str) == bool(bad.keys() & set(batch)), step
            found = [joined(step) for step in good(steps)]
            assert found == [b for b in batches if not bad.keys() & set(b)]
            assert distributed.state()["epoch"] == 1
        assert_usable(strategy, job)


CHAINS = ["rows", "stream", "own"]


def failing_chain(kind: str, bad: set[int]) -> Any:
    """Return a chain that raises an error for the rows in ``bad``.

    With ``own``, each worker reads the stream by itself, for its own replicas.
    """

    def fail(x: Any) -> Any:
        if int(x) in bad:
            raise OSError(f"row {x}")
        return x

    dataset = hs.Dataset.range(24).map(fail)
    if kind != "rows":
        dataset = dataset.filter(lambda x: True)
    if kind == "own":
        dataset = dataset.with_options(hs.data.DatasetOptions("off"))
    return dataset.batch(4)


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("kind", CHAINS)
def test_a_position_saved_after_an_error_loses_no_rows(
    make_strategy: Any, job: Any, kind: str, ahead: int
) -> None:
    """A run that saves when next() fails, and is restored, gets every row."""
    options = hs.InputOptions(experimental_per_replica_buffer_size=ahead)
    with make_strategy(on_error="raise") as strategy:

        def distribute(bad: set[int]) -> Any:
            chain = failing_chain(kind, bad)
            return strategy.experimental_distribute_dataset(chain, options)

        whole = [rows(strategy, batch) for batch in distribute(set())]
        bad = {0, 13, 14}
        batches = distribute(bad)
        iterator, found, last = iter(batches), [], batches.state()
        for _ in range(40):
            step, own = step_of(strategy, iterator)
            state = batches.state()
            if step == "end":
                break
            if step == "rows":
                found.append(own)
                last = state
                continue
            assert job.allgather(state) == [last] * job.size
            bad.remove(min(bad))
            batches = distribute(bad)
            batches.restore_state(state)
            iterator = iter(batches)
        assert not bad
        assert found == whole
        assert_usable(strategy, job)


@pytest.mark.parametrize("kind", CHAINS)
def test_positions_after_rows_that_fail_again_lose_no_other_rows(
    make_strategy: Any, job: Any, kind: str
) -> None:
    with make_strategy(on_error="raise") as strategy:
        worker = strategy.topology.worker_id if job.size > 1 else 0
        bad = {2, 3, 16} if worker % 2 else {6, 16}

        def distribute() -> Any:
            chain = failing_chain(kind, bad)
            return strategy.experimental_distribute_dataset(chain)

        batches = distribute()
        iterator = iter(batches)
        states, steps = [], []
        for _ in range(40):
            steps.append(step_of(strategy, iterator))
            states.append(batches.state())
            if steps[-1][0] == "end":
                break
        for number, state in enumerate(states[:-1]):
            again = distribute()
            again.restore_state(state)
            # A batch that failed last has not been returned: it is tried again.
            first = number + 1
            while first and steps[first - 1][0].startswith("error"):
                first -= 1
            rest = iter(again)
            found = [step_of(strategy, rest) for _ in steps[first:]]
            assert good_of(found) == good_of(steps[first:]), number
        assert_usable(strategy, job)


def good_of(steps: list[tuple[str, list[int]]]) -> list[list[int]]:
    return [own for kind, own in steps if kind == "rows"]


def stopping(x: Any) -> Any:
    """Raise StopIteration as ``next`` of an empty iterator does."""
    return next(iter(())) if int(x) == 5 else x


def exiting(x: Any) -> Any:
    if int(x) == 5:
        raise GeneratorExit
    return x


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_stop_iteration_of_a_function_is_an_error_on_all(
    make_strategy: Any, job: Any, ahead: int
) -> None:
    """As PEP 479 has it; otherwise the rest of the epoch would be lost."""
    options = hs.InputOptions(experimental_per_replica_buffer_size=ahead)
    data, one = hs.Dataset.range(24), hs.Dataset.from_tensors
    with make_strategy(on_error="raise") as strategy:
        for f in (stopping, exiting):
            for chain in (
                data.map(f).batch(4),
                data.batch(4).map(lambda x, f=f: [f(y) for y in x]),
                data.filter(lambda x, f=f: f(x) >= 0).batch(4),
                data.take_while(lambda x, f=f: f(x) >= 0).batch(4),
                data.flat_map(lambda x, f=f: one(f(x))).batch(4),
                hs.Dataset(Stopping(f)).batch(4),
            ):
                batches = strategy.experimental_distribute_dataset(chain, options)
                steps = all_steps(strategy, job, iter(batches), 40)
                failed = [step for step in steps if isinstance(step[0], str)]
                assert len(failed) == 1
                assert any("raise another error in it" in text for text in failed[0])
                # Elements of the batch before the one that failed are lost, too.
                assert sum(map(len, map(joined, good(steps)))) >= 19
        assert_usable(strategy, job)


class Stopping:
    """A sequence whose row 5 calls a function that stops."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: Any) -> Any:
        found = np.arange(24)[place]
        for row in np.atleast_1d(found):
            self.function(row)
        return found


def test_a_none_in_an_iterable_is_an_error_and_no_end(
    make_strategy: Any, job: Any
) -> None:
    if job.size == 1:
        pytest.skip("a program with one replica gets None")
    elements: list[Any] = [np.arange(6), None, np.arange(6, 12)]
    with make_strategy(on_error="raise") as strategy:
        distributed = strategy.experimental_distribute_dataset(elements)
        steps = all_steps(strategy, job, iter(distributed), 5)
        assert [isinstance(step[0], str) for step in steps] == [False, True, False]
        assert joined(steps[2]) == list(range(6, 12))


class Elements:
    """An iterable whose iterator continues after errors, unlike a generator."""

    def __init__(self, elements: list[Any], bad: dict[int, int]) -> None:
        self.elements = elements
        self.bad = bad

    def __iter__(self) -> Iterator[Any]:
        def made(index: int) -> Any:
            if index in self.bad:
                raise_error(self.bad[index])
            return self.elements[index]

        return map(made, range(len(self.elements)))


def without_stops(bad: dict[int, int]) -> dict[int, int]:
    """Leave out failures with StopIteration, which would end an iterator."""
    return {
        place: number
        for place, number in bad.items()
        if not isinstance(ERRORS[number % len(ERRORS)][0](), StopIteration)
    }


def test_bad_elements_are_skipped_by_all(make_strategy: Any, job: Any) -> None:
    rng = np.random.default_rng(4)
    with make_strategy(on_error="raise") as strategy:
        topology = strategy.topology if job.size > 1 else None
        workers = topology.num_workers if topology else 1
        me = topology.worker_id if topology else 0
        for case in range(CASES):
            elements = [
                np.arange(10 * i, 10 * i + int(rng.integers(1, 9))) for i in range(9)
            ]
            bad = [
                without_stops({int(i): case + w for i in rng.integers(0, 12, 2)})
                for w in range(workers)
            ]
            source = Elements(elements, bad[me])
            distributed = strategy.experimental_distribute_dataset(source)
            steps = all_steps(strategy, job, iter(distributed), 40)
            lost = {i for own in bad for i in own if i < 9}
            assert [isinstance(step[0], str) for step in steps] == [
                i in lost for i in range(9)
            ]
            wanted = [e.tolist() for i, e in enumerate(elements) if i not in lost]
            assert [joined(step) for step in good(steps)] == wanted
        assert_usable(strategy, job)


def worker_streams(
    strategy: Any, job: Any, steps: list[list[Any]]
) -> dict[int, list[int]]:
    """Return all rows of each worker, in their order."""
    own = strategy.topology.worker_id if job.size > 1 else 0
    streams: dict[int, list[int]] = {}
    for step in good(steps):
        for worker, part in zip(job.allgather(own), step, strict=True):
            streams.setdefault(worker, []).extend(part)
    return streams


def numbered(worker: int, count: int) -> list[Any]:
    rng = np.random.default_rng(worker)
    starts = np.cumsum(rng.integers(1, 6, count + 1)) + 1000 * worker
    return [np.arange(a, b) for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("kind", ["function", "slots", "per_replica"])
def test_pipelines_of_workers_lose_bad_elements_only(
    make_strategy: Any, job: Any, kind: str
) -> None:
    rng = np.random.default_rng(5)
    with make_strategy(on_error="raise") as strategy:
        for case in range(CASES):
            # The failures that are planned for each pipeline, by its number.
            bad = [
                without_stops({int(i): case + w for i in rng.integers(0, 14, 3)})
                for w in range(job.size)
            ]
            made: dict[int, Any] = {}

            def pipeline(number: int, bad: Any = bad, made: Any = made) -> Any:
                made[number] = numbered(number, 9 + number)
                return Elements(made[number], bad[number])

            steps = all_steps(strategy, job, iter(open_(strategy, kind, pipeline)), 200)
            planned = sum(
                index < 9 + number
                for part in job.allgather(list(made))
                for number in part
                for index in bad[number]
            )
            failures = len(steps) - len(good(steps))
            # Several failures in the same step count as one failure.
            assert (failures > 0) == (planned > 0)
            assert failures <= planned
            streams = worker_streams(strategy, job, steps)
            if kind == "per_replica":
                streams = {
                    rank: joined([step[rank] for step in good(steps)])
                    for rank in range(job.size)
                }
            for number, elements in made.items():
                wanted = [e for i, e in enumerate(elements) if i not in bad[number]]
                assert streams.get(number, []) == joined(wanted), (case, bad)
        assert_usable(strategy, job)


def open_(strategy: Any, kind: str, pipeline: Callable[[int], Any]) -> Any:
    """Return a distributed dataset with a pipeline for each worker or replica."""
    modes = hs.InputReplicationMode
    if kind == "slots":
        number = strategy.topology.worker_id if strategy.num_replicas_in_sync > 1 else 0
        source = pipeline(number)
        source.batch_size = 4
        source.auto_shard_policy = "off"
        return strategy.experimental_distribute_dataset(source)
    options = hs.InputOptions(
        experimental_replication_mode=modes.PER_REPLICA
        if kind == "per_replica"
        else modes.PER_WORKER
    )
    return strategy.distribute_datasets_from_function(
        lambda context: pipeline(context.input_pipeline_id), options
    )


def test_a_generator_ends_with_its_error_and_the_epoch_with_it(
    make_strategy: Any, job: Any
) -> None:
    def generator() -> Iterator[Any]:
        for index in range(6):
            if index == 3 and job.rank == 0:
                raise OSError("lost connection")
            yield np.full(job.size, index)

    with make_strategy(on_error="raise") as strategy:
        distributed = strategy.experimental_distribute_dataset(generator())
        steps = all_steps(strategy, job, iter(distributed), 10)
        # No replica continues with part of a batch whose other parts are lost.
        assert [isinstance(step[0], str) for step in steps] == [False] * 3 + [True]
        assert all("lost connection" in text for text in steps[3])


def test_errors_of_input_functions_are_raised_on_all(
    make_strategy: Any, job: Any
) -> None:
    def make(context: Any) -> Any:
        raise KeyError("no such file")

    class Unstarted:
        def __iter__(self) -> Iterator[Any]:
            raise StopIteration

    with make_strategy(on_error="raise") as strategy:
        error = outcome(strategy.distribute_datasets_from_function, make)
        assert isinstance(error, KeyError)
        iterator = iter(strategy.experimental_distribute_dataset(Unstarted()))
        assert isinstance(outcome(next, iterator), RuntimeError)
        assert_usable(strategy, job)


class Key:
    """The key of a column, which one rank cannot unpickle."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __reduce__(self) -> Any:
        return _key, (self.rank,)

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key)


def _key(rank: int) -> Key:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == rank:
        raise LookupError("unknown class")
    return Key(rank)


def test_parts_that_one_rank_cannot_read_are_skipped_by_all(
    make_strategy: Any, job: Any
) -> None:
    if job.size == 1:
        pytest.skip("parts travel between ranks")
    elements: list[Any] = [{Key(-1): np.full(job.size, i)} for i in range(3)]
    elements[1] = {Key(job.size - 1): np.full(job.size, 1)}
    with make_strategy(on_error="raise") as strategy:
        iterator = iter(strategy.experimental_distribute_dataset(elements))
        errors = [outcome(next, iterator) for _ in range(4)]
        assert errors[0] is None
        # The rank that deals the batches does not pickle its own part.
        own = job.bcast(strategy.topology.worker_comm.rank == 0, root=job.size - 1)
        assert isinstance(errors[1], type(None) if own else LookupError)
        assert errors[2] is None
        assert type(errors[3]) is StopIteration
        assert_usable(strategy, job)


def test_a_part_that_one_rank_cannot_read_is_an_error_of_that_call_on_all(
    strategy: Any, job: Any
) -> None:
    if job.size == 1:
        pytest.skip("parts travel between ranks")
    last = job.size - 1
    elements = [{Key(last): np.full(job.size, 1)}]
    iterator = iter(strategy.experimental_distribute_dataset(elements))
    # The rank that deals the batches does not pickle its own part.
    travels = job.bcast(strategy.topology.worker_comm.rank > 0, root=last)
    error = outcome(next, iterator)
    if job.rank == last and travels:
        assert type(error) is LookupError
    else:
        assert isinstance(error, hs.ReplicaError) == travels
    assert_usable(strategy, job)


def test_a_function_over_a_data_set_that_fails_on_one_rank_fails_on_all(
    make_strategy: Any, job: Any
) -> None:
    def add(state: int, batch: Any) -> int:
        if state == 2 and job.rank == job.size - 1:
            raise ZeroDivisionError
        return state + 1

    with make_strategy(on_error="raise") as strategy:
        source = hs.Dataset(np.arange(20), 4)
        for dataset in (source, list(source)):
            distributed = strategy.experimental_distribute_dataset(dataset)
            error = outcome(distributed.reduce, 0, add)
            assert isinstance(error, ZeroDivisionError), error
            assert_usable(strategy, job)
