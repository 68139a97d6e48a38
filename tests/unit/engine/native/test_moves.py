"""The compiled kernel's moves and sums of parts, for any order of the ranks' steps."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstrat.engine import native
from hpcstrat.engine.algorithms.blocks import MoveBlocks, gathered_blocks, sent_blocks
from hpcstrat.engine.algorithms.field_blocks import Halo, halo_blocks
from hpcstrat.engine.native import type_codes
from tests.unit.kernel_sums import (
    ALWAYS,
    DONE,
    SOMETIMES,
    TYPES,
    Worker,
    drawn,
    same_bits,
    wanted,
)
from tests.whole_fields import halo_of, parts_of


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    """Return the module of the compiled kernel."""
    found = native.load()
    if found is None:
        pytest.skip("the package was built without its kernel")
    return found


def _move(
    worker: Worker,
    rank: int,
    blocks: MoveBlocks,
    sources: Any,
    results: Any,
    piece: int,
) -> Any:
    """Return the kernel's object for a call of one rank."""
    puts, takes = (
        np.array(some, np.int64).reshape(-1) for some in (blocks.puts, blocks.takes)
    )
    how = puts, takes, blocks.nbytes, *blocks.own, list(sources), list(results)
    copied = [source for source, _ in blocks.copies]
    kept = [*(result for _, result in blocks.copies), *blocks.zeros]
    own = (np.array(some, np.int64).reshape(-1) for some in (copied, kept))
    return worker.module.move(
        worker.kernels[rank], *how, piece, "call", 7, None, worker.reads, *own
    )


def _run(
    worker: Worker, draw: random.Random, calls: Sequence[Sequence[tuple[Any, ...]]]
) -> None:
    """Make calls one after the other; the ranks go on in a random order."""
    ranks = range(len(worker.kernels))
    done, began = [0 for _ in ranks], [False for _ in ranks]
    for _ in range(200_000):
        waiting = [rank for rank in ranks if done[rank] < len(calls)]
        if not waiting:
            return
        rank = draw.choice(waiting)
        one, sources, results = calls[done[rank]][rank]
        kernel = worker.kernels[rank]
        if not began[rank]:
            assert one.start(sources, results)
            kernel.post(0, 7 ^ kernel.next, 0)
            began[rank] = True
        elif one.go_on(0) == DONE:
            done[rank], began[rank] = done[rank] + 1, False
    pytest.fail("expected the ranks to end their calls")


def _gather(worker: Worker, draw: random.Random) -> tuple[Any, Callable[[], None]]:
    ranks = len(worker.kernels)
    axis, shape = draw.randint(0, 2), [draw.randint(1, 6) for _ in range(3)]
    lengths = [draw.choice([0, 1, 3, 500]) for _ in range(ranks)]
    rng = np.random.default_rng(draw.getrandbits(32))
    arrays = []
    for length in lengths:
        own = [*shape[:axis], length, *shape[axis + 1 :]]
        arrays.append(rng.integers(0, 99, own).astype(np.float64))
    right = np.concatenate(arrays, axis)
    results = [np.full_like(right, -1) for _ in range(ranks)]
    inner = [int(np.prod(shape[axis + 1 :])) * right.itemsize]
    outer, piece = [int(np.prod(shape[:axis]))], draw.choice([64, 4096, 65536])
    calls = []
    for rank in range(ranks):
        blocks = gathered_blocks([(n,) for n in lengths], inner, outer, rank)
        given = [arrays[rank]], [results[rank]]
        calls.append((_move(worker, rank, blocks, *given, piece), *given))

    def check() -> None:
        for result in results:
            np.testing.assert_array_equal(result, right)

    return calls, check


def _all_to_all(worker: Worker, draw: random.Random) -> tuple[Any, Callable[[], None]]:
    ranks = range(len(worker.kernels))
    sizes = [0, 1, 7, 3000]
    table = np.array([[draw.choice(sizes) for _ in ranks] for _ in ranks], np.int64)
    rng = np.random.default_rng(draw.getrandbits(32))
    sends = [[rng.integers(0, 99, table[a, b], np.uint8) for b in ranks] for a in ranks]
    receives = [[np.zeros(table[a, b], np.uint8) for a in ranks] for b in ranks]
    piece, calls = draw.choice([64, 4096, 65536]), []
    same = {rank: rank for rank in ranks}
    for rank in ranks:
        blocks = sent_blocks(table, rank, same, same)
        given = sends[rank], receives[rank]
        calls.append((_move(worker, rank, blocks, *given, piece), *given))

    def check() -> None:
        for a in ranks:
            for b in ranks:
                np.testing.assert_array_equal(receives[b][a], sends[a][b])

    return calls, check


