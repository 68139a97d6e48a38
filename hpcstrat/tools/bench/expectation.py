"""Expected times of calls and steps: from a simple model, or from a user's file.

The file of ``--expected``, and the field ``expected`` of a run's file, have this form::

    {"format": "hpcstrat expected", "format_version": 1,
     "source": "SimGrid 3.32, fat tree",
     "points": [{"part": "step", "scaling": "weak", "num_replicas": 4,
                 "parameters": {...},      parameters of the part; optional
                 "seconds": 0.12}]}

In the model, a step's time outside of its calls is the same as in the smallest run. The
time of a call is computed from the latency and bandwidth between two replicas, which
the smallest run with such a measurement provides. With ``G`` bytes, ``W`` workers and
``a``, ``b`` the latency and bandwidth within a worker or between two, a sum takes

- within a worker of several replicas: ``2 a + 2 G / b``, into shared memory and out
  of it;
- between workers: ``2 log2(W) a + 2 (W - 1) / W G / b``, the minimum that an all-reduce
  must send (Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521).

Every sum also has the fixed cost of a call. This cost is the measured time minus the
time of the formula, for the smallest ``all_reduce`` in the smallest run with several
replicas.

If ``k`` replicas share a core, computation takes ``k`` times as long.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.tools.bench.run_file import BenchError, MeasuredRun, Part, load_json

__all__ = ["Expectation", "read_expected"]

_FORMAT = "hpcstrat expected"
_FORMAT_VERSION = 1
_MODEL = "the model of this page"


def read_expected(path: str) -> dict[str, Any]:
    """Read a file of expected times; raise BenchError if it has another form."""
    content = load_json(path, _FORMAT, _FORMAT_VERSION, "expectations")
    _check(content, path)
    return content


def _check(content: Any, path: str) -> None:
    try:
        str(content["source"])
        for point in content["points"]:
            str(point["part"]), str(point["scaling"]), dict(point.get("parameters", {}))
            # Check for NaN and Infinity, because Python accepts both in JSON.
            if point["num_replicas"] < 1 or not 0 < point["seconds"] < math.inf:
                raise ValueError(f"{point['seconds']!r} seconds")
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(
            f"expected a source, and points with part, scaling, num_replicas and "
            f"seconds, found in {path} {error!r}; see the user guide"
        ) from error


class Expectation:
    """The expected times of the parts of ``runs``, which must be sorted by size."""

    def __init__(
        self, runs: Sequence[MeasuredRun], given: Sequence[dict[str, Any]] = ()
    ) -> None:
        self._runs = runs
        own = [run.expected for run in runs if run.expected]
        for run in runs:
            if run.expected:
                _check(run.expected, run.path)
        # The user's files are first, because the first matching point is used.
        self._given = [*given, *own]

    def seconds(self, part: Part, run: MeasuredRun) -> tuple[float, str] | None:
        """Return the expected time of a call or step, and its source, or None."""
        for content in self._given:
            for point in content["points"]:
                if _is_of(point, part, run):
                    return float(point["seconds"]), str(content["source"])
        modelled = self._modelled(part, run)
        return None if modelled is None else (modelled, _MODEL)

    def unused(self) -> list[str]:
        """Return the sources that have no expected time for any part of the runs."""
        pairs = [(part, run) for run in self._runs for part in run.parts]
        return [
            str(content["source"])
            for content in self._given
            if not any(_is_of(p, *pair) for p in content["points"] for pair in pairs)
        ]

    def _modelled(self, part: Part, run: MeasuredRun) -> float | None:
        if part.name in ("all_reduce", "gradients"):
            return self._call(part.parameters["nbytes"], run)
        if part.name != "step":
            return None
        first = next((r for r in self._runs if r.part(part.key) is not None), None)
        if first is None:
            return None
        base = first.part(part.key)
        assert base is not None
        # The model uses the time of the smallest run, so it cannot predict that run.
        if run is first:
            return None
        if run.num_replicas == 1:
            moving: float | None = 0.0
        else:
            # For a user's own step, use the number of bytes counted in the measurement.
            nbytes = part.parameters.get("nbytes") or part.reduced_bytes
            moving = self._call(nbytes, run)
        if moving is None:
            return None
        return _besides(base, first, run) * _turns(run) / _turns(first) + moving

    def _call(self, nbytes: int, run: MeasuredRun) -> float | None:
        """Return the time of a call: the time of `_sum` and the fixed cost."""
        moving = self._sum(nbytes, run)
        return None if moving is None else moving + self._cost * _turns(run)

    @functools.cached_property
    def _cost(self) -> float:
        """The fixed cost of a call; 0 if no run has measured an all-reduce."""
        for run in self._runs:
            found = [part for part in run.parts if part.name == "all_reduce"]
            if run.num_replicas > 1 and found:
                smallest = min(found, key=lambda part: int(part.parameters["nbytes"]))
                moving = self._sum(smallest.parameters["nbytes"], run) or 0.0
                beyond = float(np.median(smallest.seconds)) - moving
                # Remove this run's factor for shared cores; `_call` multiplies by the
                # factor of the run that it predicts.
                return max(beyond, 0.0) / _turns(run)
        return 0.0

    def _sum(self, nbytes: int, run: MeasuredRun) -> float | None:
        """Return the time to send the data of a sum; None if no link was measured."""
        seconds = 0.0
        if max(run.replicas_per_worker) > 1:
            link = self._link("inside")
            if link is None:
                return None
            latency, bandwidth = link
            seconds += (2 * latency + 2 * nbytes / bandwidth) * _turns(run)
        if run.num_workers > 1:
            link = self._link("between")
            if link is None:
                return None
            latency, bandwidth = link
            share = 2 * (run.num_workers - 1) / run.num_workers
            seconds += 2 * math.log2(run.num_workers) * latency
            # Omit `_turns`: sending between workers is not slower on shared cores.
            seconds += share * nbytes / bandwidth
        # A single replica has no sum, so the time is 0; return None then.
        return seconds or None

    def _link(self, name: str) -> tuple[float, float] | None:
        for run in self._runs:
            link = run.links.get(name)
            if link:
                return float(link["latency_seconds"]), float(link["bytes_per_second"])
        return None


def _is_of(point: dict[str, Any], part: Part, run: MeasuredRun) -> bool:
    same = (point["part"], point["scaling"]) == (part.name, part.scaling)
    parameters = point.get("parameters")
    # A part with other parameters, such as another model, is another problem.
    if parameters and parameters != part.parameters:
        return False
    return same and point["num_replicas"] == run.num_replicas


def _turns(run: MeasuredRun) -> float:
    """Return the factor by which computation takes longer if ranks share cores."""
    return max(1.0, 1 / run.cores_per_rank)


def _besides(base: Part, first: MeasuredRun, run: MeasuredRun) -> float:
    """Return the time of a step outside of its calls, predicted for ``run``."""
    calls = np.add(base.late_seconds, base.communication_seconds)
    # Subtract the calls and the waiting in them, which the model adds separately.
    besides = float(np.median(np.subtract(base.own_seconds, calls)))
    if base.scaling != "strong":
        return besides
    ratio = first.num_replicas / run.num_replicas
    compute_seconds = base.parameters.get("compute_seconds")
    if compute_seconds is None:
        # Assume that all work of a user's own step is divided among replicas.
        return besides * ratio
    share = compute_seconds / first.num_replicas * _turns(first)
    return float(max(besides - share, 0.0) + share * ratio)
