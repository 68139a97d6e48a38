"""Benchmark of summing lists: 20 and 200 small arrays, and gradients of ResNet-50.

ResNet-50 has 161 arrays with 25.6 million float32 in all.

Run it on two ranks of a quiet machine with two cores::

    mpirun -n 2 python benchmarks/bench_fused.py --json FILE --picture FILE

The benchmark compares hpcstrat's ``all_reduce`` of the list of arrays (in place, into
``out=``, and with a result that the next call replaces, as in a training loop);
mpi4py's ``Allreduce`` of each array; mpi4py's ``Allreduce`` of one buffer, with copies
of the arrays into and out of the buffer, in one call and in pieces of 1 MiB; the same
without the copies out of the buffer; and a copy of as many bytes by all ranks at once.
Each sum is checked before it is timed, and the inputs are rewritten before each call.
``timing.py`` describes how times are measured, and ``cores.py`` explains why there are
two results of each: for cores that share a cache, and for cores that do not. With
``--device`` the arrays are on GPUs: see ``device_fused.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import click
import numpy as np
from buffers import fill, in_pieces, require_sum
from cores import LATENCY, CoreWatch, by_state, describe_cores
from device_fused import SECONDS as DEVICE_SECONDS
from device_fused import measure_device
from device_ways import FLOOR as FLOOR_ON_DEVICE
from devices import device_options, given, start
from report import describe, draw_bars, output_options, row, table, write_json
from timing import measure_for

import hpcstrat as hs
from hpcstrat.tools.bench.shapes import resnet50_shapes

PIECE = 1 << 20
PACKED = "mpi4py, packed"
LEFT = "mpi4py, packed in place, left there"
FLOOR = "memcpy"
LISTS = {
    "20 x 64": [(64,)] * 20,
    "200 x 64": [(64,)] * 200,
    "20 x 4,096": [(4096,)] * 20,
    "gradients of ResNet-50": resnet50_shapes(),
}

Call = Callable[[], object]


class Case:
    """The gradients of one step, and all alternatives that sum them.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The replicas of this strategy take part; the case is used in its replica
        context.
    shapes : sequence of tuple of int
        Shapes of the arrays.
    watch : CoreWatch
        Detects whether the ranks' cores share a cache.
    """

    def __init__(
        self,
        strategy: hs.MultiWorkerMirroredStrategy,
        shapes: Sequence[tuple[int, ...]],
        watch: CoreWatch,
    ):
        self.comm, self.watch = strategy.topology.replica_comm, watch
        self.mpi = strategy.topology.mpi
        self.own, self.total, self.inplace, self.numbers = (
            [np.zeros(shape, np.float32) for shape in shapes] for _ in range(4)
        )
        self.kept: list[Any] = []
        self.packed, self.packed_total = (
            np.zeros(sum(map(math.prod, shapes)), np.float32) for _ in range(2)
        )
        ends = np.cumsum([array.size for array in self.own])[:-1]
        self.views, self.total_views = (
            [
                part.reshape(shape)
                for part, shape in zip(np.split(flat, ends), shapes, strict=True)
            ]
            for flat in (self.packed, self.packed_total)
        )
        for array in self.numbers:
            fill(array, self.comm.rank)
        self.rewrite()

    @property
    def nbytes(self) -> int:
        """Return the size of all arrays together in bytes."""
        return int(self.packed.nbytes)

    def rewrite(self) -> None:
        """Write this rank's numbers into the inputs, as a step of training does.

        Not collective.
        """
        for own, inplace, numbers in zip(
            self.own, self.inplace, self.numbers, strict=True
        ):
            np.copyto(own, numbers)
            np.copyto(inplace, numbers)

    def by_hpcstrat(self) -> dict[str, tuple[Call, Call]]:
        """Return hpcstrat's calls that sum the arrays, each with the list of sums.

        Not collective.
        """
        all_reduce = hs.get_replica_context().all_reduce
        own, total, inplace = self.own, self.total, self.inplace

        def allocate() -> None:
            self.kept = all_reduce("sum", own)

        return {
            "hpcstrat, in place": (
                lambda: all_reduce("sum", inplace, out=inplace),
                lambda: inplace,
            ),
            "hpcstrat, out=": (
                lambda: all_reduce("sum", own, out=total),
                lambda: total,
            ),
            "hpcstrat, allocating": (allocate, lambda: self.kept),
        }

    def by_mpi4py(self) -> dict[str, tuple[Call, Call]]:
        """Return mpi4py's calls that sum the arrays, each with the list of sums.

        Not collective.
        """
        comm, in_place = self.comm, self.mpi.IN_PLACE
        packed, packed_total = self.packed, self.packed_total

        def each() -> None:
            for own, total in zip(self.own, self.total, strict=True):
                comm.Allreduce(own, total)

        def by_way_of(all_reduce: Call, views: list[Any]) -> Call:
            def pack_and_unpack() -> None:
                for own, view in zip(self.own, self.views, strict=True):
                    np.copyto(view, own)
                all_reduce()
                for view, total in zip(views, self.total, strict=True):
                    np.copyto(total, view)

            return pack_and_unpack

        packings = {
            PACKED: by_way_of(
                lambda: comm.Allreduce(packed, packed_total), self.total_views
            ),
            "mpi4py, packed in place": by_way_of(
                lambda: comm.Allreduce(in_place, packed), self.views
            ),
            "mpi4py, packed in place, 1 MiB pieces": by_way_of(
                in_pieces(comm, in_place, packed, PIECE), self.views
            ),
        }

        def pack() -> None:
            for own, view in zip(self.own, self.views, strict=True):
                np.copyto(view, own)
            comm.Allreduce(in_place, packed)

        return {
            LEFT: (pack, lambda: self.views),
            "mpi4py, each array": (each, lambda: self.total),
            **{name: (call, lambda: self.total) for name, call in packings.items()},
        }

    def run(self, seconds: float) -> dict[str, dict[str, Any]]:
        """Check and time all alternatives for one list of arrays.

        Collective over all replicas; in replica context.

        Parameters
        ----------
        seconds : float
            Seconds of all measurements together.

        Returns
        -------
        dict of str to dict of str to ndarray of shape (rounds,)
            Seconds of each alternative, for each state of the cores, from
            `cores.by_state`.
        """
        ways = {**self.by_hpcstrat(), **self.by_mpi4py()}
        for name, (call, result) in ways.items():
            self.rewrite()
            for array in self.total:
                array.fill(0)
            call()
            for index, array in enumerate(result()):
                require_sum(f"{name}, array {index}", array, self.comm.size)
        calls = {name: call for name, (call, _) in ways.items()}
        calls[FLOOR] = lambda: np.copyto(self.packed_total, self.packed)
        times = measure_for(
            *(self.comm, self.mpi, calls, seconds),
            rewrite=self.rewrite,
            watch=self.watch,
        )
        return by_state(times, self.watch)


def measure_lists(
    strategy: hs.MultiWorkerMirroredStrategy, seconds: float
) -> dict[str, tuple[int, dict[str, dict[str, Any]]]]:
    """Measure each list of arrays, and print its times.

    Collective over all replicas; in replica context.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The replicas of this strategy take part.
    seconds : float
        Seconds for each list.

    Returns
    -------
    dict of str to tuple of int and dict
        Size in bytes and times, from `Case.run`, of each list.
    """
    topology, found = strategy.topology, {}
    watch = CoreWatch(topology.replica_comm, topology.mpi)
    for what, shapes in LISTS.items():
        case = Case(strategy, shapes, watch)
        times = case.run(seconds)
        found[what] = case.nbytes, times
        for state, by_name in times.items():
            hs.print_once(
                f"\n{what}: {len(shapes)} arrays, {case.nbytes:,} bytes; "
                f"{describe_cores(state, by_name)}; faster: than {PACKED}\n"
                + table(by_name, PACKED, FLOOR)
            )
    watch.close()
    return found


@click.command(context_settings={"show_default": True})
@click.option("--seconds", default=20.0, help="How long to measure each list.")
@device_options
@output_options
def main(device: bool, smoke: bool, results: str | None, **words: Any) -> None:
    """Measure the fused all-reduce of ResNet-50's gradients."""
    seconds, picture = words["seconds"], words["picture"]
    if device:
        bench = start(smoke, results, words)
        times = measure_device(bench, seconds if given("seconds") else DEVICE_SECONDS)
        if bench.rank == 0 and picture:
            draw_bars(picture, times, FLOOR_ON_DEVICE, f"gradients\n{bench.where()}")
        return
    strategy = hs.MultiWorkerMirroredStrategy()
    mpi = strategy.topology.mpi
    where = describe(mpi)
    hs.print_once(where)
    found = strategy.local_value(strategy.run(measure_lists, args=(strategy, seconds)))
    if strategy.replica_id:
        return
    if words["json_path"]:
        size = mpi.COMM_WORLD.size
        rows = [
            row(what, name, size, nbytes, values, cores=state)
            for what, (nbytes, times) in found.items()
            for state, by_name in times.items()
            for name, values in by_name.items()
        ]
        rounds = {
            f"{what}, {state}": len(by_name[FLOOR])
            for what, (_, times) in found.items()
            for state, by_name in times.items()
        }
        write_json(words["json_path"], mpi, rows, rounds=rounds)
    if picture:
        what, (_, times) = list(found.items())[-1]
        # Show the core state with the most rounds.
        state = max(times, key=lambda one: len(times[one][FLOOR]))
        del times[state][LATENCY]
        title = f"{what}, cores {state}\n{where}"
        draw_bars(picture, times[state], FLOOR, title)


if __name__ == "__main__":
    main()
