"""Speed-up, efficiency and time shares of several runs, with their uncertainty.

Let ``n0`` be the number of replicas in the smallest run, ``n`` the number in another
run, and ``T0`` and ``T`` the medians of the two runs' repeats. The speed-up is ``n T0 /
T`` in weak scaling, and ``n0 T0 / T`` in strong scaling. Parts with scaling ``same``,
such as a sum of a fixed number of bytes, have no speed-up. The efficiency is the
speed-up divided by ``n``, or ``T0 / T`` for parts with scaling ``same``.

The 95% confidence interval of an efficiency is the bootstrap of medians (Efron and
Tibshirani 1993, doi:10.1201/9780429246593, percentile intervals): the repeats of both
runs are resampled with replacement, each time with the same seed. The interval shows
how much the efficiency would change in another measurement on the same nodes, if
repeats are independent. The interval does not apply to other nodes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcstrat.engine.observe.arrival_report import ArrivalReport, ReplicaArrivals
from hpcstrat.tools.bench.expectation import Expectation
from hpcstrat.tools.bench.run_file import BenchError, MeasuredRun, Part, read_run
from hpcstrat.tools.bench.verdicts import slow_parts, verdicts

__all__ = ["RESAMPLES", "Point", "Report", "Series", "analyze", "interval", "read_runs"]

RESAMPLES = 10_000
# A fixed seed, so that the same files always result in the same page.
_SEED = 20260101
_LEVEL = 95
# With fewer repeats than this, an interval is unreliable.
_LEAST_REPEATS = 5
# Warn if other programs use more than this share of a host's cores. A launcher and the
# system alone use a few percent.
_MUCH_OF_OTHERS = 0.1
_ORDER = ("step", "all_reduce", "gradients", "save", "restore", "input")
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Point:
    """The figures of one part in one run.

    ``low`` and ``high`` are the ends of the efficiency's 95% interval. ``late``,
    ``communication`` and ``input`` are fractions of the replicas' time.
    ``slowest_host`` is empty if all replicas waited equally long for each other, and
    None if waiting was not measured.
    """

    run: MeasuredRun
    part: Part
    median: float
    quartiles: tuple[float, float]
    speed_up: float
    efficiency: float
    low: float
    high: float
    late: float | None = None
    communication: float | None = None
    input: float | None = None
    slowest_host: str | None = None
    expected_seconds: float | None = None
    expected_efficiency: float | None = None
    expected_by: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One part of the benchmark in several runs, smallest run first."""

    name: str
    scaling: str
    parameters: dict[str, Any]
    points: tuple[Point, ...]

    @property
    def observed(self) -> bool:
        """True if the shares of a step's time were measured in all runs."""
        return all(point.late is not None for point in self.points)


@dataclass(frozen=True, slots=True)
class Report:
    """The content of the web page that ``hpcstrat bench report`` writes.

    ``notes`` are warnings about the figures, and ``verdicts`` are advice.
    """

    runs: tuple[MeasuredRun, ...]
    series: tuple[Series, ...]
    notes: tuple[str, ...] = field(default=())
    verdicts: tuple[str, ...] = field(default=())

    def of(self, name: str) -> list[Series]:
        """Return all series of the part with this name."""
        return [series for series in self.series if series.name == name]


def read_runs(paths: Sequence[str]) -> list[MeasuredRun]:
    """Read run files; return the runs, smallest first.

    Raises BenchError if two runs have the same size, or measured different problems.
    """
    # Read each file once, even if the user names it twice, such as by *.json.
    runs = [read_run(path) for path in dict.fromkeys(paths)]
    runs.sort(key=lambda run: (run.num_replicas, run.num_workers))
    seen: dict[tuple[int, ...], MeasuredRun] = {}
    for run in runs:
        other = seen.setdefault(run.replicas_per_worker, run)
        if other is not run:
            raise BenchError(
                f"expected runs of different sizes, found two of {run.layout} "
                f"replicas, {other.path} and {run.path}; omit one of them"
            )
        if not run.parts:
            raise BenchError(
                f"expected measurements, found none in {run.path}: the run ended "
                "before the first part; start it again, or omit the file"
            )
        if run.ranks_per_replica != runs[0].ranks_per_replica:
            raise BenchError(
                "expected runs with one number of ranks in a replica, found "
                f"{runs[0].ranks_per_replica} in {runs[0].path} and "
                f"{run.ranks_per_replica} in {run.path}; make a report of each"
            )
    _require_same_problem(runs)
    return runs


