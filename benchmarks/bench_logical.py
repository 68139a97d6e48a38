"""Measure the cost of logical replicas: turns, sums in tree order, training steps.

Run it on two ranks of a quiet machine with two cores::

    mpirun --bind-to core -n 2 python benchmarks/bench_logical.py --json FILE

All alternatives run in one process, in turn; ``timing.py`` describes how times are
measured. Two logical replicas on two ranks are compared with the usual strategy. Eight
logical replicas, four on each rank, are compared with four steps of gradient
accumulation, because both do the same work. A step is ``strategy.run`` with one
``apply_gradients`` of arrays that are rewritten before. With PyTorch, steps of a small
network with eight logical replicas are compared with four backward passes, three of
them under ``no_sync``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from report import describe, size_text, write_json
from timing import measure_for

import hpcstrat as hs

SIZES = (20 * 64 * 4, 1 << 20, 16 << 20)
MANY = 8
EACH = MANY // 2

Steps = dict[str, Callable[[], object]]


def _strategies() -> dict[str, Any]:
    made = hs.MultiWorkerMirroredStrategy
    return {
        "usual": made(),
        "2 logical": made(logical_replicas=2),
        "8 logical": made(logical_replicas=MANY),
    }


def _arrays(nbytes: int) -> list[Any]:
    """Return 20 arrays that together have this size."""
    return [np.zeros(nbytes // 80, np.float32) for _ in range(20)]


def _training(strategies: dict[str, Any], nbytes: int) -> tuple[Steps, Any]:
    """Return steps of an optimizer, and a function that rewrites all gradients."""
    gradients = [_arrays(nbytes) for _ in range(EACH)]
    steps: Steps = {}
    for name, strategy in {**strategies, "4 accumulated": strategies["usual"]}.items():
        times = EACH if name == "4 accumulated" else 1
        with strategy.scope():
            variables = [
                hs.Variable(array, name=f"{name} {nbytes} {number}")
                for number, array in enumerate(_arrays(nbytes))
            ]
            optimizer = hs.optimizers.SGD(0.01, accumulate_steps=times)

        def step(
            strategy: Any = strategy,
            variables: Any = variables,
            optimizer: Any = optimizer,
            times: int = times,
        ) -> None:
            first = strategy.local_replicas.start
            for number in range(times):

                def replica(number: int = number) -> None:
                    context = hs.get_replica_context()
                    own = number
                    if len(strategy.local_replicas) > 1:
                        own = context.replica_id_in_sync_group - first
                    pairs = zip(gradients[own], variables, strict=True)
                    optimizer.apply_gradients(pairs)

                strategy.run(replica)

        steps[name] = step

    def rewrite() -> None:
        for array in itertools.chain.from_iterable(gradients):
            np.add(array, 1, out=array)

    return steps, rewrite


def _calls(strategies: dict[str, Any]) -> Steps:
    """Return a call of an empty ``run``, and one with an allreduce of 100 numbers."""
    values = np.ones(100, np.float32)

    def summed() -> None:
        hs.get_replica_context().all_reduce("sum", values)

    found: Steps = {}
    for name, strategy in strategies.items():
        found[f"run, {name}"] = lambda s=strategy: s.run(_nothing)
        found[f"all_reduce in run, {name}"] = lambda s=strategy: s.run(summed)
    return found


def _nothing() -> None:
    return None


def _torch_steps(strategies: dict[str, Any], batch: int) -> Steps:
    import torch

    import hpcstrat.integrations.torch as hst

    steps: Steps = {}
    rows = torch.randn(batch, 128)
    labels = torch.zeros(batch, dtype=torch.int64)
    for name in ("usual", "8 logical"):
        strategy = strategies[name]
        net = torch.nn.Sequential(
            torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
        )
        hst.replicate(net, strategy)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)

        def backward(net: Any = net) -> None:
            torch.nn.functional.cross_entropy(net(rows), labels).backward()

        def logical(
            strategy: Any = strategy,
            optimizer: Any = optimizer,
            backward: Any = backward,
        ) -> None:
            optimizer.zero_grad()
            strategy.run(backward)
            optimizer.step()

        def usual(
            net: Any = net, optimizer: Any = optimizer, backward: Any = backward
        ) -> None:
            optimizer.zero_grad()
            with hst.no_sync(net):
                for _ in range(EACH - 1):
                    backward()
            backward()
            optimizer.step()

        steps[f"torch, {name}"] = usual if name == "usual" else logical
    return steps


@click.command()
@click.option("--json", "json_path", help="File for the figures.")
@click.option("--seconds", default=5.0, help="For each comparison.")
def main(json_path: str | None, seconds: float) -> None:
    """Measure, print, and write results."""
    strategies = _strategies()
    topology = strategies["usual"].topology
    comm, mpi = topology.replica_comm, topology.mpi
    rows: list[dict[str, Any]] = []

    def measured(title: str, calls: Steps, base: dict[str, str], **more: Any) -> None:
        times = measure_for(comm, mpi, calls, seconds, **more)
        for name, values in times.items():
            other = base.get(name)
            ratio = float(np.median(values / times[other])) if other else None
            seconds_each = [float(np.percentile(values, p)) for p in (25, 50, 75)]
            rows.append(
                {
                    "of": title,
                    "name": name,
                    "seconds": seconds_each,
                    "to": other,
                    "ratio": ratio,
                }
            )
            if comm.rank == 0:
                text = f"{title}: {name} {1e6 * seconds_each[1]:.1f} us"
                more_text = f", {ratio:.2f} of {other}" if other else ""
                click.echo(text + more_text)

    base = {
        f"{call}, {name}": f"{call}, usual"
        for call in ("run", "all_reduce in run")
        for name in ("2 logical", "8 logical")
    }
    measured("calls", _calls(strategies), base)
    for nbytes in SIZES:
        steps, rewrite = _training(strategies, nbytes)
        base = {"2 logical": "usual", "8 logical": "4 accumulated"}
        title = f"step of {size_text(nbytes)}"
        measured(title, steps, base, rewrite=rewrite)
    for batch in (8, 64):
        try:
            steps = _torch_steps(strategies, batch)
        except ImportError:
            break
        measured(f"torch, batch {batch}", steps, {"torch, 8 logical": "torch, usual"})
    if comm.rank == 0:
        click.echo(describe(mpi))
        if json_path:
            write_json(json_path, mpi, rows)
    for strategy in strategies.values():
        strategy.close()


if __name__ == "__main__":
    main()
