"""Statistics of late ranks, and their report."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstrat.engine.observe.arrival_report import (
    BINS,
    ROW_BYTES,
    ArrivalReport,
    ReplicaArrivals,
)
from hpcstrat.engine.topology.topology import STATUS_BYTES

_SECONDS = st.floats(0, 1e9)
_COUNTS = st.integers(0, 1 << 40)
_ROWS = st.builds(
    ReplicaArrivals,
    replica=st.integers(0, 1 << 30),
    host=st.text("abcxyz-0123.", max_size=48),
    elapsed_seconds=_SECONDS,
    calls=_COUNTS,
    waits=_COUNTS,
    waited_seconds=_SECONDS,
    longest_seconds=_SECONDS,
    longest_call=st.text("reduce(SUM) of float32[4]", max_size=112),
    histogram=st.tuples(*[st.integers(0, (1 << 32) - 1)] * BINS),
    data_waits=_COUNTS,
    data_seconds=_SECONDS,
    data_longest_seconds=_SECONDS,
    awaited=st.lists(st.tuples(st.integers(0, 1 << 30), _SECONDS), max_size=4).map(
        tuple
    ),
)


@given(_ROWS)
def test_numbers_come_back_as_they_were(row: ReplicaArrivals) -> None:
    data = row.packed()
    assert len(data) == ROW_BYTES
    assert ReplicaArrivals.unpacked(data + b"more") == row


def test_numbers_fit_their_part_of_the_status() -> None:
    assert ROW_BYTES <= 512 <= STATUS_BYTES


@given(_ROWS, st.integers(0, ROW_BYTES - 1), st.integers(1, 255))
def test_half_written_numbers_are_noticed(
    row: ReplicaArrivals, place: int, change: int
) -> None:
    data = bytearray(row.packed())
    data[place] ^= change
    assert ReplicaArrivals.unpacked(bytes(data)) is None


def test_nothing_written_is_nothing() -> None:
    assert ReplicaArrivals.unpacked(bytes(ROW_BYTES)) is None


def test_long_texts_and_many_replicas_are_shortened() -> None:
    awaited = tuple((replica, 9.0 - replica) for replica in range(8))
    row = ReplicaArrivals(0, "h\u00e9" * 99, 1.0, longest_call="\u00e9" * 99)
    row = dataclasses.replace(row, awaited=awaited)
    found = ReplicaArrivals.unpacked(row.packed())
    assert found is not None
    assert row.host.startswith(found.host)
    assert len(found.host) > 20
    assert row.longest_call.startswith(found.longest_call)
    assert found.awaited == awaited[:4]


def _report(*waited: float, elapsed: float = 100.0, **more: object) -> ArrivalReport:
    return ArrivalReport(
        tuple(
            dataclasses.replace(
                ReplicaArrivals(replica, f"node{replica}", elapsed, 1000, 900, seconds),
                **more,
            )
            for replica, seconds in enumerate(waited)
        )
    )


def test_who_waits_least_is_late() -> None:
    report = _report(20.0, 19.5, 0.5, 20.1)
    assert [row.replica for row in report.slowest()] == [2]
    assert report.behind_seconds(report[2]) == pytest.approx(19.6)
    assert report.share == pytest.approx(60.1 / 4 / 100)
    assert "replica 2 on node2 (19.6 s behind the quickest)" in report.sentence()


def test_nobody_is_late_where_all_wait_alike() -> None:
    assert _report(10.0, 9.5, 9.9, 10.1).slowest() == ()
    assert _report(0.0, 0.0).slowest() == ()
    assert "late:" not in _report(0.0, 0.0).sentence()


def test_uneven_work_is_named_only_where_replicas_are_late_in_turn() -> None:
    words = "pass Dataset.batch(costs=...)"
    assert words in _report(20.0, 19.0, 19.8, 20.1).sentence()
    assert words not in _report(20.0, 19.5, 0.5, 20.1).sentence()
    assert words not in _report(2.0, 1.9, 1.98, 2.01).sentence()


def test_one_early_replica_makes_not_all_others_late() -> None:
    report = _report(20.0, 1.0, 1.2, 0.9)
    assert [row.replica for row in report.slowest()] == [3]


def test_many_late_replicas_are_named_shortly() -> None:
    report = _report(*[0.1] * 5, *[9.0] * 6)
    assert len(report.slowest()) == 5
    assert "and 2 more" in report.sentence()


def test_table_has_a_line_for_each_replica_slowest_first() -> None:
    report = _report(3.0, 1.0, 2.0)
    lines = str(report).splitlines()[2:]
    assert [int(line.split()[0]) for line in lines] == [1, 2, 0]
    assert str(_report(*[1.0] * 30)).endswith("and 6 that waited longer")


def test_share_of_those_that_were_waited_for() -> None:
    report = _report(9.0, 9.0, 1.0, awaited=((2, 7.0), (1, 1.0)))
    assert report.awaited() == {2: 21.0, 1: 3.0}
    assert "waited for in 88% of it" in report.sentence()