def _require_same_problem(runs: Sequence[MeasuredRun]) -> None:
    """Raise BenchError if runs measured different problems under the same name."""
    for one, other in itertools.combinations(runs, 2):
        ours, theirs = _keys(one), _keys(other)
        for kind in ours:
            # One common set is enough: one run may have measured more sizes.
            if kind in theirs and not ours[kind] & theirs[kind]:
                name, scaling = kind
                difference = _difference(min(ours[kind]), min(theirs[kind]))
                raise BenchError(
                    f"expected the same problem in all files, found for {name} "
                    f"({scaling}) {difference[0]} in {one.path} and {difference[1]} in "
                    f"{other.path}; measure one of them again, or leave it out"
                )


def _keys(run: MeasuredRun) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for part in run.parts:
        name, scaling, words = part.key
        found.setdefault((name, scaling), set()).add(words)
    return found


def _difference(one: str, other: str) -> tuple[str, str]:
    """Return the differing parameters of two parts, with the values of each part."""
    ours, theirs = json.loads(one), json.loads(other)
    names = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
    first, second = (
        ", ".join(f"{name} {values.get(name)}" for name in names)
        for values in (ours, theirs)
    )
    return first, second


def analyze(
    runs: Sequence[MeasuredRun], given: Sequence[dict[str, Any]] = ()
) -> Report:
    """Return a report on runs from `read_runs`, with expected times from ``given``."""
    expectation = Expectation(runs, given)
    keys = dict.fromkeys(part.key for run in runs for part in run.parts)
    ordered = sorted(keys, key=_place)
    series = tuple(_series(key, runs, expectation) for key in ordered)
    notes = [
        f"The expected times of {source} belong to no part of these runs: they are not "
        "shown."
        for source in expectation.unused()
    ]
    notes = [*_notes(runs, series), *slow_parts(series), *notes]
    return Report(tuple(runs), series, tuple(notes), tuple(verdicts(series)))


def _place(key: tuple[str, str, str]) -> tuple[Any, ...]:
    name, scaling, words = key
    # Unknown parts, from a later version of hpcstrat, are last.
    known = _ORDER.index(name) if name in _ORDER else len(_ORDER)
    nbytes = json.loads(words).get("nbytes", 0)
    return known, scaling == "strong", nbytes, words


def _series(
    key: tuple[str, str, str], runs: Sequence[MeasuredRun], expectation: Expectation
) -> Series:
    pairs = [(run, part) for run in runs if (part := run.part(key)) is not None]
    name, scaling, words = key
    # Compare with the smallest run that has this part, because runs may lack parts.
    base = pairs[0]
    points = [_point(run, part, base, expectation) for run, part in pairs]
    return Series(name, scaling, json.loads(words), tuple(points))


def _point(
    run: MeasuredRun,
    part: Part,
    base: tuple[MeasuredRun, Part],
    expectation: Expectation,
) -> Point:
    first, reference = base
    seconds = np.array(part.seconds)
    median = float(np.median(seconds))
    low, high = (float(v) for v in np.percentile(seconds, [25, 75]))
    factor, by = _factors(part.scaling, first.num_replicas, run.num_replicas)
    ratio = float(np.median(reference.seconds)) / median
    ends = interval(reference.seconds, part.seconds)
    if run is first:
        # The ratio of the smallest run to itself is exactly 1.
        ends = 1.0, 1.0
    expected = expectation.seconds(part, run)
    told: dict[str, Any] = {}
    if expected is not None:
        wanted, source = expected
        base_seconds = float(np.median(reference.seconds))
        told = {
            "expected_seconds": wanted,
            "expected_efficiency": base_seconds / wanted * factor / by,
            "expected_by": source,
        }
    return Point(
        run=run,
        part=part,
        median=median,
        quartiles=(low, high),
        speed_up=ratio * factor,
        efficiency=ratio * factor / by,
        low=ends[0] * factor / by,
        high=ends[1] * factor / by,
        **_shares(run, part),
        **told,
    )


def _factors(scaling: str, first: int, now: int) -> tuple[float, float]:
    """Return two numbers: the speed-up is ``T0 / T`` times the first number.

    The efficiency is the speed-up divided by the second number.
    """
    if scaling == "weak":
        return float(now), float(now)
    if scaling == "strong":
        return float(first), float(now)
    return 1.0, 1.0


def interval(
    reference: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float]:
    """Return the 95% interval of the ratio of two medians (reference / seconds)."""
    generator = np.random.default_rng(_SEED)
    medians = []
    for values in (np.array(reference), np.array(seconds)):
        places = generator.integers(0, len(values), (RESAMPLES, len(values)))
        medians.append(np.median(values[places], axis=1))
    tail = (100 - _LEVEL) / 2
    low, high = np.percentile(medians[0] / medians[1], [tail, 100 - tail])
    return float(low), float(high)


