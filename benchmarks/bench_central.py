"""Memory and time of optimizer steps, with central storage or mirrored variables.

Run it on the ranks of one quiet machine, whose shared memory holds the variables::

    mpirun -n 4 python benchmarks/bench_central.py --size 1GiB --json central.json

Each step is one step of Adam on one float32 variable. The memory figure is the sum over
all ranks, with shared memory counted once (PSS), minus the memory that the ranks used
before the variable was created. The peak includes the gradient of each rank, which is
as large as the variable. Mirrored variables need six times their size on each rank; if
that is too much, ``--kind central`` skips them. Compare the figures with those of a
single rank::

    mpirun -n 1 python benchmarks/bench_central.py --size 1GiB --kind central
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from report import describe, output_options, parse_size, row, size_text, write_json
from timing import measure

import hpcstrat as hs

KINDS: dict[str, Callable[[], Any]] = {
    "central": hs.CentralStorageStrategy,
    "mirrored": hs.MirroredStrategy,
}


def held_bytes(comm: Any) -> int:
    """Return the memory of all ranks in bytes; shared memory counts once in the sum."""
    comm.Barrier()
    own = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            own = int(line.split()[1]) << 10
    total = int(comm.allreduce(own))
    comm.Barrier()
    return total


class Training:
    """Training steps of Adam on one variable."""

    def __init__(self, kind: str, nbytes: int, comm: Any) -> None:
        self.comm, self.strategy = comm, KINDS[kind]()
        before = held_bytes(comm)
        with self.strategy.scope():
            zeros = np.broadcast_to(np.float32(0), nbytes // 4)
            self.variable = hs.Variable(zeros, name="v")
            self.optimizer = hs.optimizers.Adam()
        self.gradient: Any = np.full(self.variable.shape, 1e-3, np.float32)
        self.step()
        self.step()
        self.most = held_bytes(comm) - before
        self.gradient = None
        gc.collect()
        self.least = held_bytes(comm) - before
        self.gradient = np.full(self.variable.shape, 1e-3, np.float32)

    def step(self) -> None:
        """Make one training step."""
        pairs = [(self.gradient, self.variable)]
        self.strategy.run(self.optimizer.apply_gradients, args=(pairs,))

    def close(self) -> None:
        """Free the variable and close the strategy."""
        del self.variable, self.optimizer, self.gradient
        gc.collect()
        self.strategy.close()


@click.command()
@click.option("--size", default="256MiB", help="Of the variable.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    default=list(KINDS),
    type=click.Choice(list(KINDS)),
    help="Give it where memory is too little for both; default: both.",
)
@click.option("--rounds", default=7, help="Timed steps, after two to warm up.")
@output_options
def main(
    size: str,
    kinds: tuple[str, ...],
    rounds: int,
    json_path: str | None,
    picture: str | None,
) -> None:
    """Measure memory and time of steps."""
    comm, nbytes = MPI.COMM_WORLD, parse_size(size)
    if comm.rank == 0:
        click.echo(describe(MPI))
        click.echo(f"Adam on {size_text(nbytes)} of float32; memory of all ranks")
        click.echo(
            f"{'':10}{'step ms':>10}{'min':>10}{'max':>10}{'state':>12}{'most':>12}"
        )
    rows, times = [], {}
    for kind in kinds:
        training = Training(kind, nbytes, comm)
        found = measure(comm, MPI, {kind: training.step}, rounds, 0)[kind]
        times[kind] = found
        line = row("Adam step", kind, comm.size, nbytes, found.tolist())
        memory = {"state_bytes": training.least, "most_bytes": training.most}
        rows.append(line | memory)
        if comm.rank == 0:
            seconds = [1e3 * value for value in line["seconds"].values()]
            click.echo(
                f"{kind:10}{seconds[1]:12.2f}{seconds[0]:12.2f}{seconds[2]:12.2f}"
                f"{size_text(training.least):>12}{size_text(training.most):>12}"
            )
        training.close()
    if comm.rank == 0:
        if len(times) == len(KINDS):
            faster = np.median(times["mirrored"]) / np.median(times["central"])
            click.echo(f"the step in central storage is {faster:.2f} times as fast")
        if json_path:
            write_json(json_path, MPI, rows)
        if picture:
            from report import draw_bars

            title = f"A step of Adam on {size_text(nbytes)}, {comm.size} ranks"
            draw_bars(picture, times, kinds[-1], title)


if __name__ == "__main__":
    main()
