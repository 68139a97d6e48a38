"""Draw the README's picture from results of bench_allreduce.py and bench_step.py.

::

    export OMP_NUM_THREADS=1
    mpirun -n 2 python benchmarks/bench_allreduce.py --json allreduce.json
    mpirun -n 2 python benchmarks/bench_step.py --json step.json
    python benchmarks/summary.py allreduce.json step.json picture.png

If PyTorch is installed, bench_allreduce.py also measures gloo.
"""

from __future__ import annotations

import json
from typing import Any

import click
from report import byte_ticks, styles

# The drawn alternatives: the simplest code with mpi4py, and MPI at its best.
_SHOWN = "hpcstrat, in place", "mpi4py, pieces in place", "torch gloo, in place"
_SHOWN_STEPS = "hpcstrat", "mpi4py, packed"
# States of the cores, and their labels.
_STATES = {"together": "cores with one cache", "apart": "cores with no cache in common"}


def medians(rows: list[dict[str, Any]], name: str, cores: str = "") -> dict[int, float]:
    """Return the median seconds of an alternative, by size in bytes.

    ``cores`` selects a state of the cores, if the rows have states.
    """
    return {
        row["nbytes"]: row["seconds"]["median"]
        for row in rows
        if row["impl"] == name and row.get("cores", cores) == cores
    }


@click.command()
@click.argument("allreduce", type=click.File())
@click.argument("step", type=click.File())
@click.argument("picture", type=click.Path(dir_okay=False))
def main(allreduce: Any, step: Any, picture: str) -> None:
    """Draw what two JSON files say side by side."""
    from matplotlib.figure import Figure

    found = [json.load(allreduce), json.load(step)]
    states = {row["cores"] for row in found[0]["rows"]}
    shown = [state for state in _STATES if state in states]
    figure = Figure(figsize=(5 + 5 * len(shown), 4.2), layout="constrained")
    *parts, steps = figure.subplots(1, len(shown) + 1)
    for axes, state in zip(parts, shown, strict=True):
        for name, style in styles(_SHOWN).items():
            times = medians(found[0]["rows"], name, state)
            axes.plot(list(times), [1e6 * value for value in times.values()], **style)
        axes.set(yscale="log", title=f"all-reduce, {_STATES[state]}")
        axes.set_ylabel("median time in us")
        byte_ticks(axes, list(medians(found[0]["rows"], _SHOWN[0], state)))
    for name, style in styles(_SHOWN_STEPS).items():
        times = medians(found[1]["rows"], name)
        steps.plot(list(times), [1e3 * value for value in times.values()], **style)
    steps.set(yscale="log", title="training step, by size of the gradients")
    steps.set_ylabel("median time in ms")
    byte_ticks(steps, list(medians(found[1]["rows"], _SHOWN_STEPS[0])))
    for axes in (*parts, steps):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    environment = found[0]["environment"]
    library = environment["versions"]["mpi"].split(",")[0]
    processor = environment["machine"]["processor"]
    figure.suptitle(f"2 ranks of one node, {processor}, {library}; lower is faster")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
