"""A node's counters are read by one of its ranks, and all ranks get the sum."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs

pytestmark = pytest.mark.rule


def test_each_node_is_counted_once(strategy: Any, job: Any, tmp_path: Path) -> None:
    folder = job.bcast(str(tmp_path))
    counter = Path(folder, "sys/cray/pm_counters/energy")
    if job.rank == 0:
        counter.parent.mkdir(parents=True)
        counter.write_text("1000 J 1 us\n")
    job.Barrier()
    meter = hs.metrics.EnergyMeter(strategy, root=folder)
    if job.rank == 0:
        counter.write_text("1750 J 2 us\n")
    job.Barrier()
    found = meter.result()
    assert found["joules"] == 750
    assert found["nodes"] == 1
    texts = job.allgather(found["text"])
    assert texts == [texts[0]] * job.size
    assert np.isclose(found["parts"]["Cray"], 750)
