"""Sums of several ranks by kernels in one process, in random order, against NumPy.

As a program, with a module's path and a number of sums as arguments, it checks a kernel
that was compiled differently, for example with sanitizers.
"""

from __future__ import annotations

import importlib.util
import mmap
import random
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from hpcstrat.engine.arrays.packing import wire_dtype
from hpcstrat.engine.collectives.work import divide
from hpcstrat.engine.native import type_codes

TYPES = [np.dtype(code) for code in "fdFDebBhHiIlL"]
TYPES.append(np.dtype(ml_dtypes.bfloat16))
# Types that have an order, and therefore MAX and MIN.
ORDERED = [dtype for dtype in TYPES if dtype.kind != "c"]
OPERATIONS = ["SUM", "MEAN", "MAX", "MIN"]
DONE, HEADER_AWAITED, STEP_AWAITED, DIFFERS, STEP_DIFFERS, HEADER_SENT = range(6)


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


def finish(sums: Sequence[Any], draw: random.Random) -> None:
    """Run the sums of all ranks to their ends, in random order."""
    open_ = list(range(len(sums)))
    for _ in range(1_000_000):
        if not open_:
            return
        rank = draw.choice(open_)
        found = sums[rank].go_on(draw.randrange(3))
        assert found in (DONE, HEADER_AWAITED, STEP_AWAITED), found
        if found == DONE:
            open_.remove(rank)
    raise AssertionError("the ranks do not come to an end")


def check(worker: Worker, draw: random.Random) -> None:
    """Compute a random sum on all ranks of a worker, and compare it with NumPy's."""
    ranks, op = len(worker.kernels), draw.choice(OPERATIONS)
    types = TYPES if op in ("SUM", "MEAN") else ORDERED
    kinds = [(draw.choice(types), _size(draw)) for _ in range(draw.randint(1, 6))]
    arrays = [[drawn(draw, *kind) for kind in kinds] for _ in range(ranks)]
    expected = [wanted(terms, op) for terms in zip(*arrays, strict=True)]
    results = [[np.empty_like(array) for array in expected] for _ in range(ranks)]
    if op != "MEAN" and draw.random() < 0.3:
        # Sum in place, if all values are in one piece.
        results = arrays
    piece = draw.choice([64, 192, 4096, 65536])
    sums = worker.sums(arrays, piece, op, ranks > 2 and draw.random() < 0.5)
    for rank in draw.sample(range(ranks), ranks):
        assert sums[rank].start(arrays[rank], results[rank])
        worker.kernels[rank].post(7, 11 ^ worker.kernels[rank].next, 0)
    finish(sums, draw)
    for rank in range(ranks):
        for result, right in zip(results[rank], expected, strict=True):
            note = rank, kinds, piece, op
            assert same_bits(result, right), note
            # A sum may have other payloads of NaN than NumPy's.
            assert op in ("SUM", "MEAN") or result.tobytes() == right.tobytes(), note


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
        worker = Worker(module, draw.randint(2, 5))
        for _ in range(4):
            check(worker, draw)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