def _halo(worker: Worker, draw: random.Random) -> tuple[Any, Callable[[], None]]:
    ranks, axis = range(len(worker.kernels)), draw.randint(0, 2)
    shape = [draw.randint(1, 6) for _ in range(3)]
    lengths = [draw.choice([0, 1, 3, 500]) for _ in ranks]
    width = draw.randint(0, 4), draw.choice([0, 2, 300])
    periodic = draw.random() < 0.5 and max(width) <= sum(lengths)
    shape[axis] = sum(lengths)
    whole = np.random.default_rng(draw.getrandbits(32)).random(shape)
    parts = [np.ascontiguousarray(p) for p in parts_of(whole, axis, lengths)]
    right = [
        halo_of(whole, axis, lengths, rank, width, periodic=periodic) for rank in ranks
    ]
    results = [np.full_like(one, -1) for one in right]
    piece, calls = draw.choice([64, 4096, 65536]), []
    shapes, halo = [(part.shape,) for part in parts], Halo(axis, *width, periodic)
    for rank in ranks:
        blocks = halo_blocks(shapes, (8,), halo, (tuple(ranks),), rank)
        if worker.reads and not blocks.readable:
            return _halo(worker, draw)
        given = [parts[rank]], [results[rank]]
        calls.append((_move(worker, rank, blocks, *given, piece), *given))

    def check() -> None:
        np.testing.assert_equal(results, right)

    return calls, check


def _scatter(worker: Worker, draw: random.Random) -> tuple[Any, Callable[[], None]]:
    ranks, dtype = range(len(worker.kernels)), draw.choice(TYPES)
    sizes = [draw.choice([0, 1, 7, 3000]) for _ in ranks]
    parts = [[drawn(draw, dtype, size) for size in sizes] for _ in ranks]
    right = [_in_own_type([parts[a][b] for a in ranks], dtype) for b in ranks]
    in_place = draw.random() < 0.5
    outs = [parts[r][r] if in_place else np.empty(sizes[r], dtype) for r in ranks]
    columns, codes = draw.choice([8, 100, 2000]), type_codes([dtype], "SUM")
    assert codes is not None
    columns = min(columns, (64 << 10) // dtype.itemsize // len(ranks))
    calls = []
    for rank in ranks:
        like = parts[rank], [outs[rank]], columns, 0.0, "call", 7
        one = worker.module.scatter(worker.kernels[rank], codes[0], *like)
        calls.append((one, parts[rank], [outs[rank]]))

    def check() -> None:
        for rank in ranks:
            assert same_bits(outs[rank], right[rank]), (dtype, sizes, columns)

    return calls, check


def _in_own_type(terms: list[Any], dtype: np.dtype[Any]) -> Any:
    """Return the sum of terms, of integers in their own type."""
    if dtype.kind in "iu":
        with np.errstate(all="ignore"):
            total = terms[0].copy()
            for term in terms[1:]:
                total = total + term
            return total
    return wanted(terms, "SUM")


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 5))
def test_moves_are_numpys(kernel: ModuleType, seed: int, ranks: int) -> None:
    draw = random.Random(seed)
    worker = Worker(kernel, ranks, draw.choice([256 << 10, 1 << 20]))
    if draw.random() < 0.7:
        worker.read_arrays(draw.choice([SOMETIMES, ALWAYS]))
    kinds = [_gather, _all_to_all, _scatter, _halo]
    made = [draw.choice(kinds)(worker, draw) for _ in range(3)]
    _run(worker, draw, [calls for calls, _ in made])
    for _, check in made:
        check()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 4), pieces=st.integers(3, 4))
