"""Each kernel compared with NumPy, for CuPy or its stand-in; see test_kernels.py."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcstrat.engine.arrays.packing import Piece, cut, wire_dtype
from hpcstrat.engine.gpu import kernels
from hpcstrat.engine.gpu.streams import Lane

ml_dtypes = pytest.importorskip("ml_dtypes")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    *map(np.dtype, ("f2", "f4", "f8", "c8", "c16")),
    *map(np.dtype, ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")),
    BFLOAT16,
]
# Elements around an array, which kernels must not write.
GUARD = 5
MARK = 77

several = settings(
    max_examples=30 if "--short" in sys.argv else 80,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def lane() -> Lane:
    return Lane()


def values(dtype: np.dtype[Any], size: int, seed: int) -> Any:
    """Return values of a type, some of them extreme."""
    generator = np.random.default_rng(seed)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return generator.integers(limits.min, limits.max, size, dtype, endpoint=True)
    numbers = generator.standard_normal(size) * 10.0 ** generator.integers(-3, 3, size)
    if dtype.kind == "c":
        numbers = numbers + 1j * generator.standard_normal(size)
    if size:
        numbers[generator.integers(size)] = np.inf
        numbers[generator.integers(size)] = -0.0
    return numbers.astype(dtype)


def put(host: Any) -> Any:
    """Return a host array on the device; not every CuPy can copy bfloat16 directly."""
    if host.dtype == BFLOAT16:
        return cupy.asarray(host.view(np.uint16)).view(BFLOAT16)
    return cupy.asarray(host)


def within(host: Any, offset: int) -> tuple[Any, Any]:
    """Return a device array at an offset inside of a larger one, and the larger one."""
    whole = np.full(host.size + offset + GUARD, MARK, host.dtype)
    whole[offset : offset + host.size] = host
    outer = put(whole)
    return outer[offset : offset + host.size], outer


def unhurt(outer: Any, offset: int, size: int) -> bool:
    """Return whether the elements around an array are unchanged."""
    host = outer.get()
    rest = np.concatenate([host[:offset], host[offset + size :]])
    return bool((rest == np.asarray(MARK, host.dtype)).all())


def same(found: Any, wanted: Any) -> None:
    """Assert equal bits, except in NaNs."""
    assert found.dtype == wanted.dtype
    if found.dtype.kind in "iu":
        np.testing.assert_array_equal(found, wanted)
    elif found.dtype.kind == "c":
        same(found.real.copy(), wanted.real.copy())
        same(found.imag.copy(), wanted.imag.copy())
    else:
        nans = call_without_fp_warnings(np.isnan, wanted)
        assert (call_without_fp_warnings(np.isnan, found) == nans).all()
        assert found[~nans].tobytes() == wanted[~nans].tobytes()


def call_without_fp_warnings(function: Any, *args: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*args)


def cast(array: Any, dtype: Any) -> Any:
    return call_without_fp_warnings(array.astype, dtype)


def divided(total: Any, divisor: int) -> Any:
    return (
        call_without_fp_warnings(np.divide, total, divisor, total) if divisor else total
    )


class Case:
    """Arrays on the device for one run, with the expected packed buffer."""

    def __init__(
        self,
        dtype: np.dtype[Any],
        sizes: Sequence[int],
        offsets: Sequence[int],
        *,
        means: bool = False,
        piece_bytes: int = 1 << 30,
    ) -> None:
        self.hosts = [values(dtype, n, 100 + i) for i, n in enumerate(sizes)]
        self.offsets = [offsets[i % len(offsets)] for i in range(len(sizes))]
        pairs = zip(self.hosts, self.offsets, strict=True)
        self.sources = [within(host, offset)[0] for host, offset in pairs]
        self.wire, narrows = wire_dtype(dtype, means)
        self.result_dtype = dtype if narrows else self.wire
        self.divisor = 3 if means else 0
        self.pieces: list[Piece] = list(
            cut([(dtype, (n,)) for n in sizes], means, piece_bytes)
        )

    def results(self) -> tuple[list[Any], list[Any]]:
        """Return new result arrays, and the larger arrays that contain them."""
        made = [
            within(np.zeros(host.size, self.result_dtype), offset)
            for host, offset in zip(self.hosts, self.offsets, strict=True)
        ]
        return [inner for inner, _ in made], [outer for _, outer in made]

    def packed(self, run: Any) -> Any:
        """Return the expected packed buffer of a run."""
        return np.concatenate(
            [cast(self.hosts[i][a:b], run.dtype) for i, a, b, _ in run.spans]
        )

    def check(self, sums: list[Any], inner: list[Any], outer: list[Any]) -> None:
        """Compare results with the sums of all runs."""
        wanted = [np.zeros(host.size, self.result_dtype) for host in self.hosts]
        runs = [run for piece in self.pieces for run in piece]
        for run, total in zip(runs, sums, strict=True):
            mean = divided(total.copy(), self.divisor)
            for index, start, stop, at in run.spans:
                low = at - run.start
                part = mean[low : low + stop - start]
                wanted[index][start:stop] = cast(part, self.result_dtype)
        for index, host in enumerate(wanted):
            same(inner[index].get(), host)
            assert unhurt(outer[index], self.offsets[index], host.size)


SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 100, 1023, 4097, 20000])


@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(SIZES, min_size=1, max_size=40),
    offsets=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    means=st.booleans(),
    piece_bytes=st.sampled_from([640, 1 << 16, 1 << 30]),
    num_terms=st.integers(1, 4),
)
@several
def _pack_and_combine(
    lane: Lane, *, num_terms: int, dtype: Any, sizes: Any, **given: Any
) -> None:
    if sum(sizes) > 3000 and given["piece_bytes"] == 640:
        sizes = sizes[:1]
    case = Case(dtype, sizes, given.pop("offsets"), **given)
    inner, outer = case.results()
    sums = []
    for number, run in enumerate(run for piece in case.pieces for run in piece):
        out, around = within(np.zeros(run.size, run.dtype), 16 // run.dtype.itemsize)
        lane.enter()
        kernels.pack(run.spans, case.sources, out, lane.stream)
        lane.leave()
        wanted = case.packed(run)
        same(out.get(), wanted)
        assert unhurt(around, 16 // run.dtype.itemsize, run.size)
        others = [
            call_without_fp_warnings(np.roll, wanted, shift + number)
            for shift in range(1, num_terms)
        ]
        terms = [out, *map(cupy.asarray, others)]
        lane.enter()
        total = out
        for term in terms[1:]:
            kernels.add(total, term, total, lane.stream)
        kernels.unpack(
            *(total.data.ptr, run.spans, inner, lane.stream),
            dtype=run.dtype,
            divisor=case.divisor,
        )
        lane.leave()
        total = wanted.copy()
        for other in others:
            call_without_fp_warnings(np.add, total, other, total)
        sums.append(total)
        cupy.cuda.get_current_stream().synchronize()
    case.check(sums, inner, outer)


def test_pack_and_combine(lane: Lane) -> None:
    _pack_and_combine(lane)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "i4", "i8", "u4", "u8"])
@pytest.mark.parametrize("size", [0, 1, 5, 4096, 10007])
def test_add_in_place_and_apart(lane: Lane, dtype: str, size: int) -> None:
    hosts = [values(np.dtype(dtype), size, seed) for seed in range(2)]
    wanted = call_without_fp_warnings(np.add, *hosts)
    for offsets in itertools.product(range(4), repeat=2):
        for place in range(3):
            pairs = [within(*pair) for pair in zip(hosts, offsets, strict=True)]
            arrays = [*(inner for inner, _ in pairs), cupy.zeros(size, dtype)]
            lane.enter()
            kernels.add(arrays[0], arrays[1], arrays[place], lane.stream)
            lane.leave()
            same(arrays[place].get(), wanted)
            for (_, outer), offset in zip(pairs, offsets, strict=True):
                assert unhurt(outer, offset, size)


@pytest.mark.parametrize("dtype", [np.dtype("f2"), BFLOAT16])
def test_all_half_numbers(lane: Lane, dtype: Any) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    source = put(halves)
    spans = ((0, 0, halves.size, 0),)
    out, result = cupy.zeros(halves.size, "f4"), put(np.zeros(halves.size, dtype))
    lane.enter()
    kernels.pack(spans, [source], out, lane.stream)
    kernels.unpack(out.data.ptr, spans, [result], lane.stream, dtype=out.dtype)
    lane.leave()
    same(out.get(), cast(halves, np.float32))
    same(result.get(), halves)


@pytest.mark.parametrize("dtype", [np.dtype("f2"), BFLOAT16])
def test_rounding_to_half_numbers(lane: Lane, dtype: Any) -> None:
    """Test all half numbers, the middles between them, and the middles' neighbors."""
    halves = cast(np.arange(1 << 15, dtype=np.uint16).view(dtype), np.float32)
    halves = halves[np.isfinite(halves)]
    middles = (
        call_without_fp_warnings(np.add, halves[1:].astype(np.float64), halves[:-1]) / 2
    )
    singles = np.concatenate([halves, cast(middles, np.float32)])
    near = [
        call_without_fp_warnings(np.nextafter, singles, np.float32(end))
        for end in (-np.inf, np.inf)
    ]
    bits = np.random.default_rng(3).integers(0, 1 << 32, 100_000, np.uint32)
    special = np.array([0.0, np.inf, np.nan, 65504, 65519.996, 65520, 1e-45], "f4")
    host = np.concatenate([singles, *near, bits.view(np.float32), special])
    host = np.concatenate([host, -host])
    buffer, result = cupy.asarray(host), put(np.zeros(host.size, dtype))
    lane.enter()
    kernels.unpack(
        *(buffer.data.ptr, ((0, 0, host.size, 0),), [result], lane.stream),
        dtype=host.dtype,
    )
    lane.leave()
    same(result.get(), cast(host, dtype))


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 7, 8, 1000])
def test_quotients_are_numpys(lane: Lane, dtype: str, divisor: int) -> None:
    host = values(np.dtype(dtype), 5000, 1)
    tiny = np.finfo(host.real.dtype).smallest_subnormal
    host[:200] = tiny * np.arange(200)
    host[200:203] = [np.nan, np.inf, -np.inf]
    buffer, result = cupy.asarray(host), put(np.zeros(host.size, dtype))
    lane.enter()
    kernels.unpack(
        *(buffer.data.ptr, ((0, 0, host.size, 0),), [result], lane.stream),
        dtype=host.dtype,
        divisor=divisor,
    )
    lane.leave()
    same(result.get(), divided(host.copy(), divisor))


