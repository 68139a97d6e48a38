"""The picture of bench_allreduce.py, and what the pictures of several have."""

from __future__ import annotations

from typing import Any

import numpy as np
from report import byte_ticks, styles

__all__ = ["draw_sizes", "save_figure"]


def draw_sizes(
    path: str, times: dict[int, dict[str, Any]], title: str, base: str
) -> None:
    """Draw times, and their ratios to those of one way.

    Not collective.

    Parameters
    ----------
    path : str
        The picture; its suffix names the format.
    times : dict of int to dict of str to ndarray of shape (rounds,)
        For each size in bytes, from `timing.measure`.
    title : str
        What was measured where.
    base : str
        That way.
    """
    from matplotlib.figure import Figure

    sizes = list(times)
    figure = Figure(figsize=(9, 9), layout="constrained")
    seconds, ratio = figure.subplots(2, 1, sharex=True)
    names = list(times[sizes[0]])
    for name, style in styles(names).items():
        medians = np.array([np.median(times[size][name]) for size in sizes])
        whole = np.array([np.median(times[size][base]) for size in sizes])
        seconds.plot(sizes, medians * 1e6, **style)
        # Slower than this is off the picture, which would else show little of the rest.
        shown = medians / whole < 30
        ratio.plot(np.array(sizes)[shown], (medians / whole)[shown], **style)
    seconds.set(yscale="log", ylabel="time of an all-reduce in us")
    ratio.set(
        yscale="log",
        xlabel="size of each rank's buffer",
        ylabel=f"time relative to {base}",
    )
    ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20]
    low, high = ratio.get_ylim()
    ticks = [tick for tick in ticks if low <= tick <= high]
    ratio.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ratio.axhline(1, color="gray", linewidth=0.8, zorder=0)
    byte_ticks(ratio, sizes)
    save_figure(path, figure, title, ncols=3)


def save_figure(path: str, figure: Any, title: str, ncols: int = 2) -> None:
    """Give a picture a title, grids and the legend of all its parts, and write it.

    Not collective.

    Parameters
    ----------
    path : str
        The picture; its suffix names the format.
    figure : matplotlib.figure.Figure
        Whose parts have the same lines.
    title : str
        What was measured where.
    ncols : int
        Columns of the legend.
    """
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    lines = figure.axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=ncols)
    figure.savefig(path, dpi=120)
