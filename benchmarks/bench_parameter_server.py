"""Benchmark of parameter servers: functions per second, and their reads and updates.

Run it on three or four ranks of a quiet machine, which become coordinator, server and
workers::

    mpirun -n 4 python benchmarks/bench_parameter_server.py --json served.json

Each round schedules a number of functions and joins; the times are per function. With
``--tensorflow PYTHON``, the path of an interpreter with TensorFlow, TensorFlow's
strategy then does the same with as many processes. With ``--table-bytes``, the program
instead trains a table of that size, and reports the memory of each rank::

    mpirun -n 4 python bench_parameter_server.py --servers 2 --table-bytes 4GiB
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from report import parse_size, row, size_text, write_json

import hpcstrat as hs

ROWS, WIDTH, ASKED = 1_000_000, 16, 1000
VECTOR = 1 << 20
TIMES = {
    "empty function": 2000,
    "scalar assign_add": 1000,
    "pull and push": 50,
    "rows, read": 200,
    "rows, read and added": 100,
}
BYTES = {
    "scalar assign_add": 4,
    "pull and push": 8 * VECTOR,
    "rows, read": 4 * ASKED * WIDTH,
    "rows, read and added": 8 * ASKED * WIDTH,
}
TABLE_SECONDS = 20.0
# Rows per batch, in the training of a large table.
BATCH = 4096


def _zeros(start: int, stop: int) -> Any:
    return np.zeros((stop - start, WIDTH), np.float32)


def _functions() -> dict[str, Callable[[], Any]]:
    """Return the measured functions by name; called in the strategy's scope."""
    count = hs.Variable(0.0)
    vector = hs.Variable(np.zeros(VECTOR, np.float32))
    table = hs.Variable(hs.Rows((ROWS, WIDTH), "float32", _zeros))
    ids = np.random.default_rng(0).integers(0, ROWS, ASKED)

    def empty() -> None:
        return

    def add() -> None:
        count.assign_add(1.0)

    def pull_and_push() -> None:
        vector.assign_add(vector.numpy() * np.float32(0.5))

    def some_rows() -> float:
        return float(hs.embedding_lookup(table, ids)[0, 0])

    def add_rows() -> None:
        found = hs.embedding_lookup(table, ids) * np.float32(0.5)
        table.scatter_add(hs.IndexedSlices(found, ids))

    functions = (empty, add, pull_and_push, some_rows, add_rows)
    return dict(zip(TIMES, functions, strict=True))


def measured(strategy: Any, rounds: int) -> dict[str, list[float]]:
    """Return the seconds per function, for each round after the first."""
    coordinator = hs.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        functions = _functions()
    seconds: dict[str, list[float]] = {}
    for what, function in functions.items():
        for _ in range(1 + rounds):
            start = time.perf_counter()
            for _ in range(TIMES[what]):
                coordinator.schedule(function)
            coordinator.join()
            took = (time.perf_counter() - start) / TIMES[what]
            seconds.setdefault(what, []).append(took)
        del seconds[what][0]
    return seconds


def of_tensorflow(
    python: str, servers: int, workers: int, rounds: int
) -> dict[str, list[float]]:
    """Return the same times for TensorFlow's strategy, which has separate processes."""
    program = Path(__file__).with_name("tensorflow_served.py")
    wanted = {
        "servers": servers,
        "workers": workers,
        "rounds": rounds,
        "times": TIMES,
        "sizes": [ROWS, WIDTH, ASKED, VECTOR],
    }
    # Remove the variables of this job's launcher and of this package.
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    words = [python, str(program), json.dumps(wanted)]
    ended = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, list[float]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _memory() -> dict[str, int]:
    """Return the peak, private and mapped memory of this process, in bytes.

    Mapped memory of a server counts as resident, but it is no copy.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    names = {"peak": "VmHWM", "own": "RssAnon", "mapped": "RssShmem"}
    return {key: int(fields[name].split()[0]) << 10 for key, name in names.items()}


def train_table(strategy: Any, nbytes: int) -> dict[str, Any]:
    """Train a table of this size for a while; return the speed, and the memory."""
    coordinator = hs.coordinator.ClusterCoordinator(strategy)
    length = nbytes // (4 * WIDTH)
    with strategy.scope():
        table = hs.Variable(hs.Rows((length, WIDTH), "float32", _zeros), name="table")
        optimizer = hs.optimizers.SGD(1.0)

    def step(seed: int) -> None:
        ids = np.random.default_rng(seed).integers(0, length, BATCH)
        error = hs.embedding_lookup(table, ids) - 1
        gradient = hs.IndexedSlices(error / 2, ids, table.shape)
        optimizer.apply_gradients([(gradient, table)])

    start, steps = time.perf_counter(), 0
    while time.perf_counter() < start + TABLE_SECONDS:
        for _ in range(100):
            coordinator.schedule(step, (steps,))
            steps += 1
        coordinator.join()
    seconds = time.perf_counter() - start
    first = np.random.default_rng(0).integers(0, length, BATCH)
    assert (hs.embedding_lookup(table, first) > 0.4).all()
    return {"rows_per_second": steps * BATCH / seconds, "steps": steps}


@click.command()
@click.option("--rounds", default=10, help="Timed rounds, after one to warm up.")
@click.option("--servers", default=1, help="Ranks that hold variables.")
@click.option("--tensorflow", help="An interpreter that has TensorFlow, to compare.")
@click.option("--table-bytes", help="Train a table of this size instead, as 4GiB.")
@click.option("--json", "json_path", help="File for the figures.")
def main(
    rounds: int,
    servers: int,
    tensorflow: str | None,
    table_bytes: str | None,
    json_path: str | None,
) -> None:
    """Measure functions, pull and push of 4 MiB, and rows of a table."""
    nbytes = parse_size(table_bytes) if table_bytes else 0
    partitioner = hs.partitioners.FixedShardsPartitioner(servers) if nbytes else None
    if MPI.COMM_WORLD.rank:
        hs.Server(num_ps=servers).join()
        if nbytes:
            MPI.COMM_WORLD.gather(_memory())
        return
    strategy = hs.ParameterServerStrategy(None, partitioner, num_ps=servers)
    if nbytes:
        told = train_table(strategy, nbytes)
        strategy.close()
        told["memory"] = MPI.COMM_WORLD.gather(_memory())
        click.echo(
            f"{size_text(nbytes)}: {told['rows_per_second']:.0f} rows per second"
        )
        for rank, memory in enumerate(told["memory"]):
            words = (f"{key} {size_text(value)}" for key, value in memory.items())
            click.echo(f"rank {rank}: {', '.join(words)}")
        if json_path:
            write_json(json_path, MPI, [], table=told)
        return
    workers = len(strategy.roles.workers)
    found = {"hpcstrat": measured(strategy, rounds)}
    strategy.close()
    if tensorflow:
        found["tensorflow"] = of_tensorflow(tensorflow, servers, workers, rounds)
    ranks, rows = 1 + servers + workers, []
    for what in TIMES:
        medians = []
        for impl, seconds in found.items():
            rows.append(row(what, impl, ranks, BYTES.get(what, 0), seconds[what]))
            medians.append(float(np.median(seconds[what])))
        times = "".join(f"{1e6 * median:12.1f} us" for median in medians)
        faster = f"{medians[-1] / medians[0]:9.1f} x" if tensorflow else ""
        click.echo(f"{what:22}{times}{faster}")
    if json_path:
        write_json(json_path, MPI, rows)


if __name__ == "__main__":
    sys.exit(main())
