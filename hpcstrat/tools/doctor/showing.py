"""The report of ``hpcstrat doctor``, as text and tables, or as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

import hpcstrat
from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.gpu.probe import probe
from hpcstrat.engine.gpu.probe.outcome import OPERATIONS
from hpcstrat.engine.gpu.probe.probe import ProbeReport
from hpcstrat.engine.topology.links import Link, Links, find_outliers
from hpcstrat.tools.doctor.examination import RankFacts, launch_words
from hpcstrat.tools.doctor.findings import Findings
from hpcstrat.tools.doctor.judging import (
    HostMeasures,
    JobMeasures,
    bandwidth_words,
    latency_words,
)
from hpcstrat.tools.terminal import add_row, new_console, new_table

__all__ = ["DoctorReport"]

JSON_VERSION = 1
"""Version of ``--json``, increased when a name is removed or its meaning changes."""

_WIDTH = 80
_COLUMN = 20
# Shorten longer tables, so that the user sees the problems, which come last.
_MOST_RANKS = 32
_MOST_HOSTS = 32
_MOST_LINKS = 12


@dataclass(slots=True)
class DoctorReport:
    """The content of the report of ``hpcstrat doctor``.

    ``reduction`` is a text on how arrays on GPUs are summed. ``probe`` reports which
    MPI calls accept GPU memory.
    """

    found: Findings
    ranks: list[RankFacts] = field(default_factory=list)
    probe: ProbeReport | None = None
    reduction: str = ""
    measured: JobMeasures | None = None

    def show_json(self) -> None:
        """Print the report as one JSON object."""
        click.echo(json.dumps(self.to_json(), indent=2))

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict for the module json."""
        launch = launch_from_environment()
        return {
            "version": JSON_VERSION,
            "hpcstrat": hpcstrat.__version__,
            "software": dict(self.found.software),
            "launcher": launch.launcher,
            "num_ranks": launch.size,
            "ranks": [_rank_json(facts) for facts in self.ranks],
            "measures": None if self.measured is None else self.measured.to_json(),
            "findings": self.found.to_json(),
            "failed": bool(self.found.problems),
        }

    def show(self) -> None:
        """Print the whole report as text, with the problems last."""
        _section("software")
        for name, value in self.found.software:
            _row(name, value)
        _section("launch")
        _row("launcher", launch_words())
        if self.ranks:
            _show_ranks(self.ranks)
        if self.probe is not None:
            _show_probe(self.probe)
        if self.reduction:
            _section("sums of arrays on GPUs")
            _row("by", self.reduction)
        if self.measured is not None:
            _show_measured(self.measured)
        found = self.found
        for title, some in (("remarks", found.remarks), ("problems", found.problems)):
            if some:
                _section(title)
                for number, finding in enumerate(some, 1):
                    _row(f"{number}.", finding.text, 5)
        if not found.problems:
            _section("no problems found")


def _rank_json(facts: RankFacts) -> dict[str, Any]:
    names = ("bus_id", "name", "memory_bytes", "free_bytes")
    return {
        "rank": facts.rank,
        "host": facts.host,
        "cores": sorted(facts.cores),
        "omp_num_threads": facts.threads,
        "shm_bytes": facts.shm_bytes,
        "gpus": [dict(zip(names, gpu, strict=True)) for gpu in facts.gpus],
    }


def _section(title: str) -> None:
    click.echo(f"\n{title}" if title != "software" else title)


def _row(name: str, value: str, column: int = _COLUMN) -> None:
    """Print a name and a value, in lines of up to 80 columns."""
    start = f"  {name}".ljust(column)
    if len(start) > column or not start.endswith(" "):
        start += " "
    # Do not split words, because users copy paths and commands.
    lines = textwrap.wrap(
        " ".join(value.split()),
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * column,
        break_on_hyphens=False,
        break_long_words=False,
    )
    click.echo("\n".join(lines or [start.rstrip()]))


