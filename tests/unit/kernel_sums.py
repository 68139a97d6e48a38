"""Sums of several ranks by kernels in one process, in random order, against NumPy.

As a program, with a module's path and a number of sums as arguments, it checks a kernel
that was compiled differently, for example with sanitizers.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from hpcstrat.engine.algorithms.work import divide
from hpcstrat.engine.arrays.packing import wire_dtype
from hpcstrat.engine.native import type_codes

TYPES = [np.dtype(code) for code in "fdFDebBhHiIlL"]
TYPES.append(np.dtype(ml_dtypes.bfloat16))
# Types that have an order, and therefore MAX and MIN.
ORDERED = [dtype for dtype in TYPES if dtype.kind != "c"]
OPERATIONS = ["SUM", "MEAN", "MAX", "MIN"]
DONE, HEADER_AWAITED, STEP_AWAITED, DIFFERS, STEP_DIFFERS, HEADER_SENT = range(6)
# Values of `Worker.reads`.
SOMETIMES, ALWAYS = 1, 2


class Worker:
    """The kernels of all ranks of a worker, on memory of this process."""

    def __init__(self, module: Any, ranks: int, ring_bytes: int = 256 << 10) -> None:
        common = mmap.PAGESIZE
        memory = mmap.mmap(-1, common + ranks * ring_bytes)
        sizes = common, ring_bytes, ring_bytes, ring_bytes // 4
        self.module = module
        self.kernels = [
            module.Kernel(memory, *sizes, rank, ranks) for rank in range(ranks)
        ]
        # Every second rank offers its core while it waits, which changes no result.
        for kernel in self.kernels[1::2]:
            kernel.yields = True
        # The argument of the kernel's moves: 0 if ranks never read each other's arrays.
        self.reads = 0

    def read_arrays(self, calls: int) -> None:
        """Let ranks read each other's arrays in some or all calls, if they may."""
        tokens = [bytes([rank]) * 16 for rank in range(len(self.kernels))]
        told = [
            (os.getpid(), kernel.offer(token), token)
            for kernel, token in zip(self.kernels, tokens, strict=True)
        ]
        reads = [
            kernel.reads(rank, *one)
            for kernel in self.kernels
            for rank, one in enumerate(told)
        ]
        self.reads = calls * all(reads)

    def sums(
        self,
        arrays: Sequence[Sequence[Any]],
        piece_bytes: int,
        op: str,
        scattered: bool,
        digest: int = 11,
        allocate: Any = None,
    ) -> list[Any]:
        """Return each rank's sum object for such arrays."""
        codes = type_codes([a.dtype for a in arrays[0]], op)
        divisor = len(self.kernels) if op == "MEAN" else 0
        results = [result_like(array, divisor) for array in arrays[0]]
        options = codes, list(arrays[0]), results, piece_bytes, divisor, scattered
        call = "call", digest, allocate
        return [self.module.Sum(kernel, *options, *call) for kernel in self.kernels]


def result_like(array: Any, divisor: int) -> Any:
    """Return an array with the type and shape of a result."""
    wire, narrows = wire_dtype(array.dtype, bool(divisor))
    return np.empty(array.shape, array.dtype if narrows else wire)


def drawn(draw: random.Random, dtype: np.dtype[Any], size: int) -> Any:
    """Return an array with numbers of all magnitudes, and some NaN and infinities."""
    rng = np.random.default_rng(draw.getrandbits(32))
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, size, dtype, endpoint=True)
    values = rng.standard_normal(size) * 10.0 ** rng.integers(-9, 9, size)
    if size and draw.random() < 0.3:
        values[rng.random(size) < 0.1] = np.inf
        values[rng.random(size) < 0.1] = np.nan
        values[rng.random(size) < 0.1] = -0.0
    with np.errstate(all="ignore"):
        if dtype.kind == "c":
            return (values + 1j * rng.standard_normal(size)).astype(dtype)
        return values.astype(dtype)


def wanted(terms: Sequence[Any], op: str) -> Any:
    """Return NumPy's sum of arrays in their order, or their extreme."""
    if op in ("MAX", "MIN"):
        return extreme(terms, op)
    divisor = len(terms) if op == "MEAN" else 0
    wire, narrows = wire_dtype(terms[0].dtype, bool(divisor))
    with np.errstate(all="ignore"):
        total = terms[0].astype(wire)
        for term in terms[1:]:
            total = total + term.astype(wire)
        divide(total, divisor)
        return total.astype(terms[0].dtype) if narrows else total


