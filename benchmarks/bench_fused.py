"""The gradients of ResNet-50 in one call: 161 arrays, 25.6 million float32.

Run it on two ranks of a quiet machine with two cores::

    mpirun -n 2 python benchmarks/bench_fused.py --json FILE --picture FILE

Compared are hpcstrat's ``all_reduce`` of the list of arrays (in place, into ``out=``,
and with a result that the next one replaces, as in a training loop), mpi4py's
``Allreduce`` of each array, the same of one buffer that the arrays are copied into and
out of, whole and in pieces of 1 MiB, and a copy of as many bytes by all ranks at once.
Each sum is checked before it is timed; ``timing.py`` says how times are taken. With
``--device`` the arrays are on GPUs: see ``device_fused.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from buffers import fill, in_pieces, require_sum
from device_fused import SECONDS as DEVICE_SECONDS
from device_fused import measure_device
from device_ways import FLOOR as FLOOR_ON_DEVICE
from devices import device_options, given, start
from report import describe, draw_bars, output_options, row, table, write_json
from timing import measure_for

import hpcstrat as hs
from hpcstrat.bench.shapes import resnet50_shapes

PIECE = 1 << 20
PACKED = "mpi4py, packed"
FLOOR = "memcpy"

Call = Callable[[], object]


class Case:
    """The gradients of one step, and the ways to sum them.

    Parameters
    ----------
    strategy : hpcstrat strategy
        Over which replicas; the case is used in its replica context.
    """

    def __init__(self, strategy: hs.MultiWorkerMirroredStrategy):
        self.comm = strategy.topology.replica_comm
        self.mpi = strategy.topology.mpi
        shapes = resnet50_shapes()
        self.own, self.total, self.inplace = (
            [np.empty(shape, np.float32) for shape in shapes] for _ in range(3)
        )
        self.kept: list[Any] = []
        self.packed, self.packed_total = (
            np.empty(sum(map(math.prod, shapes)), np.float32) for _ in range(2)
        )
        ends = np.cumsum([array.size for array in self.own])[:-1]
        self.views, self.total_views = (
            [
                part.reshape(shape)
                for part, shape in zip(np.split(flat, ends), shapes, strict=True)
            ]
            for flat in (self.packed, self.packed_total)
        )
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together."""
        return int(self.packed.nbytes)

    def clear(self) -> None:
        """Write zeros, which touches all pages, and can be summed in place for ever.

        Not collective.
        """
        for array in [*self.own, *self.total, *self.inplace]:
            array.fill(0)
        self.packed.fill(0)
        self.packed_total.fill(0)

    def by_hpcstrat(self) -> dict[str, tuple[Call, Call]]:
        """Return hpcstrat's ways to sum: how, and where the sums are then.

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
        """Return mpi4py's ways to sum: how, and where the sums are then.

        Not collective.
        """
        comm, in_place = self.comm, self.mpi.IN_PLACE
        packed, packed_total = self.packed, self.packed_total

        def each() -> None:
            for own, total in zip(self.own, self.total, strict=True):
                comm.Allreduce(own, total)

        def each_in_place() -> None:
            for array in self.inplace:
                comm.Allreduce(in_place, array)

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
        return {
            "mpi4py, each array": (each, lambda: self.total),
            "mpi4py, each array in place": (each_in_place, lambda: self.inplace),
            **{name: (call, lambda: self.total) for name, call in packings.items()},
        }

    def run(self, seconds: float) -> dict[str, Any]:
        """Check and time everything.

        Collective over all replicas; in replica context.

        Parameters
        ----------
        seconds : float
            For how long.

        Returns
        -------
        dict of str to ndarray of shape (rounds,)
            From `timing.measure`.
        """
        ways = {**self.by_hpcstrat(), **self.by_mpi4py()}
        for name, (call, result) in ways.items():
            for array in [*self.own, *self.inplace]:
                fill(array, self.comm.rank)
            for array in self.total:
                array.fill(0)
            call()
            for index, array in enumerate(result()):
                require_sum(f"{name}, array {index}", array, self.comm.size)
        self.clear()
        calls = {name: call for name, (call, _) in ways.items()}
        calls[FLOOR] = lambda: np.copyto(self.packed_total, self.packed)
        return measure_for(self.comm, self.mpi, calls, seconds)


@click.command(context_settings={"show_default": True})
@click.option("--seconds", default=30.0, help="How long to measure.")
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
    case = Case(strategy)
    what = "gradients of ResNet-50"
    where = describe(mpi)
    times = strategy.local_value(strategy.run(case.run, args=(seconds,)))
    if strategy.topology.replica_id:
        return
    print(
        f"{what}: {len(case.own)} arrays, {case.nbytes:,} bytes; {where}\n"
        f"{len(times[FLOOR])} rounds; faster: than {PACKED}\n"
        + table(times, PACKED, FLOOR)
    )
    if words["json_path"]:
        size = mpi.COMM_WORLD.size
        rows = [
            row(what, name, size, case.nbytes, values) for name, values in times.items()
        ]
        write_json(words["json_path"], mpi, rows, rounds=len(times[FLOOR]))
    if picture:
        draw_bars(picture, times, FLOOR, f"{what}\n{where}")


if __name__ == "__main__":
    main()
