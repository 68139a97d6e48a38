"""Compare Adam whose state is divided between the ranks with Adam with full state.

Run it on two ranks of a quiet machine with two cores::

    mpirun --bind-to core -n 2 python benchmarks/bench_sharded.py --json FILE

A step is ``strategy.run`` with one ``apply_gradients``, of variables of 64 MiB together
by default, with gradients that are rewritten before. The two optimizers are timed in
turn, and must reach the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import numpy as np
from report import describe, parse_size, row, size_text, write_json
from timing import measure_for

import hpcstrat as hs

NUM_VARIABLES = 8


@click.command()
@click.option("--json", "json_path", help="File for the figures.")
@click.option("--size", default="64MiB", help="Of all variables together.")
@click.option("--seconds", default=20.0, help="For all steps.")
def main(json_path: str | None, size: str, seconds: float) -> None:
    """Measure, print, and write results."""
    nbytes = parse_size(size)
    length = nbytes // NUM_VARIABLES // 4
    with hs.MultiWorkerMirroredStrategy() as strategy:
        topology = strategy.topology
        gradients = [np.zeros(length, np.float32) for _ in range(NUM_VARIABLES)]
        calls: dict[str, Callable[[], object]] = {}
        state: dict[str, Any] = {}
        for name, sharded in (("whole", False), ("sharded", True)):
            with strategy.scope():
                variables = [
                    hs.Variable(np.zeros(length, np.float32), name=f"{name}{number}")
                    for number in range(NUM_VARIABLES)
                ]
                optimizer = hs.optimizers.Adam(0.001, sharded=sharded)
            state[name] = optimizer, variables
            pairs = list(zip(gradients, variables, strict=True))

            def step(optimizer: Any = optimizer, pairs: Any = pairs) -> None:
                optimizer.apply_gradients(pairs)

            calls[name] = lambda step=step: strategy.run(step)

        def rewrite() -> None:
            for number, gradient in enumerate(gradients):
                gradient[...] = number + topology.replica_id

        comm, mpi = topology.replica_comm, topology.mpi
        times = measure_for(comm, mpi, calls, seconds, rewrite=rewrite)
        rows = []
        for name, values in times.items():
            optimizer, variables = state[name]
            slots = optimizer.checkpoint_variables().values()
            held = sum(slot.component.nbytes for slot in slots)
            rows.append(row("Adam", name, comm.size, nbytes, values, state_bytes=held))
            if comm.rank == 0:
                click.echo(
                    f"{name}: {1e3 * np.median(values):.1f} ms, state of this rank "
                    f"{size_text(held)}"
                )
        pairs = zip(state["whole"][1], state["sharded"][1], strict=True)
        assert all(np.array_equal(one.numpy(), other.numpy()) for one, other in pairs)
        if comm.rank == 0:
            ratio = np.median(times["sharded"] / times["whole"])
            click.echo(f"sharded takes {ratio:.2f} of the time; {describe(mpi)}")
            if json_path:
                write_json(json_path, mpi, rows)


if __name__ == "__main__":
    main()
