"""Links between ranks, measured."""

from __future__ import annotations

import itertools
import json
import platform
from typing import Any

import pytest

from hpcstrat.errors import CollectiveError
from hpcstrat.topology.links import measure_links

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


def test_nobody_waits_for_one_that_does_not_come(topology: Any, job: Any) -> None:
    last = job.size - 1
    if job.rank != last:
        with pytest.raises(CollectiveError, match="some did not come"):
            measure_links(topology, limit_seconds=0.3)
    job.Barrier()
    # It comes when the others have left, and does not wait for ever, either.
    if job.rank == last:
        with pytest.raises(CollectiveError, match="some did not come"):
            measure_links(topology, limit_seconds=0.3)
    job.Barrier()
