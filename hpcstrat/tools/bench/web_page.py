"""The report as one HTML page, which includes its pictures and loads no other file."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from hpcstrat.tools.bench.analysis import RESAMPLES, Point, Report, Series
from hpcstrat.tools.bench.pictures import rate
from hpcstrat.tools.bench.run_file import MeasuredRun
from hpcstrat.tools.bench.shapes import size_text

__all__ = ["page"]

# The lines of a table cell; the first line is the most important figure.
Cell = tuple[str, ...]
Cells = Sequence[object]

_CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #f6f7f9;
  margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 27px; margin: 0 0 2px; }
h2 { font-size: 19px; margin: 36px 0 8px; }
h3 { font-size: 15px; margin: 20px 0 6px; }
p { margin: 6px 0; }
p.verdict { font-size: 17px; font-weight: 600; }
.under { color: #5b6775; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0; }
.card { background: #fff; border: 1px solid #dfe3e8; border-radius: 8px;
  padding: 10px 16px; min-width: 170px; flex: 1; }
.card b { display: block; font-size: 24px; font-weight: 600; }
.card span { color: #5b6775; font-size: 13px; }
.notes { background: #fff8e6; border: 1px solid #ecd9a0; border-radius: 8px;
  padding: 8px 18px; margin: 16px 0; }
.notes li { margin: 3px 0; }
figure { background: #fff; border: 1px solid #dfe3e8; border-radius: 8px;
  margin: 12px 0; padding: 10px; }
img { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; background: #fff; font-size: 13.5px; width: 100%;
  font-variant-numeric: tabular-nums; }
th, td { border: 1px solid #dfe3e8; padding: 4px 9px; text-align: right; }
td { white-space: nowrap; }
td.text { white-space: normal; }
td small { color: #5b6775; font-size: 12px; }
th { background: #eef1f5; font-weight: 600; }
th:first-child, td:first-child, td.text { text-align: left; }
tr.shared td { background: #faf6ec; }
code { font-size: 12.5px; overflow-wrap: anywhere; }
details { margin: 8px 0; }
@media print { body { background: #fff; } main { max-width: none; } }
"""

_ALT = {
    "scaling": "Speed-up and efficiency of a training step by the number of replicas",
    "shares": "Shares of a step's time: computing, input, communication, waiting",
    "all_reduce": "Time of an all-reduce by size, for each number of replicas",
    "rates": "Bytes per second of checkpoints and of input",
}

_HOW = f"""
<p>Times are medians of all repeats; the time of a repeat is that of the slowest
replica. With n<sub>0</sub> replicas in the smallest run, n in another one, and medians
T<sub>0</sub> and T: the speed-up is n T<sub>0</sub> / T in weak scaling, where each
replica has the same batch at every size, and n<sub>0</sub> T<sub>0</sub> / T in strong
scaling, where all replicas share one batch. The efficiency is the speed-up by n: the
smallest run has 100% (strong and weak) by definition, whatever it does.</p>
<p>Intervals: the repeats of both runs are drawn {RESAMPLES:,} times with replacement,
from a fixed seed, and the middle 95% of the ratios of medians is shown (percentile
bootstrap). They tell how sure the figure is on these nodes on that day, if repeats do
not depend on each other.</p>
<p>Shares come from the library's own record of each call, as in a timeline, as means of
all replicas. <i>Waiting</i> is the time from a replica's arrival at a collective call
until all have come, with some microseconds for the agreement itself;
<i>communication</i> the rest of the call, with the sum; <i>input</i> the time in
<code>next()</code> of a data set; the rest is computing, the optimizer, and Python. The
slowest host is that of the replica that waits least, if it stands out. <i>Other
programs</i> is the share of a host's cores that were busy with what is no replica, on
the host where it was largest.</p>
<p>Expected, unless a file says otherwise: what a replica does besides its calls is
taken from the smallest run (times replicas per core, where that is more than 1; in
strong scaling the computing divided by n / n<sub>0</sub>), and a sum of G bytes over W
nodes takes 2 a + 2 G / b inside a node and 2 log<sub>2</sub>(W) a + 2 (W - 1) / W G / b
between nodes, with the latency a and the bandwidth b that were measured between two
replicas in the smallest run that has two. What the smallest sum of the smallest run of
several replicas took beyond this is added to every sum, as the cost of a call.</p>
"""


