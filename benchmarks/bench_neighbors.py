"""Measure how ranks and other programs of a machine slow each other down.

Run it with as many ranks as the machine has cores::

    mpirun --bind-to none -n 2 python benchmarks/bench_neighbors.py --json FILE

Single-threaded programs run at the same time as the ranks, and compute all the time.
Each turn makes the same steps: with hpcstrat; with hpcstrat's former rule, by which
each waiting rank polled for one millisecond; or with mpi4py's ``Allreduce``. The steps
of a turn are:

* ``steps``: all ranks compute 0.3 ms, then add 16 KiB;
* ``large``: all ranks add 4 MiB;
* ``late``: the first rank computes 10 ms while the others wait; all add 16 KiB.

The results are the seconds of the steps, the CPU seconds of the ranks, and the share of
a core that each neighbor had.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from report import row, write_json

import hpcstrat as hs

NEIGHBOR = """
import mmap, os, struct, sys, time
path, index, parent = sys.argv[1], int(sys.argv[2]), os.getppid()
with open(path, "r+b") as file:
    page = mmap.mmap(file.fileno(), 0)
end = time.monotonic() + 1800
while os.getppid() == parent and time.monotonic() < end:
    for _ in range(20_000):
        pass
    # The time that it has computed.
    struct.pack_into("=d", page, 8 * index, time.process_time())
"""
STEPS = {"steps": 200, "large": 30, "late": 15}


class Neighbors:
    """Programs on the first rank's host that compute until the end of a block."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self._file.write(bytes(mmap.PAGESIZE))
        self._file.flush()
        self._page = mmap.mmap(self._file.fileno(), 0)
        self._programs: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Neighbors:
        for index in range(self.count):
            command = [sys.executable, "-c", NEIGHBOR, self._file.name, str(index)]
            self._programs.append(subprocess.Popen(command))
        while not all(self._seconds()):
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        for program in self._programs:
            program.kill()
            program.wait()

    def _seconds(self) -> tuple[float, ...]:
        return struct.unpack_from(f"={self.count}d", self._page)

    def seconds(self) -> float:
        """Return the CPU seconds of all neighbors together."""
        return sum(self._seconds())


def compute(count: int) -> None:
    """Keep a core busy."""
    for _ in range(count):
        pass


def count_of(seconds: float) -> int:
    """Return the count for which `compute` takes some seconds."""
    fastest = 1.0
    for _ in range(20):
        start = time.perf_counter()
        compute(20_000)
        fastest = min(fastest, time.perf_counter() - start)
    return int(20_000 * seconds / fastest)


def turn(
    comm: Any, steps: int, step: Callable[[], object], neighbors: Neighbors
) -> tuple[float, float, float]:
    """Run a turn; return its seconds, and the CPU seconds of ranks and of neighbors."""
    comm.Barrier()
    start, own, theirs = time.perf_counter(), time.process_time(), neighbors.seconds()
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - start
    own, theirs = time.process_time() - own, neighbors.seconds() - theirs
    return comm.bcast(seconds), comm.allreduce(own), comm.bcast(theirs)


class FixedSpin:
    """The former rule of waiting: poll for one millisecond, then sleep."""

    seconds = 1e-3

    def learn(self, waited_seconds: float) -> None:
        """Ignore how long a rank waited."""


def ways_of(strategy: Any) -> dict[str, Callable[[Any, Any], object]]:
    """Return the alternatives that sum arrays: functions by name."""
    comm, mpi = strategy.topology.replica_comm, strategy.topology.mpi
    waiter = strategy.collectives.channel.waiter
    learning, fixed = waiter._spin, FixedSpin()

    def reduce(spin: Any, own: Any, out: Any) -> None:
        waiter._spin = spin
        strategy.reduce("sum", own, out=out)

    return {
        "hpcstrat": functools.partial(reduce, learning),
        "spin of 1 ms": functools.partial(reduce, fixed),
        "mpi4py": lambda own, out: comm.Allreduce(own, out, op=mpi.SUM),
    }


def line_of(what: str, way: str, count: int, comm: Any, figures: Any) -> dict[str, Any]:
    """Summarize the turns of one way, and print them."""
    name = what.partition(" ")[0]
    seconds, own, theirs = np.transpose(figures)
    shares = theirs / seconds / max(count, 1)
    line = row(what, way, comm.size, 0, seconds / STEPS[name])
    line["cores"] = float(np.median(own / seconds))
    line["neighbor_cores"] = float(np.median(shares))
    if not comm.rank:
        times = line["seconds"]
        print(
            f"{what:16} {way:13} ms a step: min {times['min'] * 1e3:7.3f}  median "
            f"{times['median'] * 1e3:7.3f}  max {times['max'] * 1e3:7.3f}   cores "
            f"{line['cores']:4.2f}   of each neighbor {line['neighbor_cores']:4.2f}",
            flush=True,
        )
    return line


@click.command()
@click.option("--turns", default=9, help="Turns of each way.")
@click.option("--neighbors", "counts", default="0,1,2,4", help="How many, in order.")
@click.option("--what", default=",".join(STEPS), help="Which steps.")
@click.option("--json", "json_path", help="File for the figures.")
def main(turns: int, counts: str, what: str, json_path: str | None) -> None:
    """Measure ranks beside other programs."""
    strategy = hs.MirroredStrategy()
    comm, first = strategy.topology.replica_comm, not strategy.replica_id
    short, long = (comm.bcast(count_of(seconds)) for seconds in (3e-4, 1e-2))
    work = {"steps": short, "large": 0, "late": long if first else 0}
    ways, rows = ways_of(strategy), []

    def step(name: str, way: str, own: Any, out: Any) -> None:
        compute(work[name])
        ways[way](own, out)

    for count in map(int, counts.split(",")):
        with Neighbors(count if first else 0) as neighbors:
            for name in what.split(","):
                own = np.ones(1 << (20 if name == "large" else 12), np.float32)
                out, found = np.empty_like(own), {way: [] for way in ways}
                # Drop the first turn of each alternative as warm-up.
                for _, way in itertools.product(range(turns + 1), ways):
                    call = functools.partial(step, name, way, own, out)
                    found[way].append(turn(comm, STEPS[name], call, neighbors))
                rows += [
                    line_of(f"{name} beside {count}", way, count, comm, figures[1:])
                    for way, figures in found.items()
                ]
    if first and json_path:
        write_json(json_path, strategy.topology.mpi, rows)


if __name__ == "__main__":
    main()