def _show_ranks(ranks: Sequence[RankFacts]) -> None:
    for host in dict.fromkeys(facts.host for facts in ranks):
        here = [facts for facts in ranks if facts.host == host]
        cores = set().union(*(facts.cores for facts in here))
        shm = min(facts.shm_bytes for facts in here)
        words = (
            f"{len(here)} rank{'s' * (len(here) > 1)}, {len(cores)} cores, /dev/shm "
        )
        _row(host, words + (_size(shm) if shm else "missing"))
    _section("ranks")
    for facts in ranks[:_MOST_RANKS]:
        threads = facts.threads or "unset"
        _row(
            f"rank {facts.rank}",
            f"{facts.host}, {len(facts.cores)} cores, OMP_NUM_THREADS {threads}",
        )
        for bus_id, name, memory, free in facts.gpus:
            left = "does not answer" if free < 0 else f"{_size(free)} free"
            _row("", f"GPU {bus_id} {name}, {_size(memory)}, {left}")
    if len(ranks) > _MOST_RANKS:
        _row("", f"and {len(ranks) - _MOST_RANKS} more ranks")


def _size(nbytes: int) -> str:
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.1f} GiB"
    return f"{nbytes >> 20} MiB"


def _show_probe(report: ProbeReport) -> None:
    _section("memory of GPUs in calls of MPI")
    if not report.answers:
        _row("not tried", report.how)
        if report.output:
            # Show only the end of the probe's output, which has the reason.
            _row("it said", report.output[-400:])
        return
    for name in OPERATIONS:
        answer = report.answers.get(name)
        if answer is not None:
            _row(name, f"{'yes' if answer.ok else 'no'}, {answer.reason}")
    _row("tried", f"{report.date}, with {report.how}")
    _row("kept in", str(probe.cache_path(report.kind)))


# Functions that print measurements.


def _show_measured(measured: JobMeasures) -> None:
    _section("measures")
    if measured.init_seconds is not None:
        _row("MPI_Init", f"{measured.init_seconds:.2f} s, of the slowest rank")
    kinds = {host.folder.kind for host in measured.hosts if host.folder}
    _row("folder", f"{measured.path} ({', '.join(sorted(kinds)) or 'not looked at'})")
    table = new_table(
        "host", "one copies", "all copy", "file flushed", "locks", "clock, ms"
    )
    # Show only some hosts; the JSON output has all hosts.
    for host in measured.hosts[:_MOST_HOSTS]:
        add_row(table, *_host_words(host))
    new_console(of_job=True).print(table)
    if len(measured.hosts) > _MOST_HOSTS:
        _row("", f"and {len(measured.hosts) - _MOST_HOSTS} more hosts (--json)")
    if measured.links is not None and (measured.links.between + measured.links.inside):
        _show_links(measured.links)


def _host_words(host: HostMeasures) -> list[str]:
    alone, together, folder = host.memory_alone, host.memory_together, host.folder
    offset, error = host.clock_offset_seconds, host.clock_error_seconds or 0.0
    written = locks = "-"
    if folder is not None and folder.write_seconds is not None:
        written = f"{folder.write_seconds * 1e3:.3g} ms"
        locks = "none" if folder.unlockable else "yes"
        if folder.is_locked is False:
            locks = "this host's only"
    return [
        host.host,
        "-" if alone is None else bandwidth_words(alone),
        "-" if together is None else bandwidth_words(together),
        written,
        locks,
        "-" if offset is None else f"{offset * 1e3:+.3f} (+-{error * 1e3:.3f})",
    ]


def _show_links(links: Links) -> None:
    """Show all links, or, if there are many, only their median and the slowest."""
    table = new_table("messages", "latency", "bandwidth")
    for title, some in (("inside", links.inside), ("between", links.between)):
        shown = list(some)
        if len(some) > _MOST_LINKS:
            middle = sorted(some, key=lambda link: link.latency_seconds)[len(some) // 2]
            rates = sorted(link.bandwidth_bytes_per_second for link in some)
            add_row(
                table,
                f"{title}: median of {len(some)}",
                latency_words(middle.latency_seconds),
                bandwidth_words(rates[len(rates) // 2]),
            )
            shown = [one.link for one in find_outliers(some)[:_MOST_LINKS]]
        for link in shown:
            add_row(table, *_link_words(title, link))
    new_console(of_job=True).print(table)
    if links.is_sample:
        number = len(links.between)
        every = links.num_workers * (links.num_workers - 1) // 2
        _row("", f"{number} pairs of hosts were measured, a sample of all {every}")


def _link_words(title: str, link: Link) -> list[str]:
    one, two = link.hosts
    between = f"inside {one}" if title == "inside" else f"{one} - {two}"
    rate = bandwidth_words(link.bandwidth_bytes_per_second)
    return [between, latency_words(link.latency_seconds), rate]
