"""Measure the cost of Python in ``strategy.run`` and in an all-reduce of 16 bytes.

Run it on two ranks of a quiet machine with two cores::

    mpirun -n 2 python benchmarks/bench_overhead.py --json overhead.json

Each round times mpi4py's ``Allreduce`` and hpcstrat's all_reduce in the same process.
The overhead is the median of the differences of these pairs. The time of a round is the
longest time of any rank.
"""

from __future__ import annotations

from collections.abc import Callable

import click
import numpy as np
from report import row, write_json
from timing import measure

import hpcstrat as hs


@click.command()
@click.option("--rounds", default=5000, help="Timed rounds, after a tenth to warm up.")
@click.option("--json", "json_path", help="File for the figures.")
def main(rounds: int, json_path: str | None) -> None:
    """Measure the overhead of the library's calls."""
    strategy = hs.MirroredStrategy()
    topology = strategy.topology
    comm, mpi = topology.replica_comm, topology.mpi
    own, total = np.ones(4, np.float32), np.empty(4, np.float32)

    def empty() -> None:
        return

    def step() -> np.ndarray:
        return hs.get_replica_context().all_reduce("sum", own)

    impls: dict[str, Callable[[], object]] = {
        "mpi4py Allreduce": lambda: comm.Allreduce(own, total),
        "hpcstrat run + all_reduce": lambda: strategy.run(step),
        "hpcstrat reduce": lambda: strategy.reduce("sum", own),
        "hpcstrat header (barrier)": strategy.barrier,
        "hpcstrat run of an empty function": lambda: strategy.run(empty),
    }
    times = measure(comm, mpi, impls, rounds, rounds // 10)
    if topology.replica_id:
        return
    rows = [
        row(name, name.split()[0], comm.size, 16, values)
        for name, values in times.items()
    ]
    base = times["mpi4py Allreduce"]
    above = {
        name: float(np.median(times[name] - base))
        for name in ("hpcstrat run + all_reduce", "hpcstrat reduce")
    }
    for line in rows:
        seconds = line["seconds"]
        print(
            f"{line['what']:36} min {seconds['min'] * 1e6:7.2f} us   median "
            f"{seconds['median'] * 1e6:7.2f} us   max {seconds['max'] * 1e6:9.2f} us"
        )
    for name, seconds in above.items():
        print(f"{name}: {seconds * 1e6:.2f} us above mpi4py, median of pairs")
    if json_path:
        write_json(json_path, mpi, rows, seconds_above_mpi4py=above)


if __name__ == "__main__":
    main()
