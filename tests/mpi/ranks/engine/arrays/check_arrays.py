"""Arrays that calls accept, and the errors for arrays that they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import assert_told, assert_usable, outcome

pytestmark = pytest.mark.rule


# Functions that make three arrays of a length. Some of these arrays share memory, so
# that results written into them could overwrite one another.
LAYOUTS_OF_OUT: dict[str, Callable[[int], list[Any]]] = {
    "apart": lambda n: [np.empty(n), np.empty(n), np.empty(n)],
    "one array twice": lambda n: [a := np.empty(n), np.empty(n), a],
    "a view of another": lambda n: [np.empty(n), a := np.empty(n), a[:]],
    "one element": lambda n: [
        (a := np.empty(2 * n))[:n],
        np.empty(n),
        a[n - 1 : 2 * n - 1],
    ],
    "end to end": lambda n: [(a := np.empty(3 * n))[:n], a[n : 2 * n], a[2 * n :]],
    "interleaved": lambda n: [(a := np.empty(3 * n))[::3], a[1::3], a[2::3]],
    "across": lambda n: [(a := np.empty((n, n)))[0], a[:, 3], np.empty(n)],
    "columns": lambda n: list(np.empty((n, 3)).T),
    "the same buffer": lambda n: [
        np.frombuffer(b := bytearray(8 * n)),
        np.empty(n),
        np.frombuffer(b),
    ],
}
LOSES = {
    "one array twice": (0, 2),
    "a view of another": (1, 2),
    "one element": (0, 2),
    "across": (0, 1),
    "the same buffer": (0, 2),
}


@pytest.mark.parametrize("length", [5, 40_000])
@pytest.mark.parametrize("name", LAYOUTS_OF_OUT)
def test_outs_that_share_memory_are_refused(
    strategy: Any, job: Any, name: str, length: int
) -> None:
    if name == "across" and length > 5:
        pytest.skip("a large square array")
    own = [np.full(length, float(job.rank + i)) for i in range(3)]
    sums = [sum(range(i, job.size + i)) for i in range(3)]
    for everywhere in (True, False):
        faulty = everywhere or job.rank == 0
        outs = LAYOUTS_OF_OUT[name if faulty else "apart"](length)
        nest = {"w": outs[:1], "b": (outs[1], outs[2])}
        value = {"w": own[:1], "b": (own[1], own[2])}
        error = outcome(strategy.reduce, "sum", value, None, out=nest)
        if name not in LOSES:
            assert error is None
            for out, total in zip(outs, sums, strict=True):
                np.testing.assert_array_equal(out, np.full(length, total))
        else:
            paths = ["out['w'][0]", "out['b'][0]", "out['b'][1]"]
            names = [paths[i] for i in LOSES[name]]
            assert_told(error, ValueError, faulty, *names)
        if not everywhere:
            continue

        def start(value: Any = value, nest: Any = nest) -> None:
            context = hs.get_replica_context()
            context.start_all_reduce("sum", value, out=nest).wait()

        assert type(outcome(strategy.run, start)) is type(error)
    assert_usable(strategy, job)


def test_one_array_twice_reduces_in_place_twice(strategy: Any, job: Any) -> None:
    for length in (5, 40_000):
        tied, other = np.full(length, 1.0 + job.rank), np.ones(length)
        nest = [tied, other, tied]
        strategy.reduce("sum", nest, axis=None, out=nest)
        np.testing.assert_array_equal(other, np.full(length, job.size))
        np.testing.assert_array_equal(tied, np.full(length, sum(range(job.size + 1))))


def test_out_whose_elements_share_memory_is_refused(strategy: Any, job: Any) -> None:
    tiled = np.lib.stride_tricks.as_strided(np.zeros(4), (3, 2), (8, 8))
    repeated = np.lib.stride_tricks.as_strided(np.zeros(2), (3, 2), (0, 8))
    for out in (tiled, repeated):
        for faulty in range(job.size):
            own = out if job.rank == faulty else np.zeros((3, 2))
            error = outcome(strategy.reduce, "sum", np.ones((3, 2)), None, out=own)
            assert_told(error, ValueError, job.rank == faulty, "strides")
    assert_usable(strategy, job)


def test_results_may_lie_over_other_values(strategy: Any, job: Any) -> None:
    # A call reads all values before it writes the first result.
    for length in (5, 40_000):
        memory = np.arange(4.0 * length)
        value = [memory[:length], memory[length : 2 * length]]
        outs = [
            memory[length // 2 : length // 2 + length],
            memory[2 * length : -length],
        ]
        wanted = [array * job.size for array in value]
        strategy.reduce("sum", value, axis=None, out=outs)
        for out, total in zip(outs, wanted, strict=True):
            np.testing.assert_array_equal(out, total)


class _OwnMetric(hs.metrics.Metric):
    """A user's metric that checks its arguments after the library's constructor."""

    def __init__(self, name: str, limit: float) -> None:
        super().__init__(name, "float64", ["total"])
        if limit < 0:
            raise LookupError("no such limit")


class _Refusing:
    def __array__(self, *args: Any, **options: Any) -> Any:
        raise OSError("the file is gone")


WRONGLY_MADE: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "no value": (hs.Variable, lambda: hs.Variable(1.0)),
    "unknown keyword": (
        lambda: hs.Variable(1.0, aggregation_="sum"),
        lambda: hs.Variable(1.0, aggregation="sum"),
    ),
    "unknown aggregation": (
        lambda: hs.Variable(1.0, aggregation="summ"),
        lambda: hs.Variable(1.0, aggregation="sum"),
    ),
    "unknown synchronization": (
        lambda: hs.Variable(1.0, synchronization="on_reed"),
        lambda: hs.Variable(1.0, synchronization="on_read"),
    ),
    "synchronization none": (
        lambda: hs.Variable(1.0, synchronization="none"),
        lambda: hs.Variable(1.0),
    ),
    "unknown dtype": (
        lambda: hs.Variable(1.0, dtype="float23"),
        lambda: hs.Variable(1.0, dtype="float32"),
    ),
    "failing value": (
        lambda: hs.Variable(lambda: 1 / 0),
        lambda: hs.Variable(lambda: 1.0),
    ),
    "failing array": (lambda: hs.Variable(_Refusing()), lambda: hs.Variable(1.0)),
    "strings": (
        lambda: hs.Variable(np.array(["a"], np.dtypes.StringDType())),
        lambda: hs.Variable(np.array(["a"])),
    ),
    "metric": (
        lambda: hs.metrics.Mean(dtype="float23"),
        hs.metrics.Mean,
    ),
    "keyword of a metric": (
        lambda: hs.metrics.Accuracy(names="a"),
        lambda: hs.metrics.Accuracy(name="a"),
    ),
    "layer": (
        lambda: hs.layers.SyncBatchNormalization(0),
        lambda: hs.layers.SyncBatchNormalization(1),
    ),
    "optimizer": (
        lambda: hs.optimizers.Adam(beta_1=2.0),
        hs.optimizers.Adam,
    ),
    "keyword of an optimizer": (
        lambda: hs.optimizers.SGD(0.1, momentun=0.9),
        lambda: hs.optimizers.SGD(0.1, momentum=0.9),
    ),
    "a user's metric": (lambda: _OwnMetric("m", -1), lambda: _OwnMetric("m", 1)),
}


@pytest.mark.parametrize("name", WRONGLY_MADE)
def test_what_one_rank_cannot_make_is_told_to_all(
    strategy: Any, job: Any, name: str
) -> None:
    if job.size > 2:
        pytest.skip("two ranks show it")
    wrong, right = WRONGLY_MADE[name]
    for faulty in (0, job.size - 1):
        # A user's class may fail after all of its variables have been made.
        with strategy.scope():
            error = outcome(wrong if job.rank == faulty else right)
        if error is None:
            error = outcome(strategy.barrier)
        assert_told(error, Exception, job.rank == faulty)
        assert_usable(strategy, job)
        with strategy.scope():
            assert outcome(right) is None
            assert_told(outcome(wrong), Exception, True)
        assert_usable(strategy, job)


def _string() -> Any:
    return np.array(["a", "bc"], np.dtypes.StringDType())


NOT_GATHERED: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "strings of any length": (_string, TypeError),
    "objects in fields": (
        lambda: np.array([(1, None)], [("a", "i4"), ("b", "O")]),
        TypeError,
    ),
    "objects in inner fields": (
        lambda: np.zeros(2, [("a", [("b", "O", (2,))])]),
        TypeError,
    ),
    "objects": (lambda: np.array([None, 1]), ValueError),
    "masked": (lambda: np.ma.array([1.0, 2.0], mask=[False, True]), ValueError),
    "masked, without a mask": (lambda: np.ma.array([1.0, 2.0]), ValueError),
    "masked in a list": (lambda: [np.ma.array([1.0], mask=True)], ValueError),
}


@pytest.mark.parametrize("name", NOT_GATHERED)
def test_what_does_not_travel_is_refused(strategy: Any, job: Any, name: str) -> None:
    if job.size > 2:
        pytest.skip("two ranks show it")
    make, kind = NOT_GATHERED[name]
    with strategy.scope():
        mirrored = hs.Variable(np.zeros(2), aggregation="only_first_replica")

    def in_replica(method: str) -> Callable[[Any], Any]:
        def step(value: Any) -> Any:
            return getattr(hs.get_replica_context(), method)(value, 0)

        return lambda value: strategy.run(step, (value,))

    def create(value: Any) -> Any:
        with strategy.scope():
            return hs.Variable(value)

    calls: dict[str, Callable[[Any], Any]] = {
        "gather": lambda value: strategy.gather(hs.PerReplica(value), 0),
        "all_gather": in_replica("all_gather"),
        "create": create,
        "reduce": lambda value: strategy.reduce("sum", hs.PerReplica(value), axis=0),
        "mean": lambda value: strategy.reduce("mean", hs.PerReplica(value)),
        "assign": lambda value: strategy.run(mirrored.assign, (value,)),
    }
    for what, call in calls.items():
        refused = ValueError if what in ("reduce", "mean") else kind
        # A variable refuses a wrong type with a ValueError of its own.
        kinds = (refused, ValueError)
        for faulty in (0, job.size - 1):
            good = np.zeros(2) if what != "create" else np.zeros(1)
            error = outcome(call, make() if job.rank == faulty else good)
            assert_told(error, kinds, job.rank == faulty)
            assert outcome(strategy.barrier) is None, what
        error = outcome(call, make())
        assert_told(error, kinds, True)
    assert_usable(strategy, job)


def test_subclasses_are_arrays_of_their_numbers(
    strategy: Any, job: Any, tmp_path: Any
) -> None:
    mapped = np.memmap(tmp_path / "numbers", np.float64, "w+", shape=(2, 2))
    mapped[...] = np.arange(4.0).reshape(2, 2)
    record = np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")])
    for own in (np.arange(4.0).reshape(2, 2).view(np.matrix), mapped):
        with strategy.scope():
            variable = hs.Variable(own, aggregation="sum")
        results = [
            strategy.gather(own, 0)[:2],
            strategy.reduce("mean", own),
            strategy.reduce("mean", {"a": own})["a"],
            strategy.local_value(strategy.run(variable.assign, (own,))) / job.size,
            variable.value() / job.size,
        ]
        for result in results:
            assert type(result) is np.ndarray
            np.testing.assert_array_equal(result, np.arange(4.0).reshape(2, 2))
        assert strategy.reduce("sum", own, axis=0).shape == (2,)
    gathered = strategy.gather(record, 0)
    assert type(gathered) is np.ndarray
    assert gathered["b"].tolist() == [2.0, 4.0] * job.size


def test_types_of_no_size_are_gathered(strategy: Any, job: Any) -> None:
    for dtype in ("V0", []):
        assert strategy.gather(np.zeros(3, dtype), 0).shape == (3 * job.size,)
    assert_usable(strategy, job)
