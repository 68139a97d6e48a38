"""Strategies: results of run, algorithms that users choose, mismatches and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import assert_only_one_failed, assert_usable, outcome
from tests.mpi.ranks.sums import all_reduce

pytestmark = pytest.mark.calls


def _reduce(op: str, value: Any) -> Callable[[Any], Any]:
    return lambda strategy: strategy.reduce(op, value, axis=None)


def _merge(strategy: Any) -> Any:
    return strategy.run(lambda: hs.get_replica_context().merge_call(lambda s: None))


CALLS: dict[str, Callable[[Any], Any]] = {
    "reduce(SUM)": _reduce("sum", np.ones(3)),
    "reduce(MEAN)": _reduce("mean", np.ones(3)),
    "float64[4]": _reduce("sum", np.ones(4)),
    "float64[3, 1]": _reduce("sum", np.ones((3, 1))),
    "float32[3]": _reduce("sum", np.ones(3, np.float32)),
    "float64[]": _reduce("sum", np.float64(1)),
    "axis=0": lambda strategy: strategy.reduce("sum", np.ones(3), axis=0),
    "int64[], int64[]": _reduce("sum", [1, 2]),
    "gather(axis=0)": lambda strategy: strategy.gather(np.ones(3), axis=0),
    "broadcast_object(root=0)": lambda strategy: strategy.broadcast_object(1),
    "barrier": lambda strategy: strategy.barrier(),
    "broadcast_to": lambda strategy: strategy.extended.broadcast_to(np.ones(3)),
}
IN_RUN: dict[str, Callable[[Any], Any]] = {
    "all_reduce(SUM)": lambda strategy: all_reduce(strategy, "sum", np.ones(3)),
    "all_reduce(MEAN)": lambda strategy: all_reduce(strategy, "mean", np.ones(3)),
    "merge_call": _merge,
}


@pytest.mark.parametrize("calls", [CALLS, IN_RUN], ids=["cross", "replica"])
def test_every_mismatch_is_an_error_on_every_rank_that_names_both_calls(
    strategy: Any, job: Any, calls: Any
) -> None:
    names = list(calls)
    for case, first in enumerate(names):
        for second in names[case + 1 :]:
            odd = (case + len(second)) % job.size
            error = outcome(calls[second if job.rank == odd else first], strategy)
            if job.size == 1:
                assert error is None
                continue
            assert type(error) is hs.CollectiveError, (first, second)
            assert first in str(error), (first, second)
            assert second in str(error), (first, second)
            assert f"rank {odd} called" in str(error)
            # The error names the place of the call; for all_reduce, this is a helper of
            # the tests.
            assert "check_" in str(error) or "sums.py" in str(error)
    assert_usable(strategy, job)


def test_nests_of_another_structure_are_a_mismatch(strategy: Any, job: Any) -> None:
    x, y = np.ones(3), np.zeros(3)
    nests = ([x, y], (x, y), {"a": x, "b": y}, {"a": x, "c": y}, [x, [y]], [[x], y])
    for call in (
        lambda nest: strategy.reduce("sum", nest, axis=None),
        lambda nest: all_reduce(strategy, "sum", nest),
    ):
        same = [
            i
            for i, nest in enumerate(nests[1:])
            if outcome(call, nest if job.rank else nests[0]) is None
        ]
        assert same == ([] if job.size > 1 else list(range(5)))
    assert_usable(strategy, job)


class _Idle(hs.ReductionToOneDevice):
    """An algorithm that moves no data, so that an unnoticed mismatch is no deadlock."""

    def all_reduce(self, flat: Any, topology: Any, piece_bytes: int) -> None:
        """Leave the buffer unchanged."""


class _OtherIdle(_Idle):
    """An algorithm of another class."""


@pytest.mark.parametrize("other", ["algorithm", "root", "bytes_per_pack"])
def test_ranks_that_would_reduce_differently_are_a_mismatch(
    make_strategy: Any, job: Any, other: str
) -> None:
    odd = job.rank == job.size - 1
    kind = _OtherIdle if odd and other == "algorithm" else _Idle
    ops = kind(int(odd and other == "root"))
    options = hs.CommunicationOptions(
        bytes_per_pack=8 if odd and other == "bytes_per_pack" else 16
    )
    with make_strategy(cross_device_ops=ops) as strategy:
        error = outcome(all_reduce, strategy, "sum", np.ones(64), options)
        assert (type(error) is hs.CollectiveError) == (job.size > 1)


def test_swapped_calls_are_an_error_on_every_rank(strategy: Any, job: Any) -> None:
    calls = ["reduce(SUM)", "float32[3]"]
    for _ in range(3):
        for call in calls:
            CALLS[call](strategy)
    # Both calls were made before, so that they use the plans of earlier calls.
    order = calls[:: -1 if job.rank == job.size - 1 else 1]
    errors = [outcome(CALLS[call], strategy) for call in order]
    kind = hs.CollectiveError if job.size > 1 else type(None)
    assert [type(error) for error in errors] == [kind, kind]
    assert_usable(strategy, job)


def test_a_call_left_out_inside_run_is_an_error_on_every_rank(
    strategy: Any, make_strategy: Any, job: Any
) -> None:
    def step(lazy: bool) -> Any:
        context = hs.get_replica_context()
        first = context.all_reduce("sum", np.ones(3))
        return first if lazy else context.all_reduce("sum", np.ones(3))

    def program(strategy: Any) -> None:
        for index in range(3):
            strategy.run(step, args=(index == 1 and job.rank == 0,))
        strategy.reduce("mean", 1.0, axis=None)

    with make_strategy() as short_lived:
        for _ in range(2):
            error = outcome(program, short_lived)
            kind = hs.CollectiveError if job.size > 1 else type(None)
            assert type(error) is kind
            if error is not None:
                assert "all_reduce(SUM)" in str(error)
                assert "left out a step" in str(error)
    assert_usable(strategy, job)


def test_a_call_left_out_at_the_end_of_run_is_named(strategy: Any, job: Any) -> None:
    # The calls differ but the numbers of runs are equal, so the strategy stays usable.
    def step() -> Any:
        if job.rank:
            return hs.get_replica_context().all_reduce("sum", np.ones(3))
        return np.ones(3)

    def program() -> None:
        strategy.reduce("sum", strategy.run(step), axis=None)

    error = outcome(program)
    if job.size > 1:
        assert type(error) is hs.CollectiveError
        assert "rank 0 called reduce(SUM)" in str(error)
        assert "all_reduce(SUM)" in str(error)
    assert_usable(strategy, job)


def test_a_run_too_many_on_one_rank_is_told_until_all_begin_anew(
    strategy: Any, make_strategy: Any, job: Any
) -> None:
    with make_strategy() as short_lived:
        for _ in range(3 if job.rank == 0 else 2):
            short_lived.run(lambda: None)
        for _ in range(3):
            error = outcome(short_lived.reduce, "sum", 1.0)
            assert (type(error) is hs.CollectiveError) == (job.size > 1)
    assert_usable(strategy, job)


class _Planted(Exception):
    """The error that a replica function raises."""


def _faulty_step(job: Any, faulty: set[int], place: int) -> Any:
    context = hs.get_replica_context()
    total: Any = 0
    for call in range(3):
        if call == place and job.rank in faulty:
            raise _Planted(f"at call {call}")
        total = context.all_reduce("sum", np.float64(job.rank))
    if place == 3 and job.rank in faulty:
        raise _Planted("after the last call")
    return total


def test_an_error_on_random_ranks_is_raised_on_all_and_training_goes_on(
    make_strategy: Any, job: Any
) -> None:
    rng = np.random.default_rng(9)
    expected = sum(range(job.size))
    with make_strategy(on_error="raise") as strategy:
        for step in range(70):
            faulty = set(rng.permutation(job.size)[: rng.integers(1, job.size + 1)])
            place = int(rng.integers(5))

            def program(faulty: set[int] = faulty, place: int = place) -> Any:
                result = strategy.run(_faulty_step, args=(job, faulty, place))
                return strategy.reduce("mean", result, axis=None)

            error = outcome(program)
            if place == 4:
                assert error is None
            elif job.rank in faulty:
                assert type(error) is _Planted, step
            else:
                assert isinstance(error, hs.ReplicaError), step
                assert error.ranks == tuple(sorted(faulty))
                assert "_Planted" in str(error)
                assert "call" in str(error)
            result = strategy.run(_faulty_step, args=(job, set(), 0))
            assert strategy.reduce("sum", result, axis=None) == expected * job.size


# Errors of all memory layouts in Python; some classes build their text themselves.
ERRORS = [
    ValueError("v"),
    KeyError("k"),
    FileNotFoundError(2, "no such file", "f"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "u"),
    ImportError("i", name="module"),
    AttributeError("a"),
    StopIteration(3),
    ZeroDivisionError("z"),
    NotImplementedError("n"),
    AssertionError(),
    SyntaxError("s", ("file", 1, 2, "text")),
    ExceptionGroup("g", [ValueError("v")]),
    np.linalg.LinAlgError("l"),
    hs.CheckpointError("c"),
]


def test_errors_of_every_class_reach_the_other_ranks(
    make_strategy: Any, job: Any
) -> None:
    def step(planted: Exception) -> Any:
        if job.rank == 0:
            raise planted
        return hs.get_replica_context().all_reduce("sum", 1.0)

    failing = []
    with make_strategy(on_error="raise") as strategy:
        for planted in ERRORS:
            error = outcome(strategy.run, lambda planted=planted: step(planted))
            name = type(planted).__name__
            if job.rank == 0:
                fine = error is planted
            else:
                fine = isinstance(error, hs.ReplicaError) and name in str(error)
            # Collect failures and assert later, so that no rank leaves before the
            # others.
            unusable = outcome(assert_usable, strategy, job)
            failing += [] if fine and unusable is None else [(name, error, unusable)]
        assert failing == []


def test_an_error_in_a_merge_function_is_raised_on_all(
    make_strategy: Any, job: Any
) -> None:
    def merge(strategy: Any, faulty: Any) -> Any:
        if job.rank == strategy.local_value(faulty):
            raise _Planted("in merge_call")
        return strategy.reduce("sum", 1.0, axis=None)

    with make_strategy(on_error="raise") as strategy:
        for faulty in range(job.size):

            def step(faulty: int = faulty) -> Any:
                return hs.get_replica_context().merge_call(merge, args=(faulty,))

            assert_only_one_failed(outcome(strategy.run, step), _Planted, faulty, job)
            assert_usable(strategy, job)


def test_one_exception_object_can_be_raised_in_several_steps(
    make_strategy: Any, job: Any
) -> None:
    same = _Planted("always the same object")

    def step() -> Any:
        if job.rank == 0:
            raise same
        return hs.get_replica_context().all_reduce("sum", 1.0)

    with make_strategy(on_error="raise") as strategy:
        for _ in range(3):
            assert_only_one_failed(outcome(strategy.run, step), _Planted, 0, job)
            assert_usable(strategy, job)


def test_an_error_in_a_step_without_calls_is_raised_on_all(
    make_strategy: Any, job: Any
) -> None:
    def step(fails: bool) -> None:
        if fails:
            raise _Planted("in a step without calls")

    def program() -> None:
        for index in range(4):
            strategy.run(step, args=(index == 1 and job.rank == 0,))
        strategy.barrier()

    with make_strategy(on_error="raise") as strategy:
        for _ in range(2):
            assert_only_one_failed(outcome(program), _Planted, 0, job)
            assert_usable(strategy, job)


def test_run_wraps_every_leaf_but_none_variables_and_mirrored(
    strategy: Any, job: Any
) -> None:
    with strategy.scope():
        variable = hs.Variable(1.0)
    mirrored = strategy.extended.broadcast_to(np.ones(2))

    def step(x: Any, *, key: Any) -> Any:
        assert type(x["a"]) is int
        return {"x": x, "n": None, "v": variable, "m": mirrored, "t": (key, "text")}

    distributed = strategy.experimental_distribute_values_from_function(
        lambda context: {"a": context.replica_id_in_sync_group}
    )
    assert type(distributed["a"]) is hs.PerReplica
    result = strategy.run(step, args=(distributed,), kwargs={"key": distributed["a"]})
    assert result["n"] is None
    assert result["v"] is variable
    assert result["m"] is mirrored
    leaves = [result["x"]["a"], *result["t"]]
    if job.size > 1:
        assert [type(leaf) for leaf in leaves] == [hs.PerReplica] * 3
        assert leaves[0].values == (job.rank,)
    assert strategy.local_value(leaves) == [job.rank, job.rank, "text"]


def test_local_results_are_those_of_this_worker(strategy: Any, job: Any) -> None:
    result = strategy.run(lambda: {"rank": job.rank})
    found = strategy.experimental_local_results(result)
    all_of_them = tuple({"rank": rank} for rank in range(job.size))
    mirrored = isinstance(strategy, hs.MirroredStrategy)
    if job.size > 1:
        assert found == (all_of_them if mirrored else ({"rank": job.rank},))
    assert strategy.experimental_local_results(5) == (5,)
    # A plain nest counts as a value of each replica, whatever its leaves are.
    times = job.size if mirrored else 1
    for nest in ([1, "two"], {"a": (None,)}, []):
        assert strategy.experimental_local_results(nest) == (nest,) * times


def test_strategies_of_one_process_do_not_disturb_each_other(
    make_strategy: Any, job: Any
) -> None:
    from mpi4py import MPI

    halves = MPI.COMM_WORLD.Split(job.rank % 2, job.rank)
    reverse = MPI.COMM_WORLD.Split(0, -job.rank)
    with (
        make_strategy() as first,
        make_strategy() as second,
        make_strategy(comm=halves) as half,
        make_strategy(comm=reverse) as backwards,
    ):
        assert backwards.topology.replica_id == job.size - 1 - job.rank
        for _ in range(3):
            for strategy in (backwards, second, first):
                assert_usable(strategy, job)
            peers = range(job.rank % 2, job.size, 2)
            assert half.reduce("sum", job.rank, axis=None) == sum(peers)
            assert backwards.broadcast_object(job.rank) == job.size - 1
        first.close()
        assert_usable(second, job)
    halves.Free()
    reverse.Free()


def test_calls_of_two_strategies_in_another_order_are_a_mismatch(
    make_strategy: Any, job: Any
) -> None:
    with make_strategy() as first, make_strategy() as second:
        pair = (first, second) if job.rank else (second, first)
        errors = [outcome(pair[0].barrier), outcome(pair[1].gather, np.ones(1), 0)]
        del errors  # Equal calls match, even of swapped strategies.
        order = [first.barrier, lambda: second.reduce("sum", 1, axis=None)]
        errors = [outcome(call) for call in (order if job.rank else order[::-1])]
        kind = hs.CollectiveError if job.size > 1 else type(None)
        assert [type(error) for error in errors] == [kind] * 2
        assert_usable(second, job)


def test_rows_of_ranks_and_replicas_are_those_of_a_global_batch(job: Any) -> None:
    options: Any
    for options in ({}, {"logical_replicas": 2 * job.size + 1}):
        with hs.MultiWorkerMirroredStrategy(comm=job, **options) as strategy:
            count = strategy.num_replicas_in_sync
            for length in (0, 1, count - 1, count, count + 1, 7 * count + 3):
                array = np.arange(length)
                parts = job.allgather(array[strategy.rows(length)])
                np.testing.assert_array_equal(np.concatenate(parts), array)
                own = strategy.run(lambda n=length: (strategy.rows(n),))
                mine = [p[0] for p in strategy.experimental_local_results(own)]
                size = -(-length // count)
                for replica, rows in zip(strategy.local_replicas, mine, strict=True):
                    right = array[replica * size : (replica + 1) * size]
                    np.testing.assert_array_equal(array[rows], right)
            wrongs: Any = ((-1, ValueError), (1.5, TypeError))
            for wrong, kind in wrongs:
                with pytest.raises(kind):
                    strategy.rows(wrong)


def test_arguments_and_writes_that_fail_have_advice(strategy: Any) -> None:
    batch = np.ones((2, 3)), np.ones(2)
    with pytest.raises(TypeError, match=r"args=\(batch,\)"):
        strategy.run(lambda batch: None, args=batch)
    with pytest.raises(ValueError, match=r"args=\(batch,\)"):
        strategy.run(lambda batch: None, args=np.ones(2))
    with pytest.raises(TypeError, match="unsupported operand"):
        strategy.run(lambda x: x + None, args=(1,))
    with strategy.scope():
        variable = hs.Variable(np.zeros(3), name="read only")
    with pytest.raises(ValueError, match="read-only") as caught:
        strategy.run(lambda: np.copyto(variable.value(), 1.0))
    assert any("assign" in note for note in caught.value.__notes__)