def _shares(run: MeasuredRun, part: Part) -> dict[str, Any]:
    """Return the shares of waiting, communication and input in a part's time."""
    if not part.own_seconds:
        return {}
    # Divide by the mean replica's time, not by the slowest replica's, because the
    # shares are times of the mean replica, too.
    whole = float(np.sum(part.own_seconds))
    return {
        "late": float(np.sum(part.late_seconds)) / whole,
        "communication": float(np.sum(part.communication_seconds)) / whole,
        "input": float(np.sum(part.input_seconds)) / whole,
        "slowest_host": _slowest_host(run, part),
    }


def _slowest_host(run: MeasuredRun, part: Part) -> str:
    """Return the host and number of the replica for which the others wait.

    The text is empty if no replica is clearly later than the others.
    """
    if run.num_replicas == 1:
        return ""
    hosts = run.sessions[part.session]["hosts"]
    places = [hosts[worker] for worker in run.topology["worker_of_replica"]]
    rows = zip(
        places, part.replicas["own_seconds"], part.replicas["late_seconds"], strict=True
    )
    report = ArrivalReport(
        tuple(
            ReplicaArrivals(number, host, own, waited_seconds=waited)
            for number, (host, own, waited) in enumerate(rows)
        )
    )
    late = report.slowest()
    return f"{late[0].host} (replica {late[0].replica})" if late else ""


def _notes(runs: Sequence[MeasuredRun], series: Sequence[Series]) -> Iterator[str]:
    shared = [run.layout for run in runs if run.cores_per_rank < 1]
    if shared:
        fewest = min(run.cores_per_rank for run in runs)
        yield (
            f"Cores per rank < 1 (down to {fewest:.2g}) with {', '.join(shared)} "
            "replicas: they share cores. These rows do not show how a machine with "
            "a core for each rank scales."
        )
    yield from _disturbed(runs)
    for run in runs:
        for link in run.links.get("slow") or ():
            hosts = " and ".join(link["hosts"])
            yield (
                f"With {_replicas(run)} the link between {hosts} had "
                f"{link['latency_ratio']:.2g} times the latency of the others, and "
                f"1 / {link['bandwidth_ratio']:.2g} of their bandwidth."
            )
    if len(runs) == 1:
        yield "There is one run: efficiencies need a second one, of another size."
    for line in series:
        missing = [
            run.layout for run in runs if run.part(line.points[0].part.key) is None
        ]
        if missing:
            yield (
                f"{line.name.replace('_', '-')} ({line.scaling}, {line.parameters}) "
                f"was not measured with {', '.join(missing)} replicas. If that run "
                "was ended early, start it again: it continues."
            )
    few = {
        p.run.layout
        for s in series
        for p in s.points
        if len(p.part.seconds) < _LEAST_REPEATS
    }
    if few:
        yield (
            f"Fewer than {_LEAST_REPEATS} repeats with {', '.join(sorted(few))} "
            "replicas: their intervals are rough."
        )
    yield from _differences(runs)
    yield from (
        f"Of the run of {run.layout} replicas, {session['energy']['text']}."
        for run in runs
        for session in run.sessions
        if "energy" in session
    )


def _disturbed(runs: Sequence[MeasuredRun]) -> Iterator[str]:
    """Yield a note on each run in which other programs used much of a host."""
    for run in runs:
        shares = [
            (share, worker, part)
            for part in run.parts
            for worker, share in enumerate(part.others_share)
        ]
        share, worker, part = max(
            shares, key=lambda row: row[0], default=(0.0, 0, run.parts[0])
        )
        if share > _MUCH_OF_OTHERS:
            host = run.sessions[part.session]["hosts"][worker]
            yield (
                f"With {_replicas(run)} other programs used up to {share:.0%} of "
                f"{host}, in {part.name.replace('_', '-')} ({part.scaling}): "
                "measure again on exclusive nodes."
            )


def _replicas(run: MeasuredRun) -> str:
    return f"{run.layout} replica{'s' if run.num_replicas > 1 else ''}{run.of_ranks}"


def _differences(runs: Sequence[MeasuredRun]) -> Iterator[str]:
    """Yield notes on software versions or hosts that differ between measurements."""
    kinds: dict[str, dict[str, str]] = {}
    for run in runs:
        # A killed run may have continued with newer packages.
        for session in run.sessions:
            for name, version in session.get("versions", {}).items():
                kinds.setdefault(name, {}).setdefault(str(version), run.layout)
    for name, found in kinds.items():
        if len(found) > 1:
            words = ", ".join(f"{value} ({layout})" for value, layout in found.items())
            yield f"Not all was measured with the same {name}: {words}."
    for run in runs:
        hosts = {tuple(session["hosts"]) for session in run.sessions}
        if len(hosts) > 1:
            yield (
                f"The run of {run.layout} replicas was restarted on other hosts: "
                "its parts come from different hosts."
            )