def page(report: Report, pictures: Mapping[str, bytes]) -> str:
    """Return the page as HTML; ``pictures`` are SVG images from `pictures.draw`."""
    runs = report.runs
    sizes = ", ".join(run.layout for run in runs)
    hosts = {host for run in runs for s in run.sessions for host in s["hosts"]}
    started = sorted(session["started"] for run in runs for session in run.sessions)
    version = runs[-1].sessions[-1]["versions"].get("hpcstrat", "")
    body = [
        "<h1>How this job scales</h1>",
        f'<p class="under">{escape(sizes)} replicas{runs[0].of_ranks} on {len(hosts)} '
        f"host{'s' * (len(hosts) > 1)}; measured {escape(started[0])} to "
        f"{escape(started[-1])} with hpcstrat {escape(version)}</p>",
        *[f'<p class="verdict">{escape(words)}</p>' for words in report.verdicts],
        *_cards(report),
        *_notes(report),
        *_steps(report, pictures),
        *_sums(report, pictures),
        *_files(report, pictures),
        *_runs(runs),
        f"<h2>How these figures are computed</h2>{_HOW}",
    ]
    content = "\n".join(body)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>How this job scales</title>\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{content}\n</main>\n</body>\n</html>\n"
    )


def _cards(report: Report) -> Iterator[str]:
    """Yield the HTML of the most important figures, in large type."""
    cards = []
    for series in report.of("step"):
        last = series.points[-1]
        if len(series.points) > 1:
            title = f"efficiency of {last.run.layout} replicas, {series.scaling}"
            cards.append((_percent(last.efficiency), title))
    for series in report.of("step"):
        last = series.points[-1]
        if series.observed and last.run.num_replicas > 1:
            lost = (last.communication or 0.0) + (last.late or 0.0)
            title = f"of a step in calls, {last.run.layout} replicas, {series.scaling}"
            cards.append((_percent(lost), title))
    if cards:
        inner = "".join(
            f'<div class="card"><b>{value}</b><span>{escape(title)}</span></div>'
            for value, title in cards[:4]
        )
        yield f'<div class="cards">{inner}</div>'


def _notes(report: Report) -> Iterator[str]:
    if report.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
        yield f'<div class="notes"><ul>{items}</ul></div>'


def _picture(name: str, pictures: Mapping[str, bytes]) -> Iterator[str]:
    if name in pictures:
        # Include the picture in the page, so that the user can send the page by mail.
        data = base64.b64encode(pictures[name]).decode("ascii")
        source = f"data:image/svg+xml;base64,{data}"
        yield f'<figure><img src="{source}" alt="{_ALT[name]}"></figure>'


def _steps(report: Report, pictures: Mapping[str, bytes]) -> Iterator[str]:
    steps = report.of("step")
    if not steps:
        return
    yield "<h2>Training step</h2>"
    yield from _picture("scaling", pictures)
    yield from _picture("shares", pictures)
    names = ["replicas", "cores each", "batch", "median and quartiles", "speed-up"]
    names += ["efficiency and 95%", "expected", "communication", "input"]
    names += ["waiting", "slowest host", "other programs"]
    for series in steps:
        yield f"<h3>{series.scaling.capitalize()} scaling: {_about(series)}</h3>"
        rows = [_step_cells(point) for point in series.points]
        yield _table(names, rows, [point.run for point in series.points])
        yield from _sources(series)


def _step_cells(point: Point) -> Cells:
    slowest = "" if point.run.num_replicas == 1 else (point.slowest_host or "none")
    return [
        point.run.layout,
        f"{point.run.cores_per_rank:.3g}",
        point.part.batch_size,
        _spread(point),
        f"{point.speed_up:.2f}",
        _efficiency(point),
        _expected(point),
        _percent(point.communication),
        _percent(point.input),
        _percent(point.late),
        slowest,
        _percent(max(point.part.others_share, default=None)),
    ]


def _spread(point: Point) -> Cell:
    return _seconds(point.median), _range(point.quartiles)


def _efficiency(point: Point) -> Cell:
    interval = f"{100 * point.low:.1f} to {100 * point.high:.1f}%"
    return _percent(point.efficiency), interval


def _expected(point: Point) -> Cell:
    if point.expected_seconds is None or point.expected_efficiency is None:
        return ("",)
    return _percent(point.expected_efficiency), _seconds(point.expected_seconds)


def _sources(series: Series) -> Iterator[str]:
    sources = dict.fromkeys(p.expected_by for p in series.points if p.expected_by)
    if sources:
        yield f'<p class="under">Expected by {escape(", ".join(sources))}.</p>'


def _sums(report: Report, pictures: Mapping[str, bytes]) -> Iterator[str]:
    """Yield the HTML of the times of sums, in runs with several replicas."""
    sums = [*report.of("all_reduce"), *report.of("gradients")]
    runs = [run for run in report.runs if run.num_replicas > 1]
    if not sums or not runs:
        return
    yield "<h2>Sums over replicas</h2>"
    yield from _picture("all_reduce", pictures)
    names = ["what", "size", *(f"{run.layout} replicas" for run in runs)]
    rows = []
    for series in sums:
        model = series.parameters.get("model")
        what = f"gradients of {model}" if model else "one array"
        cells: list[object] = [what, size_text(series.parameters["nbytes"])]
        rows.append([*cells, *(_sum_cell(series, run) for run in runs)])
    yield _table(names, rows)
    yield (
        '<p class="under">Median time of a call, with its quartiles; bus bandwidth, '
        "2 (n - 1) / n of the size by the time, which does not depend on n where the "
        "links are the limit; and the time that was expected.</p>"
    )


