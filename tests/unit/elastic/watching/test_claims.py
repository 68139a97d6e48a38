"""One watcher claims a generation, and one part of the nodes at most goes first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hpcstrat.elastic.watching import claims
from hpcstrat.elastic.watching.claims import Generation

GENERATION = Generation(1, "node1", ("node1", "node2"), ("node1",), job="Slurm 7.0")


def test_one_of_many_claims_succeeds(tmp_path: Path) -> None:
    for number in range(1, 6):
        wanted = [
            replace(GENERATION, number=number, leader=f"node{i}") for i in range(16)
        ]
        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(lambda one: claims.create(tmp_path, one), wanted))
        assert sum(won) == 1
        assert claims.newest(tmp_path) == number
        assert claims.read(tmp_path, number) == wanted[won.index(True)]


def test_a_half_written_claim_is_none(tmp_path: Path) -> None:
    assert claims.newest(tmp_path) == 0
    (tmp_path / "gen-1").touch()
    for text in ("", "{", "[]", "{}", '{"number": 1}'):
        (tmp_path / "gen-1").write_text(text)
        assert claims.read(tmp_path, 1) is None
    assert not claims.create(tmp_path, GENERATION)
    (tmp_path / "gen-x").touch()
    assert claims.newest(tmp_path) == 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_at_most_one_part_of_the_nodes_need_not_wait(parts: list[int]) -> None:
    """The network is divided: each part hears nothing of the others."""
    members = [f"node{i}" for i in range(len(parts))]
    first = []
    for part in set(parts):
        living = [name for name, own in zip(members, parts, strict=True) if own == part]
        lost = {name: "silent" for name in members if name not in living}
        if not claims.is_minority(living, members, lost):
            first.append(living)
    assert len(first) <= 1
    assert all(2 * len(living) > len(members) for living in first)


@given(st.integers(1, 10), st.integers(0, 10))
def test_nodes_that_have_ended_are_not_waited_for(living: int, ended: int) -> None:
    names = [f"node{i}" for i in range(living + ended)]
    lost = dict.fromkeys(names[living:], "closed")
    assert not claims.is_minority(names[:living], names, lost)
    # Nodes that an earlier generation has lost are no members of the last one.
    lost |= dict.fromkeys([f"old{i}" for i in range(20)], "silent")
    assert not claims.is_minority(names[:living], names, lost)
