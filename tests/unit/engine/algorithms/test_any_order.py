"""All sum algorithms between workers, with messages that arrive in any order.

The ranks are simulated, see `pretend_ranks`. Therefore any number of ranks can be
tested, and a schedule that depends on the machine's timing fails. Each example draws
the number of ranks of each worker, calls that are in progress at the same time, the
speed of each rank, and the order in which messages arrive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcstrat as hs
from hpcstrat.engine.algorithms.header_sum import HeaderSum, header_bytes
from hpcstrat.engine.algorithms.work import IN_HEADER, Work
from hpcstrat.engine.arrays.packing import cut, wire_dtype
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.wire_headers import HEADER_BYTES, room_bytes
from tests.unit.pretend_ranks import Wire, pretend_channels

# Size of a shared memory slot, so small that sums need several pieces.
SLOT_BYTES = 4096
# Up to this number of workers, headers carry more data than MPI sends eagerly.
MOST_CARRYING = 3
# Number of tests without progress, after which all ranks are tested in turn.
MOST_SWEEPS = 1000
WAYS = (None, hs.HierarchicalCopyAllReduce(), hs.MpiAllReduce())
DTYPES = ("f4", "f8", "f2", "i8", "i2", "c8")


def slot_bytes(num_workers: int) -> int:
    """Return the size of the largest piece, small enough that sums have several."""
    return 16 * SLOT_BYTES if num_workers <= MOST_CARRYING else SLOT_BYTES


@dataclass(frozen=True)
class Sum:
    """A call that sums arrays of these types and sizes, in pieces of this size."""

    op: hs.ReduceOp
    arrays: tuple[tuple[str, int], ...]
    pack: int
    narrows: bool


@st.composite
def workers_of(draw: Any, num_workers: int) -> list[int]:
    """Draw the number of ranks for each worker."""
    each = draw(st.sampled_from([1, 1, 2, 0]))
    if each and num_workers * each > 1:
        return [each] * num_workers
    sizes = st.integers(1, 3)
    if num_workers == 1:
        return [draw(st.integers(2, 5))]
    found: list[int] = draw(st.lists(sizes, min_size=num_workers, max_size=num_workers))
    return found


@st.composite
def calls_of(draw: Any, num_workers: int) -> list[Sum]:
    """Draw calls with sizes near the thresholds of the algorithms."""
    p = num_workers
    # Thresholds: a segment needs another cache line, the header is full, and parts are
    # so large that MPI no longer sums them.
    room = min(room_bytes(p) if p > 1 else 0, slot_bytes(p)) // 4
    borders = {1, p - 1, p, p + 1, 16, 17, room, room + 1, 1024 * p, 1024 * p + 1}
    size = st.sampled_from(sorted(borders - {0})) | st.integers(1, 300)
    array = st.tuples(st.sampled_from(DTYPES), size)
    call = st.builds(
        Sum,
        op=st.sampled_from([hs.ReduceOp.SUM, hs.ReduceOp.MEAN, hs.ReduceOp.MAX]),
        arrays=st.lists(array, min_size=1, max_size=3).map(tuple),
        pack=st.sampled_from([0, 0, 64, 1000]),
        narrows=st.sampled_from([False, False, True]),
    )
    calls = [_ordered(one) for one in draw(st.lists(call, min_size=1, max_size=3))]
    # Use larger pieces in calls with many numbers, so that an example stays fast.
    return [
        s
        if sum(n for _, n in s.arrays) < 600 or s.pack != 64
        else Sum(s.op, s.arrays, 1000, s.narrows)
        for s in calls
    ]


def _ordered(call: Sum) -> Sum:
    """Return a MAX without complex numbers, which is never rounded on the way."""
    if call.op.adds:
        return call
    arrays = [(dtype.replace("c8", "f4"), size) for dtype, size in call.arrays]
    return Sum(call.op, tuple(arrays), call.pack, narrows=False)


def values(dtype: str, size: int, seed: int, rank: int) -> Any:
    """Return a rank's array, whose sum depends on the order of addition."""
    rng = np.random.default_rng((seed, rank))
    drawn = rng.normal(size=size) * 10.0 ** rng.integers(-2, 3, size)
    if dtype[0] == "i":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, size, dtype, endpoint=True)
    return (drawn * (1 - 2j) if dtype == "c8" else drawn).astype(dtype)