@pytest.mark.parametrize("count", [1, 24, 208, 209, 1000])
@pytest.mark.parametrize("size", [1, 3, 60])
def test_tables_of_many_arrays(lane: Lane, count: int, size: int) -> None:
    """Several launches are in flight, each with its own addresses."""
    ((run,),) = cut([(np.dtype("f4"), (size,))] * count, False, 1 << 30)
    stride = size + GUARD
    steps = []
    for seed in range(4):
        host = values(np.dtype("f4"), count * stride, seed)
        source, result = cupy.asarray(host), cupy.full(host.size, MARK, "f4")
        firsts = range(0, host.size, stride)
        sources = [source[first : first + size] for first in firsts]
        # The arrays lie in another order than in the buffer.
        results = [result[first : first + size] for first in firsts][::-1]
        steps.append((host, sources, results, result, cupy.zeros(run.size, "f4")))
    lane.enter()
    for _, sources, results, _, out in steps:
        kernels.pack(run.spans, sources, out, lane.stream)
        kernels.unpack(
            *(out.data.ptr, run.spans, results, lane.stream), dtype=out.dtype
        )
    lane.leave()
    for host, _, _, result, out in steps:
        rows = host.reshape(count, stride)[:, :size]
        same(out.get(), rows.ravel())
        found = result.get().reshape(count, stride)
        same(found[::-1, :size].ravel(), rows.ravel())
        assert (found[:, size:] == MARK).all()


