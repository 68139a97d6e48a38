"""Output of the benchmarks: figures, a description of the machine, and pictures."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

__all__ = [
    "byte_ticks",
    "describe",
    "draw_bars",
    "environment",
    "output_options",
    "parse_size",
    "row",
    "size_text",
    "styles",
    "table",
    "write_json",
]

# Each family of alternatives has a color, and its members differ by line and marker.
# The colors are from Okabe and Ito's palette for the color-blind.
_COLORS = {
    "hpcstrat": "#0072b2",
    "mpi4py": "#d55e00",
    "torch": "#009e73",
    "memcpy": "black",
}
_OWN_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_LINES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D")
_UNITS = ("B", "KiB", "MiB", "GiB")


def row(
    what: str,
    impl: str,
    ranks: int,
    nbytes: int,
    seconds: Sequence[float],
    **more: Any,
) -> dict[str, Any]:
    """Summarize the repeats of one measurement.

    Not collective.

    Parameters
    ----------
    what : str
        Name of the operation.
    impl : str
        Name of the implementation.
    ranks : int
        Number of ranks.
    nbytes : int
        Size of the buffer in bytes.
    seconds : sequence of float
        Time of each repeat.
    **more : object
        Further entries, such as the state of the cores.

    Returns
    -------
    dict
        A row of the JSON file.
    """
    return {
        "what": what,
        "impl": impl,
        "ranks": ranks,
        "nbytes": nbytes,
        **more,
        "seconds": {
            "min": float(np.min(seconds)),
            "median": float(np.median(seconds)),
            "max": float(np.max(seconds)),
        },
    }


def _command(*words: str) -> str:
    try:
        result = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def environment(mpi: Any) -> dict[str, Any]:
    """Return a description of a benchmark's environment.

    Not collective.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.

    Returns
    -------
    dict
        Git revision, versions, machine, load and command.
    """
    here = str(Path(__file__).parent)
    revision = _command("git", "-C", here, "rev-parse", "--short", "HEAD")
    changed = _command("git", "-C", here, "status", "--porcelain", "hpcstrat")
    return {
        "revision": revision + ("+changes" if changed else ""),
        "versions": {
            "python": platform.python_version(),
            "mpi": mpi.Get_library_version().split("\n")[0].strip("\x00 ")[:60],
            **{n: importlib.metadata.version(n) for n in ("mpi4py", "numpy")},
        },
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.release()}",
            "load": os.getloadavg()[0],
        },
        "command": f"mpirun -n {mpi.COMM_WORLD.size} python {shlex.join(sys.argv)}",
    }


def write_json(path: str, mpi: Any, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write a result file.

    Not collective: called on rank 0 only.

    Parameters
    ----------
    path : str
        Path of the file.
    mpi : module
        ``mpi4py.MPI``.
    rows : list of dict
        Rows from `row`.
    **more : object
        Further entries of the file.
    """
    content = {"environment": environment(mpi), "rows": rows, **more}
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options ``--json`` and ``--picture`` to a command.

    Not collective.

    Parameters
    ----------
    command : callable
        A command with the parameters ``json_path`` and ``picture``.

    Returns
    -------
    callable
        The command, decorated.
    """
    command = click.option(
        "--picture", callback=_checked_picture, help="Picture to draw: .png or .svg."
    )(command)
    return click.option("--json", "json_path", help="File for the figures.")(command)


def _checked_picture(context: Any, option: Any, path: str | None) -> str | None:
    """Check the picture's format early, before minutes of measurement."""
    if path and importlib.util.find_spec("matplotlib") is None:
        raise click.BadParameter(
            "expected matplotlib, found it missing; pip install matplotlib, or "
            "leave --picture out",
            context,
            option,
        )
    return path


def parse_size(text: str) -> int:
    """Parse a size, and return its number of bytes.

    Not collective.

    Parameters
    ----------
    text : str
        A size such as ``"4"``, ``"64KiB"`` or ``"1 MiB"``.

    Returns
    -------
    int
        A positive number of bytes.

    Raises
    ------
    click.BadParameter
        If the text is not a size.
    """
    number = text.strip().rstrip("BKMGi").strip()
    unit = text.strip()[len(number) :].strip() or "B"
    if unit not in _UNITS or not number.isdigit() or int(number) == 0:
        raise click.BadParameter(
            f"expected sizes such as 4B, 64KiB or 1MiB, found {text!r}; separate them "
            "by commas"
        )
    return int(number) << 10 * _UNITS.index(unit)


def size_text(nbytes: int) -> str:
    """Return a size as text with a unit.

    Not collective.

    Parameters
    ----------
    nbytes : int
        Number of bytes.

    Returns
    -------
    str
        Such as ``"64 KiB"``.
    """
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {_UNITS[unit]}" if size < 1000 else f"{size:.0f} {_UNITS[unit]}"


