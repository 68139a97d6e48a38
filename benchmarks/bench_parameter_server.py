"""Functions per second of a coordinator, and what reads and updates of servers take.

Run it on three or four ranks of a quiet machine: one coordinates, one holds variables::

    mpirun -n 4 python benchmarks/bench_parameter_server.py --json served.json

Each round schedules a number of functions and joins; the figures are for one function.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import click
import numpy as np
from mpi4py import MPI
from report import row, write_json

import hpcstrat as hs

ROWS, WIDTH, ASKED = 1_000_000, 16, 1000
VECTOR = 1 << 20


@click.command()
@click.option("--rounds", default=10, help="Timed rounds, after one to warm up.")
@click.option("--servers", default=1, help="Ranks that hold variables.")
@click.option("--json", "json_path", help="File for the figures.")
def main(rounds: int, servers: int, json_path: str | None) -> None:
    """Measure functions, pull and push of 4 MiB, and rows of a table."""
    strategy = hs.ParameterServerStrategy(num_ps=servers)
    coordinator = hs.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        count = hs.Variable(0.0)
        vector = hs.Variable(np.zeros(VECTOR, np.float32))
        table = hs.Variable(
            hs.Rows(
                (ROWS, WIDTH), "float32", lambda a, b: np.zeros((b - a, WIDTH), "f4")
            )
        )
    ids = np.random.default_rng(0).integers(0, ROWS, ASKED)

    def empty() -> None:
        return

    def add() -> None:
        count.assign_add(1.0)

    def pull_and_push() -> None:
        vector.assign_add(vector.numpy())

    def some_rows() -> None:
        found = hs.embedding_lookup(table, ids)
        table.scatter_add(hs.IndexedSlices(found, ids))

    kinds: dict[str, tuple[Callable[[], None], int, int]] = {
        "empty function": (empty, 2000, 0),
        "scalar assign_add": (add, 1000, 4),
        "pull and push": (pull_and_push, 50, 8 * VECTOR),
        "rows, read and added": (some_rows, 100, 8 * ASKED * WIDTH),
    }
    ranks = 1 + servers + len(strategy.roles.workers)
    rows = []
    for what, (function, times, nbytes) in kinds.items():
        seconds = []
        for _ in range(1 + rounds):
            start = time.perf_counter()
            for _ in range(times):
                coordinator.schedule(function)
            coordinator.join()
            seconds.append((time.perf_counter() - start) / times)
        rows.append(row(what, "hpcstrat", ranks, nbytes, seconds[1:]))
        median = float(np.median(seconds[1:]))
        click.echo(f"{what:22} {1e6 * median:10.1f} us")
    if json_path:
        write_json(json_path, MPI, rows)
    strategy.close()


if __name__ == "__main__":
    main()
