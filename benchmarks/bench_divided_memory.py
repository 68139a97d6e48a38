"""Measure the memory of a rank for a variable that the ranks of a replica divide.

Run it with any number of ranks; all of them are one replica, by default::

    for n in 1 2 4; do
        mpirun --oversubscribe -n $n python benchmarks/bench_divided_memory.py
    done

Each rank creates its part of a variable, with Adam's two slots, makes a step, saves and
restores a checkpoint. The table has the memory of the rank with the most, in MiB, more
than before the variable was created: of ``RssAnon`` plus ``RssShmem`` (proc(5)), now
and at its peak. The kernel keeps only the peak of the whole resident memory, so the
peak includes files that the process has mapped, such as libraries loaded meanwhile.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from report import parse_size, write_json

import hpcstrat as hs

COLUMNS = 4096


def memory() -> tuple[int, int]:
    """Return the bytes of this process's own and shared memory, and its peak."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    anonymous, shared, peak = (
        int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem", "VmHWM")
    )
    return anonymous + shared, peak


def resident() -> int:
    """Return the whole resident memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


class Measurement:
    """Prints by how much actions increase the memory of a rank; collective."""

    def __init__(self, strategy: hs.MultiWorkerMirroredStrategy, title: str) -> None:
        self.strategy = strategy
        self.rows: list[dict[str, object]] = []
        self._first = memory()[0]
        if strategy.writes:
            click.echo(f"{title:30} {'now':>8} {'peak':>8}")

    def add(self, name: str, action: Callable[[], object]) -> None:
        """Print the memory after an action, and its peak, of the rank with the most."""
        self.strategy.barrier()
        # This sets the peak to the present memory, see proc(5).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before, start = memory()[0], resident()
        action()
        now, peak = memory()
        own = np.array([[now - self._first, before - self._first + peak - start]])
        calls = self.strategy.all_ranks.collectives
        most = calls.all_gather(own, 0, "memory").max(axis=0) / (1 << 20)
        self.rows.append({"what": name, "MiB": most[0], "peak MiB": most[1]})
        if self.strategy.writes:
            click.echo(f"{name:30} {most[0]:8.1f} {most[1]:8.1f}")


@click.command()
@click.option("--json", "json_path", help="File for the figures.")
@click.option("--size", default="256MiB", help="Of the whole variable.")
@click.option("--axis", default=0, help="The axis of 2 that is divided.")
@click.option("--ranks-per-replica", type=int, help="Default: all ranks.")
def main(
    json_path: str | None, size: str, axis: int, ranks_per_replica: int | None
) -> None:
    """Measure, print, and write results."""
    from mpi4py import MPI

    count = ranks_per_replica or MPI.COMM_WORLD.size
    with hs.MultiWorkerMirroredStrategy(ranks_per_replica=count) as strategy:
        folder = strategy.broadcast_object(tempfile.mkdtemp())
        # Load what the steps below need, so that only arrays are measured.
        warm_up(strategy, f"{folder}/warm_up")
        title = f"{strategy.num_replicas_in_sync}x{count}, axis {axis}, MiB"
        measurement = Measurement(strategy, title)
        shape = [parse_size(size) // (8 * COLUMNS), COLUMNS]
        part = strategy.inside.part(shape[axis])
        shape[axis] = part.stop - part.start
        measure(measurement, shape, axis, f"{folder}/measured")
        strategy.barrier()
        if strategy.writes:
            shutil.rmtree(folder)
            if json_path:
                write_json(json_path, MPI, measurement.rows)


def measure(measurement: Measurement, shape: list[int], axis: int, folder: str) -> None:
    """Measure a variable whose part on this rank has this shape."""
    strategy = measurement.strategy
    made: list[object] = []

    def create() -> None:
        with strategy.scope():
            value = hs.Variable(lambda: np.zeros(shape), name="field", split=axis)
            made.extend([value, hs.optimizers.Adam(0.1)])

    def step() -> None:
        variable, optimizer = made
        optimizer.apply_gradients([(np.full(shape, 1.0), variable)])

    measurement.add("variable", create)
    measurement.add("a step, with Adam's slots", lambda: strategy.run(step))
    variable, optimizer = made
    with hs.CheckpointManager(folder, field=variable, optimizer=optimizer) as saver:
        measurement.add("save", lambda: saver.save(1))
        measurement.add("save again", lambda: saver.save(2))
        measurement.add("restore", saver.restore)


def warm_up(strategy: hs.MultiWorkerMirroredStrategy, folder: str) -> None:
    """Make a step, a save and a restore of a small variable."""
    part = strategy.inside.part(strategy.inside.size)
    with strategy.scope():
        value = np.zeros(part.stop - part.start)
        variable = hs.Variable(value, name="small", split=0)
        optimizer = hs.optimizers.Adam(0.1)

    def step() -> None:
        optimizer.apply_gradients([(np.ones(variable.shape), variable)])

    strategy.run(step)
    with hs.CheckpointManager(folder, small=variable) as saver:
        saver.save(0)
        saver.restore()


if __name__ == "__main__":
    main()
