"""Measure the cost of two checks: comparing copies of variables, and NaN gradients.

Run it on two ranks of a quiet machine with two cores, one thread each::

    export OMP_NUM_THREADS=1
    mpirun -n 2 python benchmarks/bench_checks.py --json FILE

Strategies with and without a check run in turn in the same process. The first part
times ``run`` of an empty function, with variables of several sizes. Each time is the
mean of 100 calls, so that the hashed slices are no longer in the nearest cache. The
second part times ``apply_gradients`` of stochastic gradient descent for small networks,
and for the arrays of ResNet-50.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import numpy as np
from report import row, write_json
from timing import measure

import hpcstrat as hs
from hpcstrat.tools.bench.shapes import resnet50_shapes

CALLS = 100
VARIABLES = {
    "1 of 1 KiB": [(256,)],
    "1 of 1 MB": [(250_000,)],
    "161 of 1 MB together": [(1552,)] * 161,
    "1 of 100 MB": [(25_000_000,)],
}


NETWORKS = {
    "2 arrays of 1 KiB": [(256,)] * 2,
    "20 arrays of 4 KiB": [(1024,)] * 20,
    "ResNet-50": resnet50_shapes(),
}


def entering(strategy: Any, shapes: list[tuple[int, ...]]) -> Callable[[], object]:
    """Return 100 calls of ``run`` with variables of some shapes."""
    with strategy.scope():
        variables = [hs.Variable(np.ones(s, np.float32), name="v") for s in shapes]

    def empty() -> None:
        return

    def call() -> object:
        for _ in range(CALLS):
            strategy.run(empty)
        return variables

    return call


def updating(strategy: Any, shapes: list[tuple[int, ...]]) -> Callable[[], object]:
    """Return a step of an optimizer for variables of some shapes."""
    with strategy.scope():
        optimizer = hs.optimizers.SGD(1e-6)
        variables = [
            hs.Variable(np.ones(shape, np.float32), name=f"v{i}")
            for i, shape in enumerate(shapes)
        ]
    pairs = [(np.full(v.shape, 1e-3, np.float32), v) for v in variables]
    return lambda: strategy.run(lambda: bool(optimizer.apply_gradients(pairs)))


@click.command()
@click.option("--rounds", default=300, help="Timed rounds, after a tenth to warm up.")
@click.option("--json", "json_path", help="File for the figures.")
def main(rounds: int, json_path: str | None) -> None:
    """Measure what the checks cost."""
    comm = hs.MirroredStrategy().topology.replica_comm

    def strategy(**settings: str) -> Any:
        return hs.MirroredStrategy(comm=comm, settings=hs.Settings(**settings))

    parts: list[tuple[str, Any, Any, dict[str, dict[str, str]], int]] = [
        (
            *("run, variables:", VARIABLES, entering),
            *({"off": {"divergence": "off"}, "rolling": {}}, CALLS),
        ),
        (
            *("apply_gradients,", NETWORKS, updating),
            *({w: {"divergence": "off", "non_finite": w} for w in ("off", "skip")}, 1),
        ),
    ]
    rows = []
    for what, cases, prepared, settings, calls in parts:
        strategies = {name: strategy(**given) for name, given in settings.items()}
        mpi = strategies["off"].topology.mpi
        for case, shapes in cases.items():
            impls = {n: prepared(s, shapes) for n, s in strategies.items()}
            few = rounds // 10 if sum(map(np.prod, shapes)) > 10**7 else rounds
            times = measure(comm, mpi, impls, few, few // 10 + 1)
            checked = next(name for name in impls if name != "off")
            more = np.median(times[checked] - times["off"]) / calls
            nbytes = 4 * int(sum(map(np.prod, shapes)))
            rows += [
                row(f"{what} {case}", name, comm.size, nbytes, values / calls)
                for name, values in times.items()
            ]
            if not comm.rank:
                least = {name: values.min() / calls for name, values in times.items()}
                print(
                    f"{what} {case:22} min: off {least['off'] * 1e6:.2f} us, {checked} "
                    f"{least[checked] * 1e6:.2f} us; more, median of pairs: "
                    f"{more * 1e6:.2f} us",
                    flush=True,
                )
    if json_path and not comm.rank:
        write_json(json_path, mpi, rows)


if __name__ == "__main__":
    main()
