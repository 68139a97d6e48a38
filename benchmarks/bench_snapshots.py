"""Processor time of snapshots in the memory of nodes.

Run it on one rank, which then copies the whole state, or on several::

    mpirun -n 1 python benchmarks/bench_snapshots.py 512MiB --rounds 12

The state consists of equal variables of float32, all of which change in each step. Each
round has two blocks of equal steps, in alternating order: with snapshots, and without.
The result is the median, over rounds, of the difference of the blocks' processor times
of all threads of rank 0, divided by the snapshots and by the MiB that the rank copies.
A third block, again without snapshots, shows the noise. In a fourth block, NumPy copies
the same bytes into a file of /dev/shm, without a hash: other programs on the machine
share its memory bandwidth, and so slow down both kinds of copies. On several ranks, the
processor time of waits for other ranks is included.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time

import click
import numpy as np
from report import parse_size

import hpcstrat as hs

NAMES = ("nothing", "snapshots", "copies", "control")


class Steps:
    """Blocks of equal steps, with snapshots, with plain copies, and with neither."""

    def __init__(self, nbytes: int, num_variables: int) -> None:
        self.strategy = strategy = hs.MultiWorkerMirroredStrategy()
        size = nbytes // num_variables // 4
        with strategy.scope():
            self.weights = [
                hs.Variable(np.zeros(size, np.float32)) for _ in range(num_variables)
            ]
        options = hs.CheckpointOptions(memory=1, every=1 << 40)
        made = tempfile.mkdtemp() if strategy.rank == 0 else ""
        folder = strategy.collectives.broadcast_object(made, 0, "folder")
        self.manager = hs.CheckpointManager(
            folder, options=options, weights=self.weights
        )
        self.part = size // strategy.num_replicas_in_sync
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            os.posix_fallocate(file.fileno(), 0, 4 * self.part)
            mapped = mmap.mmap(file.fileno(), 4 * self.part)
        self.plain = np.frombuffer(mapped, np.float32)
        self.last = 0

    def block(self, name: str, num_steps: int) -> float:
        """Make the steps of a block; return this process's processor time."""
        began = time.process_time()
        for _ in range(num_steps):
            for weight in self.weights:
                weight.component[...] += 1
            if name == "snapshots":
                self.last += 1
                self.manager.save_if_due(self.last)
            elif name == "copies":
                for weight in self.weights:
                    self.plain[...] = weight.component[: self.part]
        return time.process_time() - began


@click.command()
@click.argument("state", default="64MiB")
@click.option("--rounds", default=12, help="Number of rounds.")
@click.option("--snapshots", default=4, help="Number of snapshots in a block.")
@click.option("--variables", default=8, help="Number of variables.")
def main(state: str, rounds: int, snapshots: int, variables: int) -> None:
    """Measure snapshots of a STATE of this size."""
    steps = Steps(parse_size(state), variables)
    # The first save to the disk, and the first use of both slots, are not measured.
    for _ in range(2):
        steps.block("snapshots", snapshots)
    steps.manager.wait()
    taken: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(rounds):
        order = NAMES if turn % 2 else NAMES[::-1]
        times = {name: steps.block(name, snapshots) for name in order}
        for name in NAMES:
            taken[name].append(times[name] - times["nothing"])
    steps.manager.complete()
    if steps.strategy.rank == 0:
        mib = parse_size(state) / steps.strategy.num_replicas_in_sync / 2**20
        click.echo(f"{state} on {steps.strategy.num_replicas_in_sync} ranks:")
        for name in NAMES[1:]:
            scaled = np.array(taken[name]) * 1e3 / snapshots / mib
            low, middle, high = np.percentile(scaled, (25, 50, 75))
            click.echo(
                f"{name:>10}: {middle:.3f} ms for each MiB that a rank copies "
                f"(quartiles {low:.3f} to {high:.3f})"
            )


if __name__ == "__main__":
    main()
