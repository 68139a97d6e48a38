"""Draw the results of one or several jobs of bench_frameworks.py.

::

    python benchmarks/frameworks_picture.py torch.json jax.json keras.json PICTURE
"""

from __future__ import annotations

import json
from typing import Any

import click
from report import styles

_BASE = "none"


def panels(files: tuple[Any, ...]) -> dict[str, list[dict[str, Any]]]:
    """Return the result rows of each model, keyed by framework and model."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        content = json.load(file)
        for row in content["rows"]:
            title = f"{content['framework']}, {row['model']}"
            found.setdefault(title, []).append(row)
    return found


def draw(axes: Any, title: str, rows: list[dict[str, Any]]) -> None:
    """Draw a bar with quartiles for each alternative of a model."""
    alone = next(row["seconds"] for row in rows if row["impl"] == _BASE)
    rows = [row for row in rows if not row["impl"].startswith(_BASE)]
    chosen = styles([row["impl"] for row in rows])
    for place, row in enumerate(rows):
        above = {k: 1e3 * v for k, v in row["seconds_above_none"].items()}
        color = chosen[row["impl"]]["color"]
        axes.barh(place, above["median"], color=color, height=0.6)
        ends = above["lower"], above["upper"]
        axes.plot(ends, [place, place], color="darkgray", linewidth=3)
        axes.text(
            max(above["median"], above["upper"], 0),
            place,
            f" {above['median']:+.1f} ms",
            va="center",
            fontsize="small",
        )
    axes.set_yticks(range(len(rows)), [row["impl"] for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_title(f"{title}: {1e3 * alone:.0f} ms alone", fontsize="medium")


@click.command()
@click.argument("files", type=click.File(), nargs=-1, required=True)
@click.argument("picture", type=click.Path(dir_okay=False))
def main(files: tuple[Any, ...], picture: str) -> None:
    """Draw what JSON files say, a panel for each model."""
    from matplotlib.figure import Figure

    found = panels(files)
    heights = [1 + 0.5 * len(rows) for rows in found.values()]
    figure = Figure(figsize=(8, 0.55 * sum(heights)), layout="constrained")
    places = figure.subplots(len(found), 1, height_ratios=heights, squeeze=False)
    for axes, (title, rows) in zip(places[:, 0], found.items(), strict=True):
        draw(axes, title, rows)
    places[-1, 0].set_xlabel(
        "what a step takes above one without communication, in ms; gray: quartiles"
    )
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
