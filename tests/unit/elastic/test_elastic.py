"""Elastic training without ranks: Open MPI's settings, partners, commits, markers."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.checkpoint.node_memory.snapshot_blocks import partners_of
from hpcstrat.checkpoint.objects import Objects
from hpcstrat.elastic.completion_marker import remove_marker, write_marker
from hpcstrat.elastic.memory_restore import Inventory, choose
from hpcstrat.elastic.snapshots import Key, Snapshot
from hpcstrat.engine.topology.survival import choose_collectives

ENABLED = {"OMPI_MCA_mpi_ft_enable": "1"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "^hcoll,portals4,han"),
        ("", "^hcoll,portals4,han"),
        ("^han", "^han,hcoll,portals4"),
        ("^hcoll,ucc", "^hcoll,ucc,portals4,han"),
        ("basic,han,libnbc", "basic,libnbc"),
    ],
)
def test_collectives_that_are_wrong_after_a_loss_are_left_out(
    given: str | None, expected: str
) -> None:
    environment = dict(ENABLED)
    if given is not None:
        environment["OMPI_MCA_coll"] = given
    choose_collectives(environment)
    assert environment["OMPI_MCA_coll"] == expected


def test_collectives_are_not_touched_without_fault_tolerance() -> None:
    environment = {"OMPI_MCA_coll": "han"}
    choose_collectives(environment)
    assert environment == {"OMPI_MCA_coll": "han"}


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([0, 0, 0], [1, 2, 0]),
        ([0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 1, 0, 1], [1, 0, 3, 2]),
        ([0, 1, 2], [1, 2, 0]),
        ([0, 0, 0, 1], [3, 3, 3, 0]),
        ([0, 1, 1, 1], [1, 0, 0, 0]),
    ],
)
def test_partner_is_on_another_worker(workers: list[int], expected: list[int]) -> None:
    assert partners_of(workers) == expected


def test_partners_share_the_copies() -> None:
    workers = [worker for worker in range(3) for _ in range(4)]
    partners = partners_of(workers)
    assert set(Counter(partners).values()) == {1}
    for replica, partner in enumerate(partners):
        assert workers[replica] != workers[partner]


def _report(joined: int, *keys: Key) -> Inventory:
    return Inventory(joined, 0, [(key, 0, 2, []) for key in keys])


def test_newest_commit_that_all_have_is_chosen() -> None:
    ahead, behind = _report(1, (1, 4), (1, 5)), _report(1, (1, 3), (1, 4))
    assert choose([ahead, behind]) == (1, 4)
    assert choose([ahead, ahead]) == (1, 5)
    # A rank that joined later does not limit the choice, with or without own commits.
    assert choose([ahead, behind, _report(2)]) == (1, 4)
    assert choose([behind, _report(2, (2, 1))]) == (1, 4)
    # A newer commit is chosen only if all ranks have it.
    again = _report(1, (1, 4), (2, 1))
    assert choose([again, _report(2, (2, 1))]) == (2, 1)
    assert choose([again, _report(2)]) == (1, 4)


def test_nothing_is_chosen_where_one_has_no_commit() -> None:
    assert choose([_report(1, (1, 1)), _report(1)]) is None
    assert choose([_report(1), _report(2)]) is None


def _tracked() -> dict[str, hs.Variable]:
    return {
        "weights": hs.Variable(np.arange(4.0), name="weights"),
        "half": hs.Variable(np.ones(3, np.float16), name="half"),
    }


def test_commit_copies_and_uses_its_arrays_again() -> None:
    variables = _tracked()
    commit = Snapshot()
    commit.fill(Objects(variables), {"": "{}"})
    kept = commit.arrays["variables/weights"]
    variables["weights"].assign(np.zeros(4))
    np.testing.assert_array_equal(kept, np.arange(4.0))
    commit.fill(Objects(variables), {"": "{}"})
    assert commit.arrays["variables/weights"] is kept
    assert not kept.any()
    del variables["half"]
    commit.fill(Objects(variables), {"": "{}"})
    assert list(commit.arrays) == ["variables/weights"]


def test_marker_is_whole_or_not_there(tmp_path: Path) -> None:
    marker = tmp_path / "done"
    remove_marker(marker)
    remove_marker(None)
    write_marker(None, {})
    write_marker(marker, {"num_lost": 2})
    assert json.loads(marker.read_text())["num_lost"] == 2
    assert os.listdir(tmp_path) == ["done"]
    remove_marker(marker)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["comm", "on_lost_rank", "progress_thread"])
def test_run_refuses_options_that_it_chooses(name: str) -> None:
    with pytest.raises(ValueError, match=f"options without {name}"):
        hs.elastic.run(lambda strategy, memory: None, **{name: None})


def test_memory_says_what_is_to_be_called_first() -> None:
    memory = hs.elastic.Memory()
    with pytest.raises(RuntimeError, match=r"expected track\(\) before restore"):
        memory.restore()
    memory.track(**_tracked())
    with pytest.raises(RuntimeError, match=r"expected restore\(\) before the first"):
        memory.commit(1)
