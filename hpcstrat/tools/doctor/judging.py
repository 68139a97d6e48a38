"""Functions that combine the measurements of all ranks, and find problems in them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcstrat.engine.observe.timeline.alignment import Alignment
from hpcstrat.engine.topology.links import Link, Links, Outlier, find_outliers
from hpcstrat.tools.doctor.examination import RankFacts
from hpcstrat.tools.doctor.findings import Findings, names
from hpcstrat.tools.doctor.local import FILE_BYTES, FolderFacts
from hpcstrat.tools.doctor.rank_measures import RankMeasures

__all__ = [
    "HostMeasures",
    "JobMeasures",
    "bandwidth_words",
    "judge",
    "latency_words",
    "summarize",
]

# An outlier that is slower than the other links by this factor is a problem; below this
# factor it is a remark.
_BAD_BANDWIDTH, _BAD_LATENCY = 4.0, 10.0
_BAD_LATENCY_SECONDS = 1e-3
# If the ratios of slow links differ by at most this factor, assume one common cause.
_ALIKE = 4.0
_SLOW_MEMORY = 2.0
_SLOW_FOLDER, _SLOW_FOLDER_SECONDS, _BAD_FOLDER_SECONDS = 5.0, 0.5, 10.0
_SLOW_INIT_SECONDS = 20.0
# In seconds. Time services keep clocks within milliseconds; on a host whose clock is
# wrong by a second, no time service runs.
_CLOCK_SECONDS, _BAD_CLOCK_SECONDS = 0.05, 1.0
# A time service cannot correct a larger drift (adjtimex(2): 500 ppm).
_DRIFT = 500e-6
_LEAVE_OUT = "leave it out (sbatch --exclude={}) and tell the site"


@dataclass(slots=True)
class HostMeasures:
    """The figures of a host; a figure is None if it was not measured.

    Bandwidths are in bytes per second. ``memory_alone`` is the median over ranks that
    copy one after the other; ``memory_together`` is the sum over ranks that copy at the
    same time. ``clock_offset_seconds`` is relative to the median of all hosts' clocks.
    ``clock_drift`` is the time that this clock gains on the clock of replica 0 in a
    second. The errors are upper bounds.
    """

    host: str
    ranks: tuple[int, ...]
    memory_alone: float | None = None
    memory_together: float | None = None
    folder: FolderFacts | None = None
    clock_offset_seconds: float | None = None
    clock_error_seconds: float | None = None
    clock_drift: float | None = None
    clock_drift_error: float | None = None


@dataclass(slots=True)
class JobMeasures:
    """The measurements of a job.

    An entry of ``troubles`` has a host, the measurement that failed there, and the
    reason.
    """

    path: str
    init_seconds: float | None
    links: Links | None
    hosts: list[HostMeasures]
    troubles: list[tuple[str, str, str]]

    def to_json(self) -> dict[str, Any]:
        """Return a dict for the module json."""
        return {
            "mpi_init_seconds": self.init_seconds,
            "folder": self.path,
            "hosts": [asdict(host) for host in self.hosts],
            "links": None if self.links is None else self.links.to_json(),
        }


def summarize(
    path: str, ranks: Sequence[RankFacts], measures: Sequence[RankMeasures]
) -> JobMeasures:
    """Combine facts and measurements, two lists in the same order of ranks."""
    by_host: dict[str, list[tuple[RankFacts, RankMeasures]]] = {}
    for facts, told in zip(ranks, measures, strict=True):
        by_host.setdefault(facts.host, []).append((facts, told))
    hosts = [_host(host, some) for host, some in by_host.items()]
    offsets = [
        host.clock_offset_seconds
        for host in hosts
        if host.clock_offset_seconds is not None
    ]
    for host in hosts:
        if host.clock_offset_seconds is not None:
            # Use the lower median, which is the clock of a real host: with the mean of
            # two clocks, both would look wrong.
            host.clock_offset_seconds -= statistics.median_low(offsets)
    # All ranks end MPI_Init when the last rank arrives. The shortest time is the last
    # rank's, which includes no wait.
    inits = [told.init_seconds for told in measures if told.init_seconds is not None]
    # Use a dict, so that the same trouble of several ranks is reported once.
    troubles = {
        trouble: facts.host
        for facts, told in zip(ranks, measures, strict=True)
        for trouble in told.troubles
    }
    return JobMeasures(
        path,
        min(inits, default=None),
        next((told.links for told in measures if told.links is not None), None),
        hosts,
        [(host, *trouble) for trouble, host in troubles.items()],
    )


def _host(host: str, told: Sequence[tuple[RankFacts, RankMeasures]]) -> HostMeasures:
    found = HostMeasures(host, tuple(facts.rank for facts, _ in told))
    every = [measures for _, measures in told]
    alone = [m.memory_alone for m in every if m.memory_alone is not None]
    together = [m.memory_together for m in every if m.memory_together is not None]
    if alone:
        found.memory_alone = statistics.median(alone)
    if together:
        found.memory_together = sum(together)
    found.folder = next((m.folder for m in every if m.folder is not None), None)
    samples = next((m.clocks for m in every if m.clocks), [])
    if samples:
        # The error is at most half a round trip, so the fastest sample is the most
        # accurate.
        best = min(samples, key=lambda sample: sample.round_trip_ns)
        # A sample's offset corrects this host's clock, so the clock's error has the
        # opposite sign.
        found.clock_offset_seconds = -best.offset_ns / 1e9
        found.clock_error_seconds = best.round_trip_ns / 2e9
    if len(samples) > 1:
        found.clock_drift = -Alignment(samples).drift
        found.clock_drift_error = sum(sample.round_trip_ns for sample in samples) / (
            2 * (samples[-1].local_ns - samples[0].local_ns)
        )
    return found


def bandwidth_words(bytes_per_second: float) -> str:
    """Return a bandwidth as text, such as ``12.5 GB/s``."""
    if bytes_per_second < 1e9:
        return f"{bytes_per_second / 1e6:.3g} MB/s"
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def latency_words(seconds: float) -> str:
    """Return a latency as text, such as ``1.5 us``."""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def judge(measured: JobMeasures) -> Findings:
    """Return the problems and remarks that the measurements show."""
    found = Findings()
    for host, what, why in measured.troubles:
        found.problem(
            "not-measured",
            f"expected to measure {what} on host {host}, found: {why}; see which host "
            "does not answer",
            hosts=(host,),
        )
    if measured.links is not None:
        _judge_links(found, measured.links, measured.hosts)
    _judge_clocks(found, measured.hosts)
    _judge_memory(found, measured.hosts)
    told = [(one.host, one.folder) for one in measured.hosts if one.folder is not None]
    _judge_writing(found, measured.path, told)
    _judge_sharing(found, measured.path, told)
    _judge_locks(found, measured.path, told)
    seconds = measured.init_seconds
    if seconds is not None and seconds > _SLOW_INIT_SECONDS:
        found.remark(
            "slow-mpi-init",
            f"expected MPI to start within {_SLOW_INIT_SECONDS:g} s, found that it "
            f"took {seconds:.1f} s; see whether its libraries are on a slow file "
            "system, and whether it looks for networks that are not there (Open MPI: "
            "OMPI_MCA_btl=^ofi)",
            expected=_SLOW_INIT_SECONDS,
            found=seconds,
            unit="s",
        )
    return found


# Functions that judge links.


def _judge_links(found: Findings, links: Links, hosts: Sequence[HostMeasures]) -> None:
    host_of = {rank: host.host for host in hosts for rank in host.ranks}
    for one, two in links.unanswered:
        ends = host_of.get(one, f"rank {one}"), host_of.get(two, f"rank {two}")
        found.problem(
            "dead-link",
            f"expected messages between {ends[0]} and {ends[1]} to arrive, found that "
            "they do not; ask the site to test that connection, or leave one of the "
            "two out (sbatch --exclude)",
            hosts=ends,
            ranks=(one, two),
        )
    outliers = find_outliers(links.between)
    slow_hosts = _slow_hosts(links.between, outliers)
    for host in slow_hosts:
        _tell_slow(
            found,
            "slow-host",
            [one for one in outliers if host in one.link.hosts],
            (host,),
            title=f"the links of {host}",
            advice=_LEAVE_OUT.format(host),
        )
    for outlier in outliers:
        ends = outlier.link.hosts
        # Omit links of a slow host, because they are reported with the host.
        if not set(ends) & set(slow_hosts):
            _tell_slow(
                found,
                "slow-link",
                [outlier],
                ends,
                title=f"the link between {ends[0]} and {ends[1]}",
                advice="ask the site to test it, or leave one of the two hosts out",
            )
    for outlier in find_outliers(links.inside):
        host = outlier.link.hosts[0]
        _tell_slow(
            found,
            "slow-inside",
            [outlier],
            (host,),
            title=f"messages inside of host {host}",
            advice="see what else runs there, and how its ranks are bound to cores",
        )


def _slow_hosts(links: Sequence[Link], outliers: Sequence[Outlier]) -> list[str]:
    """Return hosts with at least two slow links that are over half of their links.

    These links must be about equally slow. For example, one broken link, and another
    link that was disturbed during the measurement, do not make a host slow.
    """
    every = Counter(host for link in links for host in link.hosts)
    slow: dict[tuple[str, bool], list[float]] = {}
    for one in outliers:
        ratio = one.bandwidth_ratio if one.by_bandwidth else one.latency_ratio
        for host in one.link.hosts:
            slow.setdefault((host, one.by_bandwidth), []).append(ratio)
    found = (
        host
        for (host, _), ratios in slow.items()
        for least in ratios
        if sum(least <= ratio <= _ALIKE * least for ratio in ratios)
        > max(1, every[host] / 2)
    )
    return list(dict.fromkeys(found))


def _tell_slow(
    found: Findings,
    name: str,
    outliers: Sequence[Outlier],
    hosts: tuple[str, ...],
    *,
    title: str,
    advice: str,
) -> None:
    """Report slow links as one finding, with the figures of the median link."""
    ordered = sorted(outliers, key=lambda one: one.bandwidth_ratio)
    middle = ordered[len(ordered) // 2]
    words: Callable[[float], str] = bandwidth_words
    if middle.by_bandwidth:
        expected = middle.others_bandwidth_bytes_per_second
        own, unit = middle.link.bandwidth_bytes_per_second, "B/s"
        bad = middle.bandwidth_ratio > _BAD_BANDWIDTH
    else:
        expected = middle.others_latency_seconds
        own, unit = middle.link.latency_seconds, "s"
        words = latency_words
        # A few microseconds more do not slow down a job, whatever the ratio.
        bad = middle.latency_ratio > _BAD_LATENCY and own > _BAD_LATENCY_SECONDS
    tell = found.problem if bad else found.remark
    tell(
        name,
        f"expected {title} to be as fast as others, {words(expected)} (median), found "
        f"{words(own)}; {advice}",
        hosts=hosts,
        ranks=middle.link.ranks if name == "slow-link" else (),
        expected=expected,
        found=own,
        unit=unit,
    )


# Functions that judge hosts.


def _judge_clocks(found: Findings, hosts: Sequence[HostMeasures]) -> None:
    known = [host for host in hosts if host.clock_offset_seconds is not None]
    service = "ask the site to repair its time service (chronyc tracking)"
    for host in known:
        offset, error = host.clock_offset_seconds or 0.0, host.clock_error_seconds or 0
        # Subtract the measurement's error, which may be the whole of a small offset.
        if abs(offset) - error > _CLOCK_SECONDS:
            others = "the other hosts'"
            if len(known) == 2:
                other = next(one.host for one in known if one is not host)
                others = f"{other}'s (which of the two is right, they cannot know)"
            tell = found.problem if abs(offset) > _BAD_CLOCK_SECONDS else found.remark
            tell(
                "clock",
                f"expected clocks that agree within {_CLOCK_SECONDS:g} s, found that "
                f"of host {host.host} {abs(offset):.3g} s "
                f"{'ahead of' if offset > 0 else 'behind'} {others}; {service}",
                hosts=(host.host,),
                expected=0.0,
                found=offset,
                unit="s",
            )
        drift, bound = host.clock_drift or 0.0, host.clock_drift_error or 0.0
        # Subtract the error, which is large if the two samples are only seconds apart.
        if abs(drift) - bound > _DRIFT:
            found.remark(
                "clock-drift",
                f"expected clocks that drift by less than {_DRIFT * 1e6:g} us in a "
                f"second, found {drift * 1e6:.0f} us on host {host.host}; {service}",
                hosts=(host.host,),
                expected=_DRIFT,
                found=drift,
                unit="s/s",
            )


def _with_others(
    values: Sequence[tuple[str, float | None]],
) -> list[tuple[str, float, float]]:
    """Return each host with its value and the median of all other hosts.

    The list is empty if fewer than two hosts have a value.
    """
    known = [(host, value) for host, value in values if value is not None]
    if len(known) < 2:
        return []
    return [
        (host, own, statistics.median(value for one, value in known if one != host))
        for host, own in known
    ]


def _judge_memory(found: Findings, hosts: Sequence[HostMeasures]) -> None:
    values = [(host.host, host.memory_alone) for host in hosts]
    for host, own, others in _with_others(values):
        if own * _SLOW_MEMORY < others:
            found.remark(
                "slow-memory",
                f"expected a core of host {host} to copy as fast as those of others, "
                f"{bandwidth_words(others)} (median), found {bandwidth_words(own)}; "
                f"see what else runs there, or {_LEAVE_OUT.format(host)}",
                hosts=(host,),
                expected=others,
                found=own,
                unit="B/s",
            )


# Functions that judge the folder of checkpoints.

_Told = Sequence[tuple[str, FolderFacts]]


def _grouped(told: _Told, key: Callable[[FolderFacts], str]) -> dict[str, Any]:
    """Group the hosts by the text of ``key``; omit hosts with an empty text."""
    groups: dict[str, tuple[str, ...]] = {}
    for host, facts in told:
        if key(facts):
            groups[key(facts)] = (*groups.get(key(facts), ()), host)
    return groups


def _judge_writing(found: Findings, path: str, told: _Told) -> None:
    for why, some in _grouped(told, lambda facts: facts.problem).items():
        found.problem(
            "folder",
            f"expected a file to be written in {path}, found that {names(some)} cannot "
            f"({why}); give the folder of your checkpoints (--folder), which must be "
            "there on all hosts, with room",
            hosts=some,
        )
    values = [(host, facts.write_seconds) for host, facts in told]
    size = f"{FILE_BYTES >> 20} MiB"
    for host, own, others in _with_others(values):
        # Several times the others' time is no problem if it is negligible.
        if own > _SLOW_FOLDER * others and own > _SLOW_FOLDER_SECONDS:
            found.remark(
                "slow-folder",
                f"expected {size} to be written and flushed in {path} as fast as by "
                f"other hosts, {others:.3g} s (median), found {own:.3g} s by {host}; "
                "see how it is mounted there",
                hosts=(host,),
                expected=others,
                found=own,
                unit="s",
            )
    times = [value for _, value in values if value is not None]
    middle = statistics.median(times) if times else 0.0
    if middle > _SLOW_FOLDER_SECONDS:
        tell = found.problem if middle > _BAD_FOLDER_SECONDS else found.remark
        tell(
            "slow-folder",
            f"expected {size} to be written and flushed within "
            f"{_SLOW_FOLDER_SECONDS:g} s in {path}, found {middle:.3g} s; try others "
            "by `hpcstrat ckpt bench`",
            expected=_SLOW_FOLDER_SECONDS,
            found=middle,
            unit="s",
        )


def _judge_sharing(found: Findings, path: str, told: _Told) -> None:
    # If the first host could not write a file, the other hosts had no file to see.
    if not told or told[0][1].problem:
        return
    first = told[0][0]
    some = tuple(host for host, facts in told if facts.is_seen is False)
    if some:
        found.problem(
            "folder-not-shared",
            f"expected a folder that all hosts share, found that {names(some)} cannot "
            f"see what {first} has made in {path}; give a folder of a file system that "
            "all hosts have (--folder)",
            hosts=some,
        )


def _judge_locks(found: Findings, path: str, told: _Told) -> None:
    for why, some in _grouped(told, lambda facts: facts.unlockable).items():
        found.remark(
            "no-locks",
            f"expected files of {path} to be locked, as HDF5 does, found that "
            f"{names(some)} cannot ({why}); set HDF5_USE_FILE_LOCKING=FALSE, or have "
            "it mounted with locks (Lustre: -o flock)",
            hosts=some,
        )
    some = tuple(host for host, facts in told if facts.is_locked is False)
    if some:
        found.remark(
            "local-locks",
            f"expected locks in {path} to hold on all hosts, found that {names(some)} "
            f"can lock what {told[0][0]} has locked; let one host at a time open a "
            "file for writing, or have it mounted with locks for all (-o flock)",
            hosts=some,
        )