def describe(mpi: Any) -> str:
    """Return a line that describes the machine of a benchmark.

    Not collective.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.

    Returns
    -------
    str
        The number of ranks, MPI library, processor, cores of this rank, load.
    """
    where = environment(mpi)
    library = " ".join(where["versions"]["mpi"].partition(",")[0].split())
    machine = where["machine"]
    size = mpi.COMM_WORLD.size
    return (
        f"{size} rank{'s' * (size > 1)}, {library}, hpcstrat {where['revision']}, "
        f"{machine['processor']}, cores of rank 0: {machine['cores']}, load "
        f"{machine['load']:.2f}"
    )


def table(
    times: Mapping[str, Any],
    base: str,
    floor: str,
    above: Callable[[str], str] | None = None,
) -> str:
    """Return the times of alternatives as aligned lines.

    Not collective.

    Parameters
    ----------
    times : mapping of str to ndarray of shape (rounds,)
        Seconds, from `timing.measure`.
    base : str
        The alternative whose median is divided by the medians of the others.
    floor : str
        The alternative by whose median all medians are divided.
    above : callable, optional
        A function of an alternative's name. It returns the name of the alternative
        whose times are subtracted, round by round, or an empty string.

    Returns
    -------
    str
        A heading, and a line for each name.
    """
    medians = {name: float(np.median(values)) for name, values in times.items()}
    unit, scale = ("us", 1e6) if max(medians.values()) < 10e-3 else ("ms", 1e3)
    cells = [["", f"median {unit}", "min", "max", "faster", f"x {floor}"]]
    cells[0] += ["above pieces" if above else ""]
    for name, values in times.items():
        seconds = (medians[name], values.min(), values.max())
        line = [name, *(f"{scale * t:.2f}" for t in seconds)]
        line.append(f"{medians[base] / medians[name]:.2f}")
        line.append(f"{medians[name] / medians[floor]:.2f}")
        other = above(name) if above else ""
        difference = np.median(values - times[other]) if other else 0.0
        line.append(f"{scale * difference:+.2f}" if other else "")
        cells.append(line)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([name.ljust(widths[0]), *map(str.rjust, line, widths[1:])]).rstrip()
        for name, *line in cells
    ]
    return "\n".join(lines)


def styles(
    names: Sequence[str], *, by_family: bool = True
) -> dict[str, dict[str, Any]]:
    """Choose color, line and marker for each line of a picture.

    Not collective.

    Parameters
    ----------
    names : sequence of str
        Names of the alternatives; each name starts with the name of its library.
    by_family : bool
        Whether all alternatives of a library have the same color. If False, each of up
        to six alternatives has a separate color.

    Returns
    -------
    dict of str to dict
        Arguments of matplotlib's ``plot`` for each name.
    """
    seen: dict[str, int] = {}
    chosen = {}
    for name in names:
        family = name.replace(",", " ").split()[0] if by_family else ""
        place = seen[family] = seen.get(family, -1) + 1
        own = _OWN_COLORS[place % len(_OWN_COLORS)]
        chosen[name] = {
            "color": _COLORS.get(family, "gray") if by_family else own,
            "linestyle": _LINES[place % len(_LINES)],
            "marker": _MARKERS[place % len(_MARKERS)],
            "markersize": 4,
            "label": name,
        }
    return chosen


def draw_bars(path: str, times: Mapping[str, Any], floor: str, title: str) -> None:
    """Draw a bar for each alternative, with the range of its times.

    Not collective.

    Parameters
    ----------
    path : str
        The picture; its suffix names the format.
    times : mapping of str to ndarray of shape (rounds,)
        Seconds, from `timing.measure`.
    floor : str
        The alternative by whose median all medians are divided.
    title : str
        Title with the measurement and the machine.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.3 * len(times)), layout="constrained")
    axes = figure.subplots()
    colors = styles(list(times))
    medians = {name: float(np.median(values)) for name, values in times.items()}
    for place, (name, values) in enumerate(times.items()):
        axes.barh(place, medians[name] * 1e3, color=colors[name]["color"], height=0.6)
        # Limit the axis, because a few interrupted rounds would stretch it.
        ends = np.percentile(values, [25, 75]) * 1e3
        axes.plot(ends, [place, place], color="darkgray", linewidth=3)
    axes.axvline(medians[floor] * 1e3, color="black", linestyle=":", linewidth=1)
    axes.set_xlim(0, max(medians.values()) * 1e3 * 1.3)
    axes.set_xlabel("median time in ms; gray: from the lower to the upper quartile")
    places = range(len(times))
    axes.set_yticks(places, list(times))
    axes.invert_yaxis()
    right = axes.secondary_yaxis("right")
    ratios = {name: median / medians[floor] for name, median in medians.items()}
    texts = [f"{medians[n] * 1e3:.1f} ms, {r:.2f} x {floor}" for n, r in ratios.items()]
    right.set_yticks(places, texts)
    axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=120)


def byte_ticks(axes: Any, sizes: Sequence[int]) -> None:
    """Label a logarithmic axis of sizes in B, KiB and MiB.

    Not collective.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        The axes whose x axis is labeled.
    sizes : sequence of int
        The sizes in bytes.
    """
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=45, ha="right")
    axes.minorticks_off()