def in_order(parts: list[Any], sizes: list[int], op: hs.ReduceOp) -> Any:
    """Return the sum of all workers' sums, each in order of ranks."""
    if not op.adds:
        return np.maximum.reduce(parts)
    means = op is hs.ReduceOp.MEAN
    wide, narrows = wire_dtype(parts[0].dtype, means)
    rest, total = iter(parts), cast("Any", None)
    for size in sizes:
        mine = next(rest).astype(wide)
        for _ in range(size - 1):
            mine = mine + next(rest).astype(wide)
        total = mine if total is None else total + mine
    if means:
        total = total / wide.type(len(parts))
    with np.errstate(over="ignore"):
        return total.astype(parts[0].dtype) if narrows else total


def take_to_the_end(wire: Wire, tests: list[Any]) -> None:
    """Deliver messages and test calls of ranks in random order, until all end."""
    random, left, idle = wire.random, list(tests), 0
    # Draw speeds: some ranks, or the network, may be much slower.
    speeds = [random.random() ** 3 + 1e-3 for _ in left]
    wire_speed = random.choice([0.1, 1, 10])
    while left:
        if random.random() < wire_speed / (wire_speed + 1) and wire.deliver():
            idle = 0
            continue
        [place] = random.choices(range(len(left)), speeds)
        if left[place]():
            del left[place], speeds[place]
            idle = 0
        elif not wire.deliver():
            idle += 1
            if idle > MOST_SWEEPS:
                # It is a deadlock if no call ends although all ranks test in turn.
                before = len(left)
                for _ in range(MOST_SWEEPS):
                    left = [test for test in left if not test()]
                    if len(left) < before or wire.deliver():
                        break
                else:
                    raise AssertionError(f"{len(left)} ranks stand still")
                speeds, idle = [1.0] * len(left), 0


