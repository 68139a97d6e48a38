"""The picture of bench_allreduce.py, and shared parts of several pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
from cores import LATENCY
from report import byte_ticks, styles

__all__ = ["draw_sizes", "save_figure"]


def draw_sizes(
    path: str,
    times: dict[int, dict[str, dict[str, Any]]],
    title: str,
    base: str,
) -> None:
    """Draw times, and ratios to one alternative's times, for each state of the cores.

    Not collective.

    Parameters
    ----------
    path : str
        The picture; its suffix names the format.
    times : dict of int to dict of str to dict of str to ndarray of shape (rounds,)
        For each size in bytes and each state, from `cores.by_state`.
    title : str
        Title with the measurement and the machine.
    base : str
        Name of the alternative for the ratios.
    """
    from matplotlib.figure import Figure

    found = [state for by_state in times.values() for state in by_state]
    states = list(dict.fromkeys(found))
    figure = Figure(figsize=(2 + 7 * len(states), 9), layout="constrained")
    columns = figure.subplots(2, len(states), sharex=True, sharey="row", squeeze=False)
    for column, state in enumerate(states):
        seconds, ratio = columns[:, column]
        sizes = [size for size, by_state in times.items() if state in by_state]
        here = {size: times[size][state] for size in sizes}
        names = [name for name in here[sizes[0]] if name != LATENCY]
        for name, style in styles(names).items():
            known = [size for size in sizes if name in here[size]]
            medians = np.array([np.median(here[size][name]) for size in known])
            whole = np.array([np.median(here[size][base]) for size in known])
            seconds.plot(known, medians * 1e6, **style)
            # Cut off slower alternatives, which would hide the differences between the
            # others.
            shown = medians / whole < 30
            ratio.plot(np.array(known)[shown], (medians / whole)[shown], **style)
        seconds.set(yscale="log", title=f"cores {state}" if state else "")
        ratio.set(yscale="log", xlabel="size of each rank's buffer")
        ratio.axhline(1, color="gray", linewidth=0.8, zorder=0)
        byte_ticks(ratio, sizes)
    ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20]
    low, high = columns[1, 0].get_ylim()
    ticks = [tick for tick in ticks if low <= tick <= high]
    columns[1, 0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    columns[0, 0].set_ylabel("time of an all-reduce in us")
    columns[1, 0].set_ylabel(f"time relative to {base}")
    save_figure(path, figure, title, ncols=3)


def save_figure(path: str, figure: Any, title: str, ncols: int = 2) -> None:
    """Add a title, grids and one legend to a picture, and write it.

    Not collective.

    Parameters
    ----------
    path : str
        The picture; its suffix names the format.
    figure : matplotlib.figure.Figure
        A figure whose axes all have the same lines.
    title : str
        Title with the measurement and the machine.
    ncols : int
        Columns of the legend.
    """
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    lines = figure.axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=ncols)
    figure.savefig(path, dpi=120)