def _sum_cell(series: Series, run: MeasuredRun) -> Cell:
    point = next((point for point in series.points if point.run is run), None)
    if point is None:
        return ("not measured",)
    count = run.num_replicas
    # Bus bandwidth, defined as in NCCL's tests, so that figures can be compared.
    moved = 2 * (count - 1) / count * series.parameters["nbytes"] / point.median
    words = f"{moved / 1e9:.3g} GB/s"
    if point.expected_seconds is not None:
        words += f", expected {_seconds(point.expected_seconds)}"
    return *_spread(point), words


def _files(report: Report, pictures: Mapping[str, bytes]) -> Iterator[str]:
    shown = [s for name in ("save", "restore", "input") for s in report.of(name)]
    if not shown:
        return
    yield "<h2>Checkpoints and input</h2>"
    yield from _picture("rates", pictures)
    names = ["replicas", "median and quartiles", "GB/s", "speed-up"]
    names += ["efficiency and 95%"]
    for series in shown:
        title = f"{series.name.capitalize()}, {series.scaling} scaling"
        yield f"<h3>{title}: {_about(series)}</h3>"
        rows = [
            [
                point.run.layout,
                _spread(point),
                f"{rate(point) / 1e9:.3g}",
                f"{point.speed_up:.2f}",
                _efficiency(point),
            ]
            for point in series.points
        ]
        yield _table(names, rows, [point.run for point in series.points])
    yield (
        '<p class="under">GB/s of all replicas together. What was written or read '
        "before may be read from the memory of its host, not from the disk.</p>"
    )


def _about(series: Series) -> str:
    """Return the parameters of a part as text for people."""
    words = []
    for name, value in series.parameters.items():
        if name == "nbytes":
            words.append(size_text(value))
        elif name == "compute_seconds":
            words.append(f"{value * 1e3:g} ms of computing")
        elif name == "row_bytes":
            words.append(f"rows of {size_text(value)}")
        elif name == "batch_size":
            kind = "of each replica" if series.scaling == "weak" else "of all"
            words.append(f"batch of {value} {kind}")
        else:
            words.append(str(value))
    return escape(", ".join(words))


def _runs(runs: Sequence[MeasuredRun]) -> Iterator[str]:
    yield "<h2>The runs</h2>"
    names = ["replicas", "replicas per worker", "cores per worker", "link inside"]
    names += ["link between", "file"]
    rows = [
        [
            run.layout,
            _short(run.replicas_per_worker),
            _short(run.topology["cores_per_worker"]),
            _link(run.links.get("inside")),
            _link(run.links.get("between")),
            run.path,
        ]
        for run in runs
    ]
    yield _table(names, rows, runs)
    for run in runs:
        title = f"{escape(run.layout)} replicas: where and how"
        yield f"<details><summary>{title}</summary>"
        for session in run.sessions:
            yield _table(("", ""), [[k, _words(v)] for k, v in session.items()])
        yield "</details>"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {one}" for name, one in value.items())
    return _short(value) if isinstance(value, (list, tuple)) else str(value)


def _short(values: Sequence[Any]) -> str:
    some = ", ".join(map(str, values[:8]))
    return f"{some}, and {len(values) - 8} more" if len(values) > 8 else some


def _link(link: Mapping[str, Any] | None) -> str:
    if not link:
        return ""
    speed = link["bytes_per_second"] / 1e9
    return f"{link['latency_seconds'] * 1e6:.3g} us, {speed:.3g} GB/s"


def _table(
    names: Sequence[str], rows: Sequence[Cells], runs: Sequence[MeasuredRun] = ()
) -> str:
    """Return an HTML table; rows of runs that share cores have another color."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = [f"<tr>{head}</tr>"] if any(names) else []
    for number, cells in enumerate(rows):
        shared = bool(runs) and runs[number].cores_per_rank < 1
        inner = "".join(_cell(cell) for cell in cells)
        lines.append(f"<tr{' class=shared' * shared}>{inner}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _cell(value: object) -> str:
    """Return an HTML cell; lines after the first are in small type."""
    if isinstance(value, tuple):
        # Escape the text, because names of hosts and commands are read from files, and
        # must not be interpreted as HTML.
        first, *rest = (escape(line) for line in value)
        return (
            f"<td>{first}" + "".join(f"<br><small>{r}</small>" for r in rest) + "</td>"
        )
    text = str(value)
    words = ' class="text"' if text[:1].isalpha() or len(text) > 60 else ""
    return f"<td{words}>{escape(text)}</td>"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def _seconds(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _range(ends: tuple[float, float]) -> str:
    return f"{_seconds(ends[0])} to {_seconds(ends[1])}"
