"""The pictures of a report, drawn by matplotlib without a display."""

from __future__ import annotations

import importlib.util
import io
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.tools.bench.analysis import Point, Report, Series
from hpcstrat.tools.bench.run_file import BenchError
from hpcstrat.tools.bench.shapes import size_text

__all__ = ["draw", "rate", "require_matplotlib", "save"]

# Okabe and Ito's palette, whose colors color-blind readers can distinguish.
_BLUE, _ORANGE, _GREEN, _PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
_RED, _SKY, _GRAY = "#d55e00", "#56b4e9", "#8a8a8a"
_COLORS = {"weak": _BLUE, "strong": _RED}
_LINES = (_BLUE, _RED, _GREEN, _ORANGE, _PURPLE, _SKY, "black")
_SHARES = (
    ("computing and the rest", _SKY),
    ("input", _GREEN),
    ("communication", _BLUE),
    ("waiting for late replicas", _ORANGE),
)
_STYLE = {
    "axes.edgecolor": "#bbbbbb",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "font.size": 10,
    "grid.alpha": 0.35,
    "legend.frameon": False,
    # A fixed salt, so that the same figures result in the same bytes.
    "svg.hashsalt": "hpcstrat",
}


def require_matplotlib() -> None:
    """Raise BenchError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError(
            "expected matplotlib, which draws pictures, found none; install "
            "hpcstrat with its extra plot, or pip install matplotlib"
        )


def draw(report: Report) -> dict[str, Any]:
    """Draw the pictures for which a report has data; return them by name."""
    import matplotlib as mpl

    found = {}
    with mpl.rc_context(_STYLE):
        if steps := report.of("step"):
            found["scaling"] = _draw_steps(steps)
            if any(series.observed for series in steps):
                found["shares"] = _draw_shares(steps)
        if sums := [s for s in report.of("all_reduce") if _several(s)]:
            found["all_reduce"] = _draw_sums(sums)
        files = [s for name in ("save", "restore", "input") for s in report.of(name)]
        if files:
            found["rates"] = _draw_rates(files)
    return found


def save(figure: Any, form: str) -> bytes:
    """Return the bytes of a figure as ``svg`` or ``png``."""
    import matplotlib as mpl

    stream = io.BytesIO()
    # Set the style here, too, because writing a figure uses the salt and the fonts.
    with mpl.rc_context(_STYLE):
        # Omit the date, which would change the bytes of an identical picture.
        more = {"metadata": {"Date": None}} if form == "svg" else {"dpi": 150}
        figure.savefig(stream, format=form, **more)
    return stream.getvalue()


def _several(series: Series) -> bool:
    return any(point.run.num_replicas > 1 for point in series.points)


def _sizes(series: Sequence[Series]) -> list[Point]:
    """Return one point of each run that is in the series, smallest run first."""
    found: dict[str, Point] = {}
    for point in (point for line in series for point in line.points):
        found.setdefault(point.run.layout, point)
    return sorted(found.values(), key=_order)


def _order(point: Point) -> tuple[int, int]:
    return point.run.num_replicas, point.run.num_workers


def _replica_axis(axes: Any, series: Sequence[Series]) -> None:
    """Label the axis of replica counts, and shade the counts that share cores."""
    counts = sorted({point.run.num_replicas for point in _sizes(series)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    # Extend the axis on both sides, so that a single size is visible, too.
    axes.set_xlim(counts[0] / 1.25, counts[-1] * 1.25)
    axes.set_xlabel("replicas")
    shared = [
        point.run.num_replicas
        for point in _sizes(series)
        if point.run.cores_per_rank < 1
    ]
    if shared:
        fewer = [count for count in counts if count < min(shared)]
        start = (min(shared) * fewer[-1]) ** 0.5 if fewer else counts[0] / 1.25
        axes.axvspan(start, counts[-1] * 1.25, color="#f1ece0", zorder=-1, lw=0)
        axes.annotate(
            "cores per rank < 1",
            (start, 0.015),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8,
            color="#806f45",
        )


def _label(series: Series, among: Sequence[Series]) -> str:
    """Return the label of a line, with parameters if other lines have the same name."""
    alike = [s for s in among if (s.name, s.scaling) == (series.name, series.scaling)]
    words = series.scaling if series.name == "step" else series.name
    if len(alike) == 1:
        return words
    names = [
        name
        for name, value in series.parameters.items()
        if any(other.parameters.get(name) != value for other in alike)
    ]
    return f"{words}, " + ", ".join(f"{n} {series.parameters[n]}" for n in names)


def _draw_steps(steps: Sequence[Series]) -> Any:
    # Do not use pyplot, which keeps every figure and may look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    speed, share = figure.subplots(1, 2)
    counts = [point.run.num_replicas for point in _sizes(steps)]
    ideal = {"color": _GRAY, "linewidth": 1, "linestyle": ":"}
    # The ideal line is relative to the smallest run, whose efficiency is set to 1.
    speed.plot([counts[0], counts[-1]], [counts[0], counts[-1]], **ideal, label="ideal")
    share.axhline(100, **ideal)
    order = ["ideal"]
    for number, series in enumerate(steps):
        # Lines of the same scaling, but with other parameters, get other colors.
        color = _COLORS[series.scaling] if number < 2 else _LINES[number % len(_LINES)]
        label = _label(series, steps)
        order += [label, f"{label}, expected"]
        _draw_line(speed, series, label, color, "speed_up")
        _draw_line(share, series, label, color, "efficiency")
    speed.set_yscale("log", base=2)
    low, _ = speed.get_ylim()
    ticks = [tick for tick in (0.125, 0.25, 0.5) if tick >= low]
    ticks += sorted(set(counts))
    speed.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    speed.minorticks_off()
    speed.set_title("speed-up of a training step")
    share.set_title("efficiency, with 95% intervals")
    share.set_ylabel("%")
    _, top = share.get_ylim()
    # Begin at 0, to compare heights. Caches allow efficiencies above 100%.
    share.set_ylim(0, max(top, 108))
    for axes in (speed, share):
        _replica_axis(axes, steps)
    figure.legend(*_legend(speed, order), loc="outside lower center", ncols=6)
    return figure


def _legend(axes: Any, order: Sequence[str] = ()) -> tuple[list[Any], list[str]]:
    handles, labels = axes.get_legend_handles_labels()
    chosen = dict(zip(labels, handles, strict=True))
    names = [name for name in order if name in chosen] or list(chosen)
    return [chosen[name] for name in names], names


def _draw_line(axes: Any, series: Series, label: str, color: str, what: str) -> None:
    """Draw the measured points of a series with intervals, and its expected points."""
    places = [point.run.num_replicas for point in series.points]
    factor = 100 if what == "efficiency" else 1
    values = np.array([getattr(point, what) for point in series.points])
    # ``low`` and ``high`` are efficiencies: scale them if a speed-up is drawn.
    scale = np.array([getattr(p, what) / p.efficiency for p in series.points])
    low = np.array([point.low for point in series.points]) * scale
    high = np.array([point.high for point in series.points]) * scale
    # A bar has no length if the end of the interval is on the wrong side of the median.
    spread = np.maximum([values - low, high - values], 0) * factor
    axes.errorbar(
        places,
        values * factor,
        spread,
        color=color,
        marker="o",
        markersize=5,
        capsize=4,
        linewidth=1.8,
        label=label,
    )
    told = [p for p in series.points if p.expected_efficiency is not None]
    if told:
        wanted = [
            (p.expected_efficiency or 0) * (getattr(p, what) / p.efficiency) * factor
            for p in told
        ]
        axes.plot(
            [p.run.num_replicas for p in told],
            wanted,
            linestyle="none",
            marker="D",
            markersize=8,
            markerfacecolor="none",
            color=color,
            label=f"{label}, expected",
        )


def _draw_shares(steps: Sequence[Series]) -> Any:
    from matplotlib.figure import Figure

    shown = [series for series in steps if series.observed]
    rows = max(len(series.points) for series in shown)
    figure = Figure(figsize=(10, 1.7 + 0.42 * rows), layout="constrained")
    every = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, series in zip(every, shown, strict=True):
        _draw_bars(axes, series)
        axes.set_title(f"where a step's time goes: {_label(series, steps)}")
    figure.legend(*_legend(every[0]), loc="outside lower center", ncols=4)
    return figure


def _draw_bars(axes: Any, series: Series) -> None:
    places = np.arange(len(series.points))
    left = np.zeros(len(places))
    for name, color in _SHARES:
        widths = 100 * np.array([_share(point, name) for point in series.points])
        # Draw the bars above the lines of the grid.
        look = {"color": color, "height": 0.7, "zorder": 2}
        bars = axes.barh(places, widths, left=left, label=name, **look)
        # Omit the number in a bar that is too narrow for it.
        words = [f"{width:.0f}" if width >= 5 else "" for width in widths]
        ink = "white" if color == _BLUE else "black"
        axes.bar_label(bars, words, label_type="center", fontsize=9, color=ink)
        left += widths
    axes.set_yticks(places, [point.run.layout for point in series.points])
    axes.invert_yaxis()
    axes.set_ylabel("replicas")
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the replicas' time")
    axes.grid(visible=False, axis="y")


def _share(point: Point, name: str) -> float:
    known = {
        "input": point.input or 0.0,
        "communication": point.communication or 0.0,
        "waiting for late replicas": point.late or 0.0,
    }
    return known.get(name, 1.0 - sum(known.values()))


def _draw_sums(sums: Sequence[Series]) -> Any:
    """Draw the time of an all-reduce by size, with one line for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    axes = figure.subplots()
    points = [point for point in _sizes(sums) if point.run.num_replicas > 1]
    # Repeat the colors if there are more runs than colors, so that no run is missing.
    for color, chosen in zip(itertools.cycle(_LINES), points, strict=False):
        lines: list[tuple[int, Point]] = [
            (series.parameters["nbytes"], point)
            for series in sums
            for point in series.points
            if point.run is chosen.run
        ]
        sizes = [nbytes for nbytes, _ in lines]
        medians = np.array([point.median for _, point in lines])
        ends = np.array([point.quartiles for _, point in lines]).T
        label = f"{chosen.run.layout} replicas"
        axes.plot(sizes, medians, color=color, marker="o", markersize=4, label=label)
        axes.fill_between(sizes, *ends, color=color, alpha=0.18, linewidth=0)
        told = [(n, p.expected_seconds) for n, p in lines if p.expected_seconds]
        if told:
            axes.plot(
                *zip(*told, strict=True), color=color, linestyle="--", linewidth=1
            )
    axes.plot([], [], color=_GRAY, linestyle="--", linewidth=1, label="expected")
    sizes = sorted({series.parameters["nbytes"] for series in sums})
    axes.set(xscale="log", yscale="log", title="all-reduce: median time and quartiles")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_text(n) for n in sizes], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set(xlabel="size of each replica's array", ylabel="seconds")
    axes.legend(loc="upper left")
    return figure


