"""What arrays may be given, and what becomes of those that may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.check_reductions import assert_usable, outcome


def assert_told(error: Any, kind: Any, guilty: bool, *words: str) -> None:
    """Demand an error of a kind where the fault is, and ReplicaError elsewhere."""
    if not guilty:
        assert isinstance(error, hs.ReplicaError), repr(error)
        return
    assert isinstance(error, kind), repr(error)
    assert not isinstance(error, hs.CollectiveError), repr(error)
    for word in words:
        assert word in str(error)


# Three arrays of a length, and whether no result is lost where two of them, of other
# values, take results.
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
    # The values are all read before the first result is written.
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
