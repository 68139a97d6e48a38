"""The choice of a reduction's algorithm by size, and its display."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from hpcstrat.cli.main import main
from hpcstrat.engine.algorithms.exchanged import FEW_EXCHANGING
from hpcstrat.engine.algorithms.select import (
    MOST_DIRECT_RANKS,
    imagined,
    schedule,
    select,
)
from hpcstrat.engine.algorithms.work import IN_HEADER
from hpcstrat.engine.channel.wire_headers import room_bytes
from hpcstrat.engine.options import CommunicationOptions

MPI = "all-reduce of MPI"


@pytest.mark.parametrize("each", [1, 2, 64])
def test_few_workers_leave_nothing_to_mpi(each: int) -> None:
    for workers in range(2, FEW_EXCHANGING + 1):
        ways = [how for _, how in schedule(workers, each)]
        assert ways[0] == IN_HEADER
        assert len(ways) == 2
        assert MPI not in ways


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 100, 4096])
def test_few_ranks_of_a_worker_leave_nothing_to_mpi(bytes_per_pack: int) -> None:
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
    for each in range(2, MOST_DIRECT_RANKS + 1):
        for nbytes in (1, 100, 3000, 10_000, 1 << 20):
            assert select(nbytes, imagined(1, each), options).how != MPI


def test_ways_begin_at_one_byte_and_follow_each_other() -> None:
    for workers in (1, 2, 3, 5, 17, 100, 3000):
        starts = [start for start, _ in schedule(workers, 4)]
        assert starts[0] == 1
        assert starts == sorted(set(starts))


@pytest.mark.parametrize("each", [1, 4])
def test_what_a_header_carries_is_one_piece(each: int) -> None:
    for workers in range(2, 70):
        topology = imagined(workers, each)
        for nbytes in range(64, room_bytes(workers) + 64, 960):
            choice = select(nbytes, topology, CommunicationOptions())
            assert not choice.small or choice.piece_bytes >= nbytes


def test_headers_carry_less_of_each_of_more_workers() -> None:
    rooms = [room_bytes(workers) for workers in range(2, 5000)]
    assert rooms == sorted(rooms, reverse=True)
    # Values in headers are so few that the headers' latency dominates.
    assert max(room * (p - 1) for p, room in enumerate(rooms, 2)) <= 256 << 10
    assert rooms[-1] == 0
    starts: Any = dict(map(reversed, schedule(8, 1)))
    assert starts[MPI] == room_bytes(8) + 1


def test_info_shows_the_ways_of_a_job() -> None:
    words = "info", "--workers", "8", "--ranks-per-worker", "4"
    text = CliRunner().invoke(main, words).output
    for start, how in schedule(8, 4):
        assert any(f"{start:,} " in line and how in line for line in text.splitlines())
    environment = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "6"}
    environment["OMPI_COMM_WORLD_LOCAL_SIZE"] = "3"
    text = CliRunner().invoke(main, ["info"], env=environment).output
    assert "of 2 workers of 3 ranks" in text
