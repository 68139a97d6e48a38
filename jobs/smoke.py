#!/usr/bin/env python3
"""Check that the ranks of a job form one strategy, and print replicas per worker.

Collective over all ranks of the job. The exit code is 1 if the number of ranks is
wrong. For example, a wrong ``srun --mpi`` starts a separate job with one rank for each
task.
"""

from __future__ import annotations

import sys

import click
import numpy as np

import hpcstrat as hs


@click.command()
@click.option("--expect", type=click.IntRange(min=1), help="Number of replicas.")
def main(expect: int | None) -> None:
    """Check that all ranks form one strategy, and print the replicas per worker."""
    try:
        strategy = hs.MultiWorkerMirroredStrategy()
    except hs.TopologyError as exc:
        sys.exit(str(exc))
    with strategy:
        topology = strategy.topology
        found = strategy.num_replicas_in_sync
        if expect is not None and found != expect:
            sys.exit(
                f"expected {expect} replicas, found {found}; launch with the --mpi of "
                "this MPI library (`srun --mpi=list`), or with its own mpirun"
            )
        here = np.array([topology.worker_id])
        workers = np.bincount(np.asarray(strategy.gather(here, axis=0)))
        total = int(strategy.reduce("sum", topology.replica_id + 1, axis=None))
        if total != found * (found + 1) // 2:
            sys.exit(f"expected the sum {found * (found + 1) // 2}, found {total}")
        hs.print_once(
            f"replicas: {found}, workers: {workers.size}, replicas per worker:",
            *workers,
        )


if __name__ == "__main__":
    main()
