"""The compiled kernel compared with NumPy: the same calls return the same bits."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.collectives import kernel_sum
from tests.mpi.ranks.effort import seeds
from tests.mpi.ranks.outcomes import assert_only_one_failed, assert_usable, outcome
from tests.unit.kernel_sums import TYPES, drawn, same_bits

pytestmark = pytest.mark.algorithm


def _arrays(shared: Any, draw: Any) -> list[Any]:
    """Return random arrays; types and shapes are equal on all ranks."""
    arrays = []
    for _ in range(int(shared.integers(1, 8))):
        dtype = TYPES[int(shared.integers(len(TYPES)))]
        most = 200_000 if shared.random() < 0.1 else 300
        rows, columns = (int(n) for n in shared.integers(0, [most, 4]))
        shape = [(), (rows,), (rows, columns)][int(shared.integers(3))]
        array = drawn(draw, dtype, int(np.prod(shape))).reshape(shape)
        form = int(shared.integers(4))
        if form == 0:
            array = np.asfortranarray(array)
        elif form == 1 and shape:
            array = np.repeat(array, 2, axis=0)[::2]
        arrays.append(array)
    return arrays


@pytest.mark.parametrize("seed", seeds(6))
def test_sums_are_those_of_numpy(make_strategy: Any, job: Any, seed: int) -> None:
    shared = np.random.default_rng(seed)
    draw = random.Random(seed * 64 + job.rank)
    with (
        make_strategy(comm=job) as compiled,
        make_strategy(comm=job, settings=hs.Settings(native=False)) as plain,
    ):
        if plain.collectives.channel is not None:
            assert plain.collectives.channel.kernel is None
        for _ in range(12):
            arrays, op = _arrays(shared, draw), ["sum", "mean"][shared.integers(2)]
            options = hs.CommunicationOptions(
                bytes_per_pack=int(shared.choice([0, 4096, 65536]))
            )
            way = int(shared.integers(3)) if op == "sum" else 0
            found = [
                _reduced(strategy, op, arrays, options, way)
                for strategy in (compiled, plain)
            ]
            for one, other in zip(*found, strict=True):
                assert same_bits(np.asarray(one), np.asarray(other))


def _reduced(strategy: Any, op: str, arrays: list[Any], options: Any, way: int) -> Any:
    """Reduce arrays into new arrays, in place, or into one another's memory."""
    out: list[Any] | None = None
    if way > 0:
        arrays = out = [array.copy() for array in arrays]
    if way == 2:
        # Some results overwrite the values of other arrays.
        more = [array.copy() for array in arrays]
        arrays, out = [*arrays, *more], [*more, *arrays]
    found: list[Any] = []

    def reduce() -> None:
        context = hs.get_replica_context()
        found.extend(context.all_reduce(op, arrays, options, out=out))

    strategy.run(reduce)
    return found


@pytest.mark.once
def test_results_without_memory_are_an_error_on_all(
    make_strategy: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty, module = job.size - 1, kernel_sum.load()

    class NoMemory:
        """A kernel whose first sum finds no memory for its results."""

        def __init__(self, real: Any) -> None:
            self.real, self.failed = real, False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def reduce(self, *args: Any) -> Any:
            if self.failed:
                return self.real.reduce(*args)
            self.failed = True
            raise MemoryError("no room for results")

    if job.rank == faulty:
        failing = SimpleNamespace(Sum=lambda *args: NoMemory(module.Sum(*args)))
        monkeypatch.setattr(kernel_sum, "load", lambda: failing)
    with make_strategy(comm=job) as strategy:
        channel = strategy.collectives.channel
        if channel is None or strategy.topology.num_workers > 1:
            return
        error = outcome(strategy.reduce, "sum", np.ones(3), axis=None)
        assert_only_one_failed(error, MemoryError, faulty, job)
        monkeypatch.undo()
        total = strategy.reduce("sum", np.ones(3), axis=None)
        assert (total == job.size).all()
        assert_usable(strategy, job)