def test_ranks_read_arrays_only_if_all_do(
    kernel: ModuleType, seed: int, ranks: int, pieces: int
) -> None:
    """A rank without the others' memory of earlier calls makes them copy all pieces."""
    worker, draw, piece = Worker(kernel, ranks, 1 << 20), random.Random(seed), 64 << 10
    worker.read_arrays(SOMETIMES)
    if not worker.reads:
        pytest.skip("the operating system does not let processes read memory")
    lengths = [(pieces * piece - 8 * rank,) for rank in range(ranks)]
    rng = np.random.default_rng(draw.getrandbits(32))
    arrays = [rng.integers(0, 99, one, np.uint8) for one in lengths]
    rooms = [np.zeros(sum(*zip(*lengths, strict=True)), np.uint8) for _ in arrays]

    def made(rank: int) -> tuple[Any, ...]:
        blocks, given = gathered_blocks(lengths, (1,), (1,), rank), (arrays, rooms)
        sources, results = ([some[rank]] for some in given)
        return _move(worker, rank, blocks, sources, results, piece), sources, results

    # Rank 0 first wishes that calls 16 and 17 read arrays.
    calls, found = [made(rank) for rank in range(ranks)], []
    forgets, forgetful = draw.choice([16, 17]), draw.randrange(ranks)
    for number in range(20):
        if number == forgets:
            calls[forgetful] = made(forgetful)
        for rank in range(ranks):
            arrays[rank][:] += 1
            rooms[rank][:] = 0
        before = worker.kernels[0].tick
        _run(worker, draw, [calls])
        found.append(worker.kernels[0].tick - before)
        for room in rooms:
            np.testing.assert_array_equal(room, np.concatenate(arrays))
    # The number of records: one for each piece, or a header and a last step.
    wanted = [pieces] * 20
    wanted[16:18] = 2, 2 if forgetful or forgets == 17 else pieces
    wanted[forgets] = pieces + 1
    assert found == wanted


def test_blocks_outside_of_their_arrays_are_refused(kernel: ModuleType) -> None:
    worker, array = Worker(kernel, 2), np.zeros(10, np.uint8)
    good = (0, 0, 0, 0, 10, 1, 0)
    wrong = [(0, 0, 0, 1, 10, 1, 0), (0, 0, 1, 0, 10, 1, 0), (2, 0, 0, 0, 10, 1, 0)]
    wrong += [(0, 1, 0, 0, 10, 1, 0), (0, 0, 0, 0, 4, 3, 4), (0, 0, 0, 0, 0, 1, 0)]
    wrong += [
        (0, 0, 0, 0, 2**62, 4, 0),
        (0, 0, 0, 0, 1, 2**62, 4),
        (0, 0, -1, 0, 1, 1, 0),
    ]
    for block in (good, *wrong):
        puts, none = np.array(block, np.int64), np.empty(0, np.int64)
        how = (
            puts,
            none,
            10,
            -1,
            -1,
            [array],
            [],
            64,
            "call",
            7,
            None,
            0,
            none,
            none,
        )
        if block is good:
            worker.module.move(worker.kernels[0], *how)
            continue
        with pytest.raises(ValueError, match="blocks that lie in their arrays"):
            worker.module.move(worker.kernels[0], *how)


def test_copies_between_blocks_of_other_sizes_are_refused(kernel: ModuleType) -> None:
    worker, array = Worker(kernel, 2), np.zeros(10, np.uint8)
    none, whole = np.empty(0, np.int64), np.array((0, 0, 0, 0, 10, 1, 0))
    rows = np.array((0, 0, 0, 1, 3, 3, 3)), np.array((0, 0, 0, 0, 2, 5, 2))
    how = none, none, 0, -1, -1, [array], [array.copy()], 64, "call", 7, None, 0
    for copied, kept in ((none, none), (none, whole), (whole, rows[1]), (whole, whole)):
        worker.module.move(worker.kernels[0], *how, copied, kept)
    for copied, kept in ((whole, rows[0]), (whole, none)):
        with pytest.raises(ValueError, match="blocks of equal sizes"):
            worker.module.move(worker.kernels[0], *how, copied, kept)
    with pytest.raises(ValueError, match="blocks that lie in their arrays"):
        worker.module.move(worker.kernels[0], *how, none, whole + 1)


def test_memory_of_another_process_is_not_read(kernel: ModuleType) -> None:
    worker = Worker(kernel, 2)
    token = b"0123456789abcdef"
    address = worker.kernels[1].offer(token)
    assert worker.kernels[0].reads(1, os.getpid(), address, token)
    # The process exists, but has other bytes there.
    assert not worker.kernels[0].reads(1, os.getpid(), address, token[::-1])
    assert not worker.kernels[0].reads(1, os.getpid(), 64, token)
    assert not worker.kernels[0].reads(1, 2**22 + 1, address, token)
    with pytest.raises(ValueError, match="token of 16 bytes"):
        worker.kernels[0].reads(1, os.getpid(), address, b"short")
