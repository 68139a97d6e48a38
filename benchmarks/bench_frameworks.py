"""Measure the cost of training models of PyTorch, JAX and Keras on several ranks.

Run one job per framework, on two ranks of a quiet machine with two cores, one thread
each::

    export OMP_NUM_THREADS=1
    mpirun -n 2 python benchmarks/bench_frameworks.py torch --json torch.json
    mpirun -n 2 python benchmarks/bench_frameworks.py jax --json jax.json
    export KERAS_BACKEND=torch  # or jax, or tensorflow
    mpirun -n 2 python benchmarks/bench_frameworks.py keras --json keras.json
    python benchmarks/frameworks_picture.py torch.json jax.json keras.json PICTURE

As root, with ``--hosts 2``, the program makes pretend hosts by
``tests/cluster/hosts_up.sh``, and starts the ranks there; then it needs no launcher.

The rivals do the same training step, in turn, in the same processes: one without
communication, and one for each installed way to average gradients. The cost of a way is
the median of its time minus the time of the step without communication in the same
round, see ``paired.py``. Before the measurement, each rival makes some steps from the
same parameters, on batches that differ between ranks, and all rivals must reach the
same weights. The models are defined in ``torch_models.py``; the multi-layer perceptron
is also measured in JAX and Keras.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Any

import click
import numpy as np
from gloo import start_gloo
from on_hosts import on_hosts
from paired import CLEAN, Samples, cost, measure_paired
from report import describe, write_json

import hpcstrat as hs

BASE = "none"
FRAMEWORKS = {
    "torch": ("mlp", "resnet18", "transformer"),
    "jax": ("mlp",),
    "keras": ("mlp",),
}
# The alternative with which only weights are compared, not times.
CHECK = "one process"
TOLERANCE = 1e-4


def require_equal(comm: Any, steps: dict[str, Any], rounds: int) -> None:
    """Raise unless all rivals that communicate have equal weights on all ranks.

    Collective over ``comm``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    steps : dict of str to step
        The steps of the rivals; each has a method ``parameters``.
    rounds : int
        How many steps to do.

    Raises
    ------
    ArithmeticError
        If weights differ.
    """
    reference: Any = None
    for name, step in steps.items():
        for _ in range(rounds):
            step()
        if name.startswith(BASE):
            continue
        weights = np.concatenate([array.ravel() for array in step.parameters()])
        if reference is None:
            reference = comm.bcast(weights)
        distance = float(np.linalg.norm(weights - reference))
        if not distance <= TOLERANCE * float(np.linalg.norm(reference)):
            raise ArithmeticError(
                f"expected the same weights after {rounds} steps of all ways, found "
                f"a distance of {distance:.3g} with {name!r}; do not use the times"
            )


def table(samples: dict[str, Samples]) -> str:
    """Return the measured times as aligned lines; not collective."""
    lines = [f"{'':24}{'ms a step':>10}{'above none':>12}{'quartiles':>16}{'pairs':>7}"]
    for name, found in samples.items():
        above = {key: 1e3 * v for key, v in cost(samples, name, BASE).items()}
        median = 1e3 * found.median
        words = f"{above['lower']:+.1f} to {above['upper']:+.1f}"
        lines.append(
            f"{name:24}{median:10.1f}{above['median']:+12.1f}{words:>16}"
            f"{above['pairs'] / 1e3:7.0f}"
        )
    foreign = np.concatenate([found.foreign for found in samples.values()])
    share = float((foreign < CLEAN).mean())
    lines.append(
        f"others used {100 * float(np.median(foreign)):.0f}% of the machine in the "
        f"median step, and less than {100 * CLEAN:.0f}% in {100 * share:.0f}% of them, "
        "which count"
    )
    return "\n".join(lines)


def rows_of(what: str, model: str, samples: dict[str, Samples]) -> list[dict[str, Any]]:
    """Return the measured times as rows for the JSON file; not collective."""
    return [
        {
            "what": what,
            "model": model,
            "impl": name,
            "rounds": len(found.seconds),
            "clean_rounds": int(found.clean.sum()),
            "foreign_share": float(np.median(found.foreign)),
            "seconds": found.median,
            "seconds_above_none": cost(samples, name, BASE),
        }
        for name, found in samples.items()
    ]


def prepared(strategy: Any, framework: str, options: Any) -> Any:
    """Start a framework; return a function that makes a model's rivals; collective."""
    if framework == "torch":
        interface = "lo" if strategy.topology.num_workers == 1 else "eth0"
        distributed = start_gloo(strategy, interface)
        from torch_steps import torch_steps

        own = distributed.new_group(backend="hpcstrat")
        gloo = distributed.group.WORLD
        return lambda model: torch_steps(strategy, model, gloo, own)
    if framework == "keras":
        from keras_steps import keras_steps

        return lambda _: keras_steps(strategy, CHECK)
    from jax_steps import jax_steps, start_jax_distributed

    if options["gloo"]:
        start_jax_distributed(strategy.topology.replica_comm)
    return lambda model: jax_steps(strategy, with_gloo=options["gloo"])


@click.command(context_settings={"show_default": True})
@click.argument("framework", type=click.Choice(list(FRAMEWORKS)))
@click.option("--models", help="Which, between commas.  [default: all]")
@click.option("--ways", help="Only those whose names have one of these words.")
@click.option("--seconds", default=60.0, help="How long to measure each model.")
@click.option("--rest", default=0.0, help="Seconds between rounds, for others.")
@click.option("--gloo/--no-gloo", default=True, help="Whether JAX uses its own, too.")
@click.option("--json", "json_path", help="File for the figures.")
@click.option("--hosts", "num_hosts", default=0, help="Pretend hosts of one rank each.")
@click.option("--rate", default="1gbit", help="Limit of what each of them sends.")
@click.option("--on-hosts", hidden=True, help="Set in the job itself: the command.")
def main(framework: str, models: str | None, ways: str | None, **options: Any) -> None:
    """Measure training steps of a framework."""
    if options["num_hosts"] and not options["on_hosts"]:
        sys.exit(on_hosts(options["num_hosts"], 1, options["rate"]))
    strategy = hs.MultiWorkerMirroredStrategy()
    topology = strategy.topology
    version = importlib.metadata.version(framework)
    if framework == "keras":
        version += f" on {os.environ.get('KERAS_BACKEND', 'tensorflow')}"
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    hs.print_once(
        f"{framework} {version}, {describe(topology.mpi)}; OMP_NUM_THREADS: {threads}"
    )
    make, rows = prepared(strategy, framework, options), []
    for model in models.split(",") if models else FRAMEWORKS[framework]:
        steps = make(model)
        if ways:
            words = [BASE, *ways.split(",")]
            steps = {n: s for n, s in steps.items() if any(w in n for w in words)}
        require_equal(topology.replica_comm, steps, 3)
        steps.pop(CHECK, None)
        samples = measure_paired(
            topology.replica_comm,
            topology.mpi,
            steps,
            options["seconds"],
            rest=options["rest"],
        )
        size = sum(array.size for array in steps[BASE].parameters())
        hs.print_once(f"\n{model}, {size / 1e6:.1f} million parameters")
        hs.print_once(table(samples))
        rows += rows_of(f"training step, {framework}", model, samples)
    if topology.replica_id == 0 and options["json_path"]:
        write_json(
            options["json_path"],
            topology.mpi,
            rows,
            framework=f"{framework} {version}",
            threads=threads,
            clean_below=CLEAN,
            **({"command": options["on_hosts"]} if options["on_hosts"] else {}),
        )


if __name__ == "__main__":
    main()
