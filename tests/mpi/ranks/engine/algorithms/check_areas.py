"""Arrays in memory that all ranks of a worker have mapped are summed without a copy."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.algorithms import mapped_memory as module
from hpcstrat.engine.algorithms.mapped_memory import LEAST_MAPPED_BYTES, MappedMemory
from tests.mpi.ranks.outcomes import assert_usable
from tests.mpi.ranks.promised import assert_promised, promised, random_terms

pytestmark = pytest.mark.algorithm

SIZE = LEAST_MAPPED_BYTES // 4


class Memory:
    """An array in an anonymous memory file, which other processes can map."""

    def __init__(self, size: int, dtype: str) -> None:
        self.alive = True
        self.descriptor = os.memfd_create("area")
        self.nbytes = size * np.dtype(dtype).itemsize
        os.ftruncate(self.descriptor, self.nbytes)
        memory = mmap.mmap(self.descriptor, self.nbytes)
        self.array = np.frombuffer(memory, dtype)

    def offer(self, areas: MappedMemory, descriptor: int | None = None) -> None:
        found = self.descriptor if descriptor is None else descriptor
        address = self.array.ctypes.data
        areas.offer(address, self.nbytes, found, lambda: self.alive)

    def close(self) -> None:
        self.alive = False
        os.close(self.descriptor)


@pytest.fixture
def worker(job: Any) -> Iterator[Any]:
    """Yield a strategy with a single worker, and its mapped memory."""
    if job.size == 1:
        pytest.skip("a single replica moves nothing")
    with hs.MultiWorkerMirroredStrategy() as strategy:
        areas = MappedMemory()
        strategy.collectives.use_mapped_memory(areas)
        yield strategy, areas


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the size of each array that is summed in an area."""
    sizes: list[int] = []
    real = module._sum_segment

    def noting(arrays: Any, *args: Any) -> None:
        sizes.append(len(arrays[0]))
        real(arrays, *args)

    monkeypatch.setattr(module, "_sum_segment", noting)
    return sizes


def reduced(strategy: Any, array: Any, job: Any, *, op: str = "sum") -> None:
    """Reduce random numbers in place, and compare the bits with the promised ones."""
    terms = random_terms(7, job.size, array.size, array.dtype)
    array[...] = terms[job.rank]
    kind = hs.ReduceOp.parse(op)
    strategy.collectives.batch_reduce(kind, array, "reduce", out=array)
    pairs = [(array, promised(terms, op))]
    assert_promised(job, pairs, f"{op} by MappedSum")


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        *[("f4", "mean"), ("f8", "sum"), ("i8", "sum")],
        *[
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("f4", "sum"), ("f8", "mean"), ("c16", "sum"), ("c16", "mean"))
        ],
    ],
)
def test_sums_are_those_of_the_usual_way_to_the_bit(
    worker: Any, job: Any, summed: list[int], dtype: str, op: str
) -> None:
    strategy, areas = worker
    for size in (SIZE, SIZE + 1, 3 * SIZE + 17):
        memory = Memory(size, dtype)
        memory.offer(areas)
        for _ in range(3):
            reduced(strategy, memory.array, job, op=op)
        assert summed == [size] * 3
        summed.clear()
        # The other ranks forget the area at their next call.
        job.Barrier()
        memory.close()
    assert len(areas._others) == job.size - 1


@pytest.mark.parametrize("without", [0, -1])
def test_a_rank_without_an_area_has_all_go_the_usual_way(
    worker: Any, job: Any, summed: list[int], without: int
) -> None:
    strategy, areas = worker
    memory, private = Memory(SIZE, "f4"), np.empty(SIZE, np.float32)
    if job.rank != without % job.size:
        memory.offer(areas)
    reduced(strategy, memory.array, job)
    assert not summed
    if job.rank == without % job.size:
        memory.offer(areas)
    reduced(strategy, memory.array, job)
    reduced(strategy, private if job.rank == 0 else memory.array, job)
    reduced(strategy, memory.array, job)
    assert summed == [SIZE] * 2
    # The result is a new array, outside of the area.
    total = strategy.reduce("sum", memory.array, axis=None)
    assert total.shape == (SIZE,)
    assert summed == [SIZE] * 2


@pytest.mark.parametrize("faulty", [0, -1])
def test_what_one_rank_cannot_map_ends_it_on_all(
    worker: Any, job: Any, summed: list[int], faulty: int
) -> None:
    strategy, areas = worker
    memory = Memory(SIZE, "f4")
    if job.rank == faulty % job.size:
        # Simulate a process number that another process has, so that mapping fails.
        found = module._mapped

        def other(row: list[int]) -> Any:
            return found([*row[:-1], row[-1] + 1])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_mapped", other)
            memory.offer(areas)
            reduced(strategy, memory.array, job)
    else:
        memory.offer(areas)
        reduced(strategy, memory.array, job)
    assert areas.off
    assert not areas._others
    memory.offer(areas)
    reduced(strategy, memory.array, job)
    assert not summed
    assert_usable(strategy, job)


def test_memory_that_is_gone_is_no_area_any_more(
    worker: Any, job: Any, summed: list[int]
) -> None:
    strategy, areas = worker
    memory = Memory(SIZE, "f4")
    memory.offer(areas)
    reduced(strategy, memory.array, job)
    memory.alive = False
    # Other data may lie at the area's address now.
    reduced(strategy, memory.array, job)
    assert summed == [SIZE]
    assert not areas.offers(memory.array.ctypes.data)
