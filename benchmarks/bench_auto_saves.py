"""The wall time of a training with ``every="auto"``, by that of one without saves.

Run it on two ranks, on an otherwise idle machine::

    mpirun --bind-to core -n 2 python benchmarks/bench_auto_saves.py 512MiB --folder DIR

All of the state changes in each step. A round has two blocks of equal steps, in
alternating order: one with a save after its first step, which is written in the
background during the block, and one without. The difference of their times is what a
save costs. The result is this cost divided by the interval that the manager chooses
from its own measurement of the cost, in a run without losses so far. With ``--memory``,
each save also makes a snapshot in the memory of the nodes.
"""

from __future__ import annotations

import shutil
import time

import click
import numpy as np
from report import parse_size

import hpcstrat as hs
from hpcstrat.checkpoint.interval import best_seconds, mean_seconds_between_losses

NUM_VARIABLES = 16


@click.command()
@click.argument("state", default="64MiB")
@click.option("--rounds", default=6, help="Number of rounds.")
@click.option("--seconds", default=6.0, help="Time of a block.")
@click.option("--folder", required=True, help="Folder for the checkpoints, new.")
@click.option("--memory", is_flag=True, help="Also keep snapshots in memory.")
def main(state: str, rounds: int, seconds: float, folder: str, memory: bool) -> None:
    """Measure saves of a STATE of this size."""
    with hs.MultiWorkerMirroredStrategy() as strategy:
        size = parse_size(state) // NUM_VARIABLES // 4
        with strategy.scope():
            weights = [
                hs.Variable(np.ones(size, np.float32)) for _ in range(NUM_VARIABLES)
            ]
        options = hs.CheckpointOptions(every="auto", memory=memory, max_to_keep=1)
        manager = hs.CheckpointManager(folder, options=options, weights=weights)
        last = 0

        def block(num_steps: int, *, saves: bool) -> float:
            nonlocal last
            strategy.barrier()
            began = time.perf_counter()
            for number in range(num_steps):
                last += 1
                for weight in weights:
                    np.multiply(weight.component, 1.0001, out=weight.component)
                strategy.barrier()
                if saves and number == 0:
                    # A save is due in the first call after a forgotten step.
                    manager._due.saved(None)
                    manager.save_if_due(last)
            return time.perf_counter() - began

        # The first saves use new memory and files.
        for _ in range(2):
            each = block(4, saves=True) / 4
            manager.wait()
        each = block(8, saves=False) / 8
        steps = max(2, int(strategy.broadcast_object(seconds / each)))
        differences, plain = [], []
        for turn in range(rounds):
            order = (True, False) if turn % 2 else (False, True)
            times = {saves: block(steps, saves=saves) for saves in order}
            manager.wait()
            differences.append(times[True] - times[False])
            plain.append(times[False])
        cost, step = float(np.median(differences)), float(np.median(plain)) / steps
        told = manager._saver.cost_seconds
        interval = best_seconds(told, mean_seconds_between_losses(0, 0.0))
        manager.complete()
        rank = strategy.rank
        if rank == 0:
            low, high = np.percentile(differences, (25, 75))
            click.echo(
                f"{state}{' and snapshots' if memory else ''}: step {step * 1e3:.1f} "
                f"ms, a save costs {cost:.3f} s (quartiles {low:.3f} to {high:.3f}; "
                f"blocks without: {np.std(plain) / np.mean(plain):.1%} deviation), "
                f"{told:.3f} s for the manager, which saves each {interval:.1f} s: "
                f"{1 + cost / interval:.4f}"
            )
    if rank == 0:
        # All ranks have ended their waits: a rank that waits may keep the core that the
        # file system needs.
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