def extreme(terms: Sequence[Any], op: str) -> Any:
    """Return the MAX or MIN of arrays; NaN is that of NumPy, and -0.0 is below 0.0."""
    function = np.maximum if op == "MAX" else np.minimum
    if terms[0].dtype.kind in "iub":
        return function.reduce(terms)
    # Float64 has all values of the narrower types.
    wide = np.array([term.astype(np.float64) for term in terms])
    found = function.reduce(wide)
    signs = np.signbit(wide) | (wide != 0)
    negative = signs.all(axis=0) if op == "MAX" else (np.signbit(wide)).any(axis=0)
    found = np.where(found == 0, np.where(negative, -0.0, 0.0), found)
    return np.where(np.isnan(found), np.nan, found).astype(terms[0].dtype)


def same_bits(one: Any, other: Any) -> bool:
    """Return whether arrays are equal bit by bit, except for payloads of NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    nans = [np.zeros(one.shape, bool)] * 2
    if one.dtype.kind not in "iu":
        wide = np.complex128 if one.dtype.kind == "c" else np.float64
        nans = [np.isnan(array.astype(wide)) for array in (one, other)]
    zero = one.dtype.type(0)
    cleaned = [
        np.where(nan, zero, a) for nan, a in zip(nans, (one, other), strict=True)
    ]
    return np.array_equal(*nans) and cleaned[0].tobytes() == cleaned[1].tobytes()


@dataclass
class _Call:
    """A random sum of all ranks of a worker, with the results of NumPy."""

    op: str
    kinds: list[tuple[np.dtype[Any], int]]
    piece: int
    arrays: list[list[Any]]
    results: list[list[Any]]
    expected: list[Any]
    sums: list[Any]

    @classmethod
    def drawn(cls, worker: Worker, draw: random.Random) -> _Call:
        """Return a random call."""
        ranks, op = len(worker.kernels), draw.choice(OPERATIONS)
        types = TYPES if op in ("SUM", "MEAN") else ORDERED
        kinds = [(draw.choice(types), _size(draw)) for _ in range(draw.randint(1, 6))]
        arrays = [[drawn(draw, *kind) for kind in kinds] for _ in range(ranks)]
        expected = [wanted(terms, op) for terms in zip(*arrays, strict=True)]
        results = [[np.empty_like(array) for array in expected] for _ in range(ranks)]
        if op != "MEAN" and draw.random() < 0.3:
            results = arrays
        piece = draw.choice([64, 192, 4096, 65536])
        sums = worker.sums(arrays, piece, op, ranks > 2 and draw.random() < 0.5)
        return cls(op, kinds, piece, arrays, results, expected, sums)

    def check(self) -> None:
        """Compare the results of all ranks with NumPy's."""
        for rank, results in enumerate(self.results):
            for result, right in zip(results, self.expected, strict=True):
                note = rank, self.kinds, self.piece, self.op
                assert same_bits(result, right), note
                # A sum may have other payloads of NaN than NumPy's.
                sums = self.op in ("SUM", "MEAN")
                assert sums or result.tobytes() == right.tobytes(), note


def check(worker: Worker, draw: random.Random, num_calls: int = 1) -> None:
    """Make random sums one after the other, and compare them with NumPy's.

    The ranks go on in a random order: one may begin a call while another one still
    reads the places of the call before.
    """
    calls = [_Call.drawn(worker, draw) for _ in range(num_calls)]
    ranks = range(len(worker.kernels))
    done, began = [0 for _ in ranks], [False for _ in ranks]
    for _ in range(1_000_000 * num_calls):
        left = [rank for rank in ranks if done[rank] < num_calls]
        if not left:
            break
        rank = draw.choice(left)
        call, kernel = calls[done[rank]], worker.kernels[rank]
        if not began[rank]:
            assert call.sums[rank].start(call.arrays[rank], call.results[rank])
            kernel.post(7, 11 ^ kernel.next, 0)
            began[rank] = True
        found = call.sums[rank].go_on(draw.randrange(3))
        assert found in (DONE, HEADER_AWAITED, STEP_AWAITED), found
        if found == DONE:
            done[rank], began[rank] = done[rank] + 1, False
    assert min(done) == num_calls, "the ranks do not come to an end"
    for call in calls:
        call.check()


def _size(draw: random.Random) -> int:
    return draw.choice([0, 1, 7, draw.randrange(300), draw.randrange(40_000)])


def main(path: str, count: int) -> None:
    """Check the kernel at a path."""
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for seed in range(count):
        draw = random.Random(seed)
        # In the larger ring, the pieces of a call of two ranks have four places.
        ring_bytes = draw.choice([256 << 10, 1 << 20])
        check(Worker(module, draw.randint(2, 5), ring_bytes), draw, num_calls=4)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
