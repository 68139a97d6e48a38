"""The findings of ``hpcstrat doctor`` for given facts and measurements."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpcstrat.engine.observe.timeline.alignment import Sample
from hpcstrat.engine.topology.links import Link, Links
from hpcstrat.tools.doctor.examination import RankFacts, compare
from hpcstrat.tools.doctor.findings import names
from hpcstrat.tools.doctor.judging import judge, summarize
from hpcstrat.tools.doctor.local import (
    FolderFacts,
    Locked,
    MemoryProbe,
    look_at_folder,
    within,
)
from hpcstrat.tools.doctor.rank_measures import RankMeasures

GIB = 1 << 30
SECOND = 10**9
GOOD_FOLDER = FolderFacts("Lustre", 0.01, is_seen=True, is_locked=True)


def _facts(rank: int, host: str, cores: set[int], **more: Any) -> RankFacts:
    facts: dict[str, Any] = {"launcher_cores": frozenset(cores), "threads": "1"}
    facts |= {"shm_bytes": 4 * GIB, "gpus": (), "versions": ()} | more
    return RankFacts(rank, host, frozenset(cores), **facts)


def _hosts(count: int) -> list[RankFacts]:
    return [_facts(rank, f"node{rank}", {0, 1}) for rank in range(count)]


def _links(count: int, slow: Any) -> Links:
    """Return links of hosts; a link is 10 times slower if ``slow`` returns True."""
    between = []
    for pair in itertools.combinations(range(count), 2):
        factor = float(slow(pair)) * 9 + 1
        hosts = f"node{pair[0]}", f"node{pair[1]}"
        between.append(Link(hosts, pair, 2e-6 * factor, 1e10 / factor))
    return Links((), tuple(between), (), count, False, 1 << 20)


def _clock(offset_seconds: float, drift: float = 0.0) -> list[Sample]:
    """Return two measurements, 10 s apart, of a clock that is this far ahead."""
    offset = round(-offset_seconds * SECOND)
    later = offset - round(10 * drift * SECOND)
    return [Sample(SECOND, offset, 20_000), Sample(11 * SECOND, later, 20_000)]


def _judged(measures: list[RankMeasures]) -> Any:
    found = judge(summarize("/scratch", _hosts(len(measures)), measures))
    return found.problems, found.remarks


def _healthy(count: int) -> list[RankMeasures]:
    measures = [
        RankMeasures(1.0, None, 1e10, 6e9, GOOD_FOLDER, _clock(0.001 * rank))
        for rank in range(count)
    ]
    measures[0].links = _links(count, lambda pair: False)
    return measures


def test_nothing_is_said_of_what_is_well() -> None:
    assert _judged(_healthy(5)) == ([], [])
    found = compare(_hosts(3))
    assert not found.problems + found.remarks


def test_a_slow_link_is_named_and_a_slow_host_instead_of_its_links() -> None:
    measures = _healthy(5)
    measures[0].links = _links(5, lambda pair: pair == (1, 3))
    problems, remarks = _judged(measures)
    assert [(one.name, one.hosts) for one in problems] == [
        ("slow-link", ("node1", "node3"))
    ]
    assert problems[0].ranks == (1, 3)
    assert "others, 10 GB/s (median), found 1 GB/s; " in problems[0].text
    assert not remarks
    measures[0].links = _links(5, lambda pair: 2 in pair)
    problems, _ = _judged(measures)
    assert [(one.name, one.hosts) for one in problems] == [("slow-host", ("node2",))]
    assert "sbatch --exclude=node2" in problems[0].text


def test_a_link_that_was_disturbed_makes_no_slow_host_of_a_slow_link() -> None:
    measures = _healthy(4)
    # One of node1's three links is 351 times slower, and another 2.8 times slower.
    measures[0].links = _links(
        4, lambda pair: {(1, 3): 350 / 9, (1, 2): 0.2}.get(pair, 0)
    )
    problems, remarks = _judged(measures)
    assert [(one.name, one.hosts) for one in problems] == [
        ("slow-link", ("node1", "node3"))
    ]
    assert [one.hosts for one in remarks] == [("node1", "node2")]


def test_a_dead_link_is_a_problem() -> None:
    measures = _healthy(2)
    measures[0].links = Links((), (), ((0, 1),), 2, False, 1 << 20)
    problems, _ = _judged(measures)
    assert [(one.name, one.hosts) for one in problems] == [
        ("dead-link", ("node0", "node1"))
    ]


@pytest.mark.parametrize("fast", [0, 2])
def test_the_clock_that_is_off_is_named_and_not_those_it_is_compared_with(
    fast: int,
) -> None:
    # All clocks are compared with that of replica 0, which may itself be wrong.
    measures = _healthy(4)
    for rank, told in enumerate(measures):
        told.clocks = _clock(3.0 * (rank == fast) - 3.0 * (fast == 0))
    problems, remarks = _judged(measures)
    assert [(one.name, one.hosts) for one in problems] == [("clock", (f"node{fast}",))]
    assert problems[0].found == pytest.approx(3.0)
    assert "3 s ahead of the other hosts'" in problems[0].text
    assert not remarks


def test_clocks_that_drift_or_are_a_little_off_are_remarks() -> None:
    measures = _healthy(3)
    measures[1].clocks = _clock(0.0, drift=0.002)
    measures[2].clocks = _clock(-0.2)
    problems, remarks = _judged(measures)
    assert not problems
    assert [(one.name, one.hosts) for one in remarks] == [
        ("clock-drift", ("node1",)),
        ("clock", ("node2",)),
    ]
    assert "0.2 s behind" in remarks[1].text


def test_folders_are_compared() -> None:
    measures = _healthy(4)
    measures[1].folder = FolderFacts("NFS", problem="Read-only file system")
    measures[2].folder = FolderFacts("NFS", 2.0, is_seen=False)
    measures[3].folder = FolderFacts("NFS", 0.01, "", "flock: no", True, False)
    problems, remarks = _judged(measures)
    assert [(one.name, one.hosts) for one in problems] == [
        ("folder", ("node1",)),
        ("folder-not-shared", ("node2",)),
    ]
    assert [(one.name, one.hosts) for one in remarks] == [
        ("slow-folder", ("node2",)),
        ("no-locks", ("node3",)),
        ("local-locks", ("node3",)),
    ]


def test_what_could_not_be_measured_is_a_problem_and_is_told_once() -> None:
    measures = _healthy(2)
    for told in measures:
        told.troubles.append(("links", "some did not come"))
    problems, _ = _judged(measures)
    assert [one.name for one in problems] == ["not-measured"]


def test_slow_memory_and_a_slow_start_are_remarks() -> None:
    measures = _healthy(3)
    measures[1].memory_alone = 3e9
    for told in measures:
        told.init_seconds = 50.0
    problems, remarks = _judged(measures)
    assert not problems
    assert [one.name for one in remarks] == ["slow-memory", "slow-mpi-init"]


def test_figures_can_be_written_as_json() -> None:
    measured = summarize("/scratch", _hosts(3), _healthy(3))
    told = json.loads(json.dumps(measured.to_json()))
    assert told["hosts"][1]["memory_together"] == 6e9
    assert told["hosts"][2]["clock_offset_seconds"] == pytest.approx(0.001)
    assert told["links"]["between"][0]["hosts"] == ["node0", "node1"]


def test_ranks_that_the_launcher_has_bound_to_one_core_are_named() -> None:
    every = frozenset(range(4))
    ranks = [_facts(rank, "node0", {0}, launcher_cores=every) for rank in range(2)]
    ranks += [_facts(2, "node0", {1, 2}, launcher_cores=every)]
    found = compare(ranks)
    assert [(one.name, one.ranks) for one in found.problems] == [
        ("shared-core", (0, 1))
    ]
    assert not found.remarks
    # The ranks share the only core, which may be intended.
    found = compare([_facts(rank, "node0", {0}) for rank in range(2)])
    assert not found.problems
    assert [one.name for one in found.remarks] == ["few-cores"]


def test_more_threads_than_cores_are_a_remark() -> None:
    found = compare([_facts(0, "node0", {0}, threads="4")])
    assert [one.name for one in found.remarks] == ["threads"]
    # The host has enough cores, but not the set to which the rank is bound.
    ranks = [_facts(0, "node0", {0}, threads="2"), _facts(1, "node0", {1, 2, 3})]
    found = compare(ranks)
    assert [(one.name, one.ranks) for one in found.remarks] == [("threads", (0,))]
    assert not compare([_facts(0, "node0", {0, 1}, threads="2")]).remarks


def test_a_small_dev_shm_is_named_by_itself_and_beside_larger_ones() -> None:
    ranks = [
        _facts(r, f"node{r}", {0}, shm_bytes=size)
        for r, size in enumerate((4 * GIB, GIB // 4, 4 * GIB))
    ]
    found = compare(ranks)
    assert [(one.name, one.hosts) for one in found.remarks] == [
        ("small-shm", ("node1",))
    ]
    small = compare([_facts(0, "node0", {0}, shm_bytes=GIB >> 4)])
    assert [one.name for one in small.remarks] == ["small-shm"]


def test_memory_of_ended_programs_is_named_with_its_folders() -> None:
    stale = (("/dev/shm/hpcstrat-1-a", 3 << 20), ("/dev/shm/hpcstrat-1-b", 1 << 20))
    ranks = [_facts(r, f"node{r // 2}", {r}, stale=stale * (r > 1)) for r in range(4)]
    [found] = compare(ranks).remarks
    assert (found.name, found.hosts) == ("stale-memory", ("node1",))
    assert "4 MiB" in found.text
    assert found.text.endswith("rm -r /dev/shm/hpcstrat-1-a /dev/shm/hpcstrat-1-b")


def test_names_of_many_are_cut() -> None:
    assert names(["a"]) == "a"
    assert names(["a", "b", "c"]) == "a, b and c"
    assert names([f"n{i}" for i in range(100)]).endswith("n8 and 91 more hosts")


def test_a_folder_is_looked_at_and_left_as_it_was(tmp_path: Path) -> None:
    folder = str(tmp_path)
    held = Locked(folder, "token")
    facts = look_at_folder(folder, "token", 1, 10.0)
    held.close()
    assert not facts.problem + facts.unlockable
    assert facts.write_seconds > 0
    assert facts.is_seen
    # A lock of another descriptor counts, as a lock of another process would.
    assert facts.is_locked
    assert not list(tmp_path.iterdir())
    gone = look_at_folder(f"{folder}/none", "token", 1, 10.0)
    assert gone.problem == "No such file or directory"


def test_locks_that_nobody_else_sees_and_none_at_all_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Locked(str(tmp_path), "token")
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert look_at_folder(str(tmp_path), "token", 1, 10.0).is_locked is False

    def refuse(*_: Any) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(fcntl, "flock", refuse)
    facts = look_at_folder(str(tmp_path), "token", 1, 10.0)
    assert facts.unlockable == "flock: Function not implemented"
    assert facts.is_seen
    assert facts.is_locked is None
    held.close()


def test_what_hangs_is_given_up() -> None:
    read, write = os.pipe()
    with pytest.raises(TimeoutError, match="no answer in "):
        within(0.05, lambda: os.read(read, 1))
    os.write(write, b"x")
    with pytest.raises(ZeroDivisionError):
        within(1.0, lambda: 1 // 0)


def test_memory_is_measured() -> None:
    assert 1e7 < MemoryProbe(1).bytes_per_second() < 1e13
