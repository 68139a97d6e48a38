"""The picture of the README, of what bench_allreduce.py and bench_step.py measured.

::

    export OMP_NUM_THREADS=1
    mpirun -n 2 python benchmarks/bench_allreduce.py --hot --json allreduce.json
    mpirun -n 2 python benchmarks/bench_step.py --json step.json
    python benchmarks/summary.py allreduce.json step.json picture.png

Where PyTorch is installed, the first measures gloo, too.
"""

from __future__ import annotations

import json
from typing import Any

import click
from report import byte_ticks, styles

# Of what is measured: what one would write first.
_SHOWN = (
    ("hpcstrat, in place", "mpi4py, whole in place", "torch gloo, in place"),
    ("hpcstrat", "mpi4py, packed"),
)
_TITLES = "all-reduce of one float32 array", "training step, by size of the gradients"
_UNITS = ("us", 1e6), ("ms", 1e3)


def medians(rows: list[dict[str, Any]], name: str) -> dict[int, float]:
    """Return the median seconds of an alternative, by size in bytes."""
    return {
        row["nbytes"]: row["seconds"]["median"] for row in rows if row["impl"] == name
    }


@click.command()
@click.argument("allreduce", type=click.File())
@click.argument("step", type=click.File())
@click.argument("picture", type=click.Path(dir_okay=False))
def main(allreduce: Any, step: Any, picture: str) -> None:
    """Draw what two JSON files say side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    found = [json.load(allreduce), json.load(step)]
    for axes, measured, shown, title, (unit, scale) in zip(
        figure.subplots(1, 2), found, _SHOWN, _TITLES, _UNITS, strict=True
    ):
        for name, style in styles(shown).items():
            times = medians(measured["rows"], name)
            values = [seconds * scale for seconds in times.values()]
            axes.plot(list(times), values, **style)
        axes.set(yscale="log", title=title, ylabel=f"median time in {unit}")
        byte_ticks(axes, list(medians(measured["rows"], shown[0])))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    environment = found[0]["environment"]
    library = environment["versions"]["mpi"].split(",")[0]
    processor = environment["machine"]["processor"]
    figure.suptitle(f"2 ranks of one node, {processor}, {library}; lower is faster")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