@pytest.mark.parametrize("name", ["c8", "c16"])
@pytest.mark.parametrize("shifts", list(itertools.product([0, 1], repeat=3)))
def test_complex_numbers_may_begin_at_one_of_their_parts(
    lane: Lane, name: str, shifts: tuple[int, int, int]
) -> None:
    """A complex view of real numbers may be misaligned; a kernel must not fault."""
    dtype, size = np.dtype(name), 700
    part = np.dtype(f"f{dtype.itemsize // 2}")
    arrays = []
    for shift, fills in zip(shifts, (True, False, False), strict=True):
        numbers = np.arange(2 * size + 1) * fills
        real = cupy.asarray(numbers.astype(part))
        arrays.append(real[shift : shift + 2 * size].view(dtype))
    source, buffer, result = arrays
    wanted = source.get()
    lane.enter()
    kernels.pack([(0, 0, size, 0)], [source], buffer, lane.stream)
    kernels.add(buffer, buffer, buffer, lane.stream)
    spans = [(0, 0, size, 0)]
    kernels.unpack(buffer.data.ptr, spans, [result], lane.stream, dtype=dtype)
    # The kernel finds many small arrays by bisection.
    few = [(0, n, n + 2, n) for n in range(0, size, 2)]
    kernels.pack(few, [result], buffer, lane.stream)
    lane.leave()
    np.testing.assert_array_equal(result.get(), 2 * wanted)
    np.testing.assert_array_equal(buffer.get(), 2 * wanted)


