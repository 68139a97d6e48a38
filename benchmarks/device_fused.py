"""``bench_fused.py --device``: the gradients of ResNet-50 on GPUs, in one call.

The benchmark compares hpcstrat's ``reduce`` of the list of 161 arrays; two kinds of
code by hand (one sum per array; or copies of all arrays into and out of one buffer, and
one sum of the buffer), each through the host, by MPI on device buffers, and by NCCL, if
available; and the copies that every sum needs. See ``device_ways.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from buffers import fill, require_sum
from device_ways import BY_HAND, FLOOR, NCCL, OURS, Floor, Ways
from devices import Bench
from report import row, table

import hpcstrat as hs
from hpcstrat.tools.bench.shapes import resnet50_shapes

__all__ = ["SECONDS", "measure_device"]

SECONDS = 10.0
SMOKE_ARRAYS = 12

Call = Callable[[], Any]


def measure_device(bench: Bench, seconds: float) -> dict[str, Any]:
    """Measure all alternatives, print the times, and write them.

    Collective over all replicas.

    Parameters
    ----------
    bench : Bench
        The GPUs, streams and clocks of the measurement.
    seconds : float
        Seconds of all measurements together.

    Returns
    -------
    dict of str to ndarray of shape (rounds,)
        Seconds of each alternative.
    """
    shapes = resnet50_shapes()
    if bench.smoke:
        shapes = [(3, 5), *sorted(shapes, key=math.prod)[: SMOKE_ARRAYS - 1]]
    with bench.stream:
        arrays = [
            [bench.cupy.empty(shape, np.float32) for shape in shapes] for _ in range(3)
        ]
        nbytes = sum(array.nbytes for array in arrays[0])
        what = f"{len(shapes)} gradients on GPUs, {nbytes:,} bytes"
        hs.print_once(f"{what}; {bench.where()}")
        ways = Ways(bench, named=True)
        hs.print_once(ways.report())
        calls = {**_ours(ways, arrays), **_by_hand(bench, ways, arrays)}
        _check(bench, calls, arrays)
        flat = [bench.cupy.zeros(nbytes // 4, np.float32) for _ in range(2)]
    floor = Floor(bench, *flat)
    calls[FLOOR] = floor
    times = bench.measure(calls, seconds)
    flights = {
        name: bench.in_flight(call, float(np.median(times[name])))
        for name, call in calls.items()
    }
    base = flights[FLOOR].device_seconds
    lines = [
        f"{name}: in flight, host {found.host_seconds * 1e6:.1f} us a call, device "
        f"{found.device_seconds * 1e6:.1f} us, {found.device_seconds / base:.2f} x "
        f"{FLOOR}"
        for name, found in flights.items()
    ]
    packed = f"{BY_HAND}, packed"
    hs.print_once(
        f"{len(times[FLOOR])} rounds; faster: than {packed}\n"
        + "\n".join([table(times, packed, FLOOR), *lines])
    )
    if bench.comm.rank == 0:
        rows = [
            {
                **row(what, name, bench.comm.size, nbytes, values),
                "in_flight": asdict(flights[name]),
            }
            for name, values in times.items()
        ]
        bench.write(
            "fused",
            rows,
            transports=ways.transports,
            left_out=ways.left_out,
            floor=Floor.FORMULA,
            bytes_per_second_of_copies_by_each_rank=2 * floor.nbytes / base,
            rounds=len(times[FLOOR]),
        )
    ways.close()
    return times


def _ours(ways: Ways, arrays: list[list[Any]]) -> dict[str, Call]:
    own, total, in_place = arrays
    calls: dict[str, Call] = {
        f"{OURS}, in place": lambda: ways.strategies[OURS].reduce(
            "sum", in_place, axis=None, out=in_place
        )
    }
    for name, strategy in ways.strategies.items():

        def into(strategy: Any = strategy) -> Any:
            return strategy.reduce("sum", own, axis=None, out=total)

        calls[name] = into
    return calls


def _by_hand(bench: Bench, ways: Ways, arrays: list[list[Any]]) -> dict[str, Call]:
    """Return two calls for each way to sum a buffer: array by array, and packed."""
    own, total, _ = arrays
    size = sum(array.size for array in own)
    packed, packed_total = (bench.cupy.empty(size, np.float32) for _ in range(2))
    calls = {
        f"{name}, packed": _packing(bench.cupy, reduce, (own, packed, total))
        for name, reduce in ways.flat(packed, packed_total).items()
    }
    each: dict[str, list[Call]] = {}
    for source, target in zip(own, total, strict=True):
        for name, reduce in ways.flat(source.ravel(), target.ravel()).items():
            each.setdefault(name, []).append(reduce)
    for name, reductions in each.items():
        calls[f"{name}, each array"] = (
            _grouped(reductions, total) if name == NCCL else _one_by_one(reductions)
        )
    return calls


def _packing(cupy: Any, reduce: Call, arrays: tuple[list[Any], Any, list[Any]]) -> Call:
    own, packed, total = arrays
    ends = np.cumsum([array.size for array in own]).tolist()
    starts = [0, *ends[:-1]]

    def call() -> list[Any]:
        cupy.concatenate([array.ravel() for array in own], out=packed)
        result = reduce()
        for array, start, end in zip(total, starts, ends, strict=True):
            cupy.copyto(array, result[start:end].reshape(array.shape))
        return total

    return call


def _one_by_one(reductions: list[Call]) -> Call:
    return lambda: [reduce() for reduce in reductions]


def _grouped(reductions: list[Call], total: list[Any]) -> Call:
    """Return a call that sums all arrays in one NCCL group."""
    from cupy.cuda import nccl

    def call() -> list[Any]:
        nccl.groupStart()
        for reduce in reductions:
            reduce()
        nccl.groupEnd()
        return total

    return call


def _check(bench: Bench, calls: dict[str, Call], arrays: list[list[Any]]) -> None:
    """Sum once by each alternative, raise if a sum is wrong, then write zeros."""
    own, total, in_place = arrays
    for source, other in zip(own, in_place, strict=True):
        numbers = np.empty(source.shape, np.float32)
        fill(numbers, bench.comm.rank)
        source.set(numbers)
        other.set(numbers)
    for name, call in calls.items():
        for array in total:
            array.fill(0)
        for index, array in enumerate(call()):
            host = bench.cupy.asnumpy(array)
            require_sum(f"{name}, array {index}", host, bench.comm.size)
    for array in [*own, *total, *in_place]:
        array.fill(0)