def _draw_rates(files: Sequence[Series]) -> Any:
    from matplotlib.figure import Figure

    kinds = dict.fromkeys(_kind(series) for series in files)
    figure = Figure(figsize=(10, 4.0), layout="constrained")
    every = figure.subplots(1, len(kinds), squeeze=False)[0]
    places_of = dict(zip(kinds, every, strict=True))
    for number, series in enumerate(files):
        axes = places_of[_kind(series)]
        label = series.scaling if series.name == "input" else _label(series, files)
        places = [point.run.num_replicas for point in series.points]
        rates = np.array([rate(point) for point in series.points]) / 1e9
        # The lower and upper quartiles of the times.
        ends = np.array([point.quartiles for point in series.points]).T
        medians = np.array([point.median for point in series.points])
        # Exchange the two ends, because the longest times are the lowest rates.
        spread = np.abs(rates * medians / ends[::-1] - rates)
        color = _LINES[number % len(_LINES)]
        axes.errorbar(
            places, rates, spread, color=color, marker="o", capsize=4, label=label
        )
    for name, axes in places_of.items():
        axes.set_title(f"{name}: all replicas together, with quartiles")
        axes.set_ylabel("GB/s")
        _replica_axis(axes, [series for series in files if _kind(series) == name])
        axes.set_ylim(bottom=0)
        axes.legend(loc="best")
    return figure


def _kind(series: Series) -> str:
    return "input" if series.name == "input" else "checkpoint"


def rate(point: Point) -> float:
    """Return the bytes per second that all replicas together write or read."""
    parameters = point.part.parameters
    if point.part.name == "input":
        return float(point.part.batch_size * parameters["row_bytes"] / point.median)
    return float(parameters["nbytes"] / point.median)