def most_bytes(call: Sum, how: str, sizes: list[int], nbytes: int) -> float:
    """Return the most bytes that the ranks of a worker may send in a call."""
    p = len(sizes)
    if p == 1:
        return 0
    kinds = [(np.dtype(dtype), (size,)) for dtype, size in call.arrays]
    means = call.op is hs.ReduceOp.MEAN
    headers = HEADER_BYTES * math.ceil(math.log2(p))
    if how == IN_HEADER:
        [piece] = cut(kinds, means, 1 << 30)
        return headers + (p - 1) * header_bytes(piece)
    if "parts" not in how:
        return headers
    if call.narrows:
        halved = sum(n * 2 for dtype, n in call.arrays if dtype[0] == "f")
        exact = sum(
            n * wire_dtype(np.dtype(dtype), means)[0].itemsize
            for dtype, n in call.arrays
            if dtype[0] != "f"
        )
        nbytes = halved + exact
    pieces = list(cut(kinds, means, call.pack or SLOT_BYTES // 2))
    # Parts differ by at most one number, and rounded parts include scales.
    sums = sum(len(piece) for piece in pieces) * min(sizes)
    return headers + 2 * (p - 1) / p * nbytes + sums * (p - 1) * 32


def compare(
    call: Sum, how: str, sizes: list[int], results: list[Any], seed: int
) -> None:
    """Compare the results of a call on all ranks with the expected sum."""
    for index, (dtype, size) in enumerate(call.arrays):
        parts = [values(dtype, size, seed + index, r) for r in range(sum(sizes))]
        expected = in_order(parts, sizes, call.op)
        found = results[0][index]
        for other in results:
            assert other[index].tobytes() == found.tobytes(), "the bits differ"
        assert found.dtype == expected.dtype
        inexact = expected.dtype.kind in "fc" and call.op.adds
        if inexact and ("MPI" in how or call.narrows):
            unit = 2.0**-10 if dtype == "f2" else len(parts) * 2.0**-24
            # Terms and sum are rounded; for errors of each step, see rounded_sum.
            unit = max(unit, 2.0**-9) if call.narrows else unit
            bound = np.add.reduce([abs(part.astype("c16")) for part in parts])
            bound /= len(parts) if call.op is hs.ReduceOp.MEAN else 1
            least = 2.0**-24 + bound.max() * 2.0**-30 * call.narrows
            error = abs(found.astype("c16") - expected)
            assert (error <= unit * bound + least).all()
        else:
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("num_workers", range(1, 10))
@settings(max_examples=8)
@given(data=st.data())
def test_sums_are_right_in_any_order(num_workers: int, data: Any) -> None:
    sizes = data.draw(workers_of(num_workers))
    calls = data.draw(calls_of(num_workers))
    ops, seed = data.draw(st.sampled_from(WAYS)), data.draw(st.integers(0, 1 << 30))
    wire = Wire(Random(seed))
    ranks = [
        Collectives(c, ops)
        for c in pretend_channels(wire, sizes, slot_bytes(num_workers))
    ]
    handles: list[list[Any]] = [[] for _ in ranks]

    def takes_part(rank: int) -> bool:
        """Start the next call of a rank, or test the calls that it has started."""
        own = handles[rank]
        if len(own) < len(calls):
            call, number = calls[len(own)], len(own)
            arrays = [
                values(dtype, size, seed + 10 * number + index, rank)
                for index, (dtype, size) in enumerate(call.arrays)
            ]
            options = hs.CommunicationOptions(
                bytes_per_pack=call.pack,
                wire_dtype="float16" if call.narrows else None,
            )
            own.append(ranks[rank].start_reduce(call.op, arrays, "sum", options))
            return False
        return bool(own[-1].test())

    take_to_the_end(
        wire, [lambda rank=rank: takes_part(rank) for rank in range(len(ranks))]
    )
    most, starts = 0.0, np.cumsum([0, *sizes])
    for number, call in enumerate(calls):
        made = [own[number] for own in handles]
        how = made[0].call.how
        compare(call, how, sizes, [h.wait() for h in made], seed + 10 * number)
        most += most_bytes(call, how, sizes, made[0].call.nbytes)
    for start, size in zip(starts, sizes, strict=False):
        sent = sum(wire.sent_bytes[rank] for rank in range(start, start + size))
        assert sent <= most, f"a worker sent {sent} bytes; most_bytes allows {most}"
    # No message is left that a later call could receive by mistake.
    assert not wire.left()
    for collectives in ranks:
        collectives.channel.close()  # type: ignore[union-attr]


def header_of(channel: Channel, size: int) -> Any:
    """Return an array of values for a header."""
    kind = np.dtype(np.float32), (size,)
    [piece] = cut([kind], False, 1 << 20)
    own = [np.ones(size, np.float32)]
    work = Work(describe_call("a sum"), [piece], own, own, 1 << 20)
    return next(HeaderSum(piece, channel, 0, np.add)(work, channel))


@pytest.mark.parametrize("num_workers", range(2, 10))
@settings(max_examples=5)
@given(data=st.data())
def test_headers_that_differ_are_found_by_all_in_any_order(
    num_workers: int, data: Any
) -> None:
    sizes = data.draw(workers_of(num_workers))
    count = sum(sizes)
    odd = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count - 1))
    # Sizes of the values in the header, on differing and on other ranks; 0 for none.
    room = min(room_bytes(num_workers), slot_bytes(num_workers)) // 4
    size = st.sampled_from([0, 1, room])
    loads = data.draw(size), data.draw(size)
    wire = Wire(Random(data.draw(st.integers(0, 1 << 30))))
    channels = pretend_channels(wire, sizes, slot_bytes(num_workers))

    def announce(differ: bool) -> list[bool]:
        """Announce a call on all ranks; return the result of each announcement."""
        for rank, channel in enumerate(channels):
            other = differ and rank in odd
            load = loads[other]
            carried = header_of(channel, load) if load else None
            channel.post(describe_call(f"call {other}"), 0, 0, carried)
        headers = [channel.headers for channel in channels]
        take_to_the_end(wire, [lambda h=h: not h.missing() for h in headers])
        assert not wire.left()
        found = [h.agreed() for h in headers]
        for channel in channels:
            channel.rings.restart()
        return found

    assert all(announce(differ=False))
    assert not any(announce(differ=True))
    assert all(announce(differ=False))