def test_what_is_prepared_is_not_compiled_later(lane: Lane) -> None:
    kernels.prepare(np.dtype("f2"), np.dtype("f4"))
    before = kernels._kernel.cache_info().misses
    source, out = cupy.ones(9, "f2"), cupy.zeros(9, "f4")
    lane.enter()
    kernels.pack([(0, 0, 9, 0)], [source], out, lane.stream)
    kernels.add(out, out, out, lane.stream)
    lane.leave()
    assert (out.get() == 2).all()
    assert kernels._kernel.cache_info().misses == before


def test_no_call_waits_for_the_device(lane: Lane) -> None:
    standin = getattr(cupy, "_standin", None)
    if standin is None:
        pytest.skip("CuPy itself counts nothing")
    case = Case(np.dtype("f4"), [100] * 300, [0])
    (run,) = case.pieces[0]
    out = cupy.zeros(run.size, "f4")
    inner, _ = case.results()
    kernels.prepare(out.dtype, out.dtype)
    before = standin.counts.synchronizations
    launched = standin.counts.launches
    for _ in range(5):
        lane.enter()
        kernels.pack(run.spans, case.sources, out, lane.stream)
        kernels.add(out, out, out, lane.stream)
        kernels.unpack(*(out.data.ptr, run.spans, inner, lane.stream), dtype=out.dtype)
        lane.leave()
    assert standin.counts.synchronizations == before
    # Two launches pack 300 arrays, and two launches unpack them.
    assert standin.counts.launches == launched + 5 * (2 + 1 + 2)
    lane.synchronize()


def test_done_says_when_the_work_has_been_done(lane: Lane) -> None:
    out = cupy.zeros(1 << 20, "f4")
    lane.enter()
    for _ in range(20):
        kernels.add(out, out, out, lane.stream)
    done = lane.done()
    later = lane.done()
    while not done.agreed():
        assert done.missing() in ([-1], [])
    assert done.agreed()
    assert done.missing() == []
    lane.synchronize()
    assert later.agreed()
