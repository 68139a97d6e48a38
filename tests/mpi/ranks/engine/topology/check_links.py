"""Measurements of the links between ranks."""

from __future__ import annotations

import itertools
import json
import platform
from typing import Any

import pytest

from hpcstrat.engine.topology import links as links_module
from hpcstrat.engine.topology.links import measure_links
from hpcstrat.errors import CollectiveError

pytestmark = pytest.mark.algorithm


def test_all_workers_measure_all_links(topology: Any, job: Any) -> None:
    links = measure_links(topology, nbytes=1 << 16)
    assert all(other == links for other in job.allgather(links))
    workers = job.allgather(topology.worker_id)
    first = [workers.index(worker) for worker in range(topology.num_workers)]
    last = [job.size - 1 - workers[::-1].index(w) for w in range(topology.num_workers)]
    between = {tuple(sorted(link.ranks)) for link in links.between}
    assert between == set(itertools.combinations(first, 2))
    assert len(between) == len(links.between)
    inside = [link.ranks for link in links.inside]
    assert inside == [
        ends for ends in zip(first, last, strict=True) if ends[0] != ends[1]
    ]
    assert not links.unanswered
    assert not links.is_sample
    assert links.num_workers == topology.num_workers
    for link in links.inside + links.between:
        assert link.hosts == (platform.node(),) * 2
        assert 0 < link.latency_seconds < 10
        assert 0 < link.bandwidth_bytes_per_second < 1e13
    told = json.loads(json.dumps(links.to_json()))
    assert len(told["between"]) == len(links.between)


@pytest.mark.once
def test_nobody_waits_for_one_that_does_not_come(topology: Any, job: Any) -> None:
    if job.size == 1:
        pytest.skip("one rank waits for nobody")
    last = job.size - 1
    if job.rank != last:
        with pytest.raises(CollectiveError, match="some did not come"):
            measure_links(topology, limit_seconds=0.3)
    job.Barrier()
    # The last rank arrives after the other ranks have left, and times out, too.
    if job.rank == last:
        with pytest.raises(CollectiveError, match="some did not come"):
            measure_links(topology, limit_seconds=0.3)
    job.Barrier()


def test_of_many_workers_some_pairs_are_measured(
    topology: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "MOST_IN_FULL", 2)
    links = measure_links(topology, nbytes=1 << 10)
    count = topology.num_workers
    assert links.is_sample == (count > 2)
    assert not links.unanswered
    # The workers are paired in two rounds; with three workers, one rests in each round.
    expected = {1: 0, 2: 1, 3: 2, 4: 4}
    assert len(links.between) == expected[count]
    assert all(other == links for other in job.allgather(links))
