"""``bench_allreduce.py --device``: the allreduce of one array on each rank's GPU.

The benchmark compares hpcstrat's ``reduce`` by the transport that it chooses, and by
each other transport that can be named and works on this machine; mpi4py's ``Allreduce``
of device buffers, if a trial has succeeded (see ``hpcstrat doctor``); NCCL by CuPy and
by torch, if each rank has a GPU; the usual code by hand, which copies to the host,
calls ``Allreduce`` there and copies back; and the copies in the GPU's memory that every
sum needs (``device_ways.Floor``). Each sum is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from buffers import fill, require_sum
from device_ways import BY_HAND, FLOOR, OURS, Floor, Ways
from devices import Bench, Flight
from report import row, size_text, table

import hpcstrat as hs

__all__ = ["SIZES", "measure_device"]

SIZES = [4096 << 2 * k for k in range(9)]
SECONDS = 2.0

Call = Callable[[], Any]


def measure_device(
    bench: Bench, sizes: list[int], seconds: float
) -> dict[int, dict[str, Any]]:
    """Measure all sizes, print the times, and write them.

    Collective over all replicas.

    Parameters
    ----------
    bench : Bench
        The GPUs, streams and clocks of the measurement.
    sizes : list of int
        Buffer sizes in bytes.
    seconds : float
        Seconds of measurement for each size.

    Returns
    -------
    dict of int to dict of str to ndarray of shape (rounds,)
        Seconds of each alternative, for each size.
    """
    what = "all-reduce of float32 on GPUs"
    hs.print_once(f"{what}, {bench.where()}")
    ways = Ways(bench, named=True)
    hs.print_once(ways.report())
    times: dict[int, dict[str, Any]] = {}
    flights: dict[int, dict[str, Flight]] = {}
    bandwidths: dict[int, float] = {}
    for size in sizes:
        times[size], flights[size], bandwidths[size] = _one_size(
            bench, ways, size, seconds
        )
        hs.print_once(_text(size, times[size], flights[size], bandwidths[size]))
        bench.cupy.get_default_memory_pool().free_all_blocks()
    if bench.comm.rank == 0:
        _write(bench, ways, what, (times, flights, bandwidths))
    ways.close()
    return times


def _calls(ways: Ways, own: Any, total: Any, in_place: Any) -> dict[str, Call]:
    """Return the calls that sum a buffer; each call returns the array of the sum."""
    calls: dict[str, Call] = {}
    for name, strategy in ways.strategies.items():

        def into(strategy: Any = strategy) -> Any:
            return strategy.reduce("sum", own, axis=None, out=total)

        calls[name] = into
        if name == OURS:
            calls[f"{OURS}, in place"] = lambda s=strategy: s.reduce(
                "sum", in_place, axis=None, out=in_place
            )
    return {**calls, **ways.flat(own, total)}


def _one_size(
    bench: Bench, ways: Ways, size: int, seconds: float
) -> tuple[dict[str, Any], dict[str, Flight], float]:
    """Return times of single calls, times of calls in flight, and copied bytes/s."""
    length = max(size // 4, 1)
    with bench.stream:
        arrays = [bench.cupy.empty(length, np.float32) for _ in range(3)]
        own, total, in_place = arrays
        calls = _calls(ways, own, total, in_place)
        numbers = np.empty(length, np.float32)
        fill(numbers, bench.comm.rank)
        own.set(numbers)
        in_place.set(numbers)
        for name, call in calls.items():
            total.fill(0)
            require_sum(name, bench.cupy.asnumpy(call()), bench.comm.size)
        # Use zeros, because zeros can be summed in place any number of times.
        for array in arrays:
            array.fill(0)
        floor = Floor(bench, own, total)
    calls[FLOOR] = floor
    times = bench.measure(calls, seconds)
    flights = {
        name: bench.in_flight(call, float(np.median(times[name])))
        for name, call in calls.items()
    }
    # Count each copied byte twice, because it is read and written.
    bandwidth = 2 * floor.nbytes / flights[FLOOR].device_seconds
    return times, flights, bandwidth


def _text(
    size: int, times: dict[str, Any], flights: dict[str, Flight], bandwidth: float
) -> str:
    """Return the printed report for one size."""
    base, ours = flights[FLOOR], np.median(times[OURS])
    lines = [
        f"\n{size_text(size)}, {len(times[FLOOR])} rounds; one call alone; faster: "
        f"than {BY_HAND}",
        table(times, BY_HAND, FLOOR),
        f"{flights[OURS].calls} or more in flight, each: host us, device us, x {FLOOR}",
    ]
    width = max(map(len, flights))
    lines += [
        f"{name.ljust(width)}  {found.host_seconds * 1e6:10.2f}  "
        f"{found.device_seconds * 1e6:10.2f}  "
        f"{found.device_seconds / base.device_seconds:6.2f}"
        for name, found in flights.items()
    ]
    lines.append(
        f"copies: {bandwidth / 1e9:.1f} GB/s read and written by each rank, all at once"
    )
    factors = [
        f"{np.median(values) / ours:.2f} x {name}"
        for name, values in times.items()
        if not name.startswith(OURS) and name != FLOOR
    ]
    lines.append(f"{OURS}'s choice is faster by " + ", ".join(factors))
    return "\n".join(lines)


def _write(bench: Bench, ways: Ways, what: str, found: tuple[Any, Any, Any]) -> None:
    times, flights, bandwidths = found
    rows = [
        {
            **row(what, name, bench.comm.size, size, values),
            "in_flight": asdict(flights[size][name]),
        }
        for size, by_name in times.items()
        for name, values in by_name.items()
    ]
    bench.write(
        "allreduce",
        rows,
        transports=ways.transports,
        left_out=ways.left_out,
        capabilities=asdict(ways.able),
        floor=Floor.FORMULA,
        bytes_per_second_of_copies_by_each_rank={
            size_text(size): value for size, value in bandwidths.items()
        },
        rounds={size_text(size): len(t[FLOOR]) for size, t in times.items()},
    )
