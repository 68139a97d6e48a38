"""Expected run times: from a simple model, or from a file of another program.

The file of ``--expected``, and the field ``expected`` of a run's own file, are::

    {"format": "hpcstrat expected", "format_version": 1,
     "source": "SimGrid 3.32, fat tree",
     "points": [{"part": "step", "scaling": "weak", "num_replicas": 4,
                 "parameters": {...},      those of the part; may be left out
                 "seconds": 0.12}]}

In the model, the time of a replica outside its calls is that of the smallest run, and
the time of a call follows from the latency and bandwidth that were measured between two
replicas, in the smallest run that has them. With ``G`` bytes, ``W`` workers and ``a``,
``b`` the latency and bandwidth within a worker or between two, a sum takes

- within a worker of several replicas: ``2 a + 2 G / b``, into shared memory and out
  of it;
- between workers: ``2 log2(W) a + 2 (W - 1) / W G / b``, the minimum that an all-reduce
  must send (Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521).

The time of the smallest ``all_reduce`` of the smallest run of several replicas beyond
this is the cost of a call: it is added to every sum.

Replicas that share a core take turns: computation takes longer by that factor.
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
    """Read a file of expectations; BenchError if it is not one."""
    content = load_json(path, _FORMAT, _FORMAT_VERSION, "expectations")
    _check(content, path)
    return content


def _check(content: Any, path: str) -> None:
    try:
        str(content["source"])
        for point in content["points"]:
            str(point["part"]), str(point["scaling"]), dict(point.get("parameters", {}))
            # Python reads NaN and Infinity from JSON.
            if point["num_replicas"] < 1 or not 0 < point["seconds"] < math.inf:
                raise ValueError(f"{point['seconds']!r} seconds")
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(
            f"expected a source, and points with part, scaling, num_replicas and "
            f"seconds, found in {path} {error!r}; see the user guide"
        ) from error


class Expectation:
    """The expected time of each part of some runs, smallest first."""

    def __init__(
        self, runs: Sequence[MeasuredRun], given: Sequence[dict[str, Any]] = ()
    ) -> None:
        self._runs = runs
        own = [run.expected for run in runs if run.expected]
        for run in runs:
            if run.expected:
                _check(run.expected, run.path)
        # The first match is used: the user's file comes before the run's own
        # expectations.
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
        """Return the sources that have no point for a part of these runs."""
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
        # The model starts from this run: it cannot predict it.
        if run is first:
            return None
        if run.num_replicas == 1:
            moving: float | None = 0.0
        else:
            # For the user's own step, the sizes of its calls are known.
            nbytes = part.parameters.get("nbytes") or part.reduced_bytes
            moving = self._call(nbytes, run)
        if moving is None:
            return None
        return _besides(base, first, run) * _turns(run) / _turns(first) + moving

    def _call(self, nbytes: int, run: MeasuredRun) -> float | None:
        """Return the time of a call, from `_sum`, and its fixed cost."""
        moving = self._sum(nbytes, run)
        return None if moving is None else moving + self._cost * _turns(run)

    @functools.cached_property
    def _cost(self) -> float:
        """The time of the smallest all-reduce beyond that of its bytes; 0 if there is
        none.
        """
        for run in self._runs:
            found = [part for part in run.parts if part.name == "all_reduce"]
            if run.num_replicas > 1 and found:
                smallest = min(found, key=lambda part: int(part.parameters["nbytes"]))
                moving = self._sum(smallest.parameters["nbytes"], run) or 0.0
                beyond = float(np.median(smallest.seconds)) - moving
                # Without this run's factor for shared cores: `_call` applies that of
                # another run.
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
            # No factor here: replicas that share a core do not share it with the
            # network.
            seconds += share * nbytes / bandwidth
        # A single replica sums nothing.
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
    # A part with other parameters is another problem, such as another model.
    if parameters and parameters != part.parameters:
        return False
    return same and point["num_replicas"] == run.num_replicas


def _turns(run: MeasuredRun) -> float:
    """The factor by which computation takes longer if replicas share cores."""
    return max(1.0, 1 / run.cores_per_replica)


def _besides(base: Part, first: MeasuredRun, run: MeasuredRun) -> float:
    """Return the time of a replica's step outside its calls, with its own batch."""
    calls = np.add(base.late_seconds, base.communication_seconds)
    # The calls are modeled separately, including the time of waiting in them.
    besides = float(np.median(np.subtract(base.own_seconds, calls)))
    if base.scaling != "strong":
        return besides
    ratio = first.num_replicas / run.num_replicas
    compute_seconds = base.parameters.get("compute_seconds")
    if compute_seconds is None:
        # How the work of a user's own step divides is unknown.
        return besides * ratio
    share = compute_seconds / first.num_replicas * _turns(first)
    return float(max(besides - share, 0.0) + share * ratio)
