"""Arrays of a data set that differ between ranks are warned about; others never."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.data import DatasetOptions
from hpcstrat.engine.options import AutoShardPolicy, InputOptions

pytestmark = pytest.mark.rule


def rows(seed: int, count: int = 60) -> Any:
    return np.random.default_rng(seed).random((count, 3))


def warnings(caplog: Any) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.name == "hpcstrat.data"]
    caplog.clear()
    return [text for text in found if "same arrays" in text]


def test_arrays_of_one_rank_that_differ_are_warned_about(
    strategy: Any, job: Any, caplog: Any
) -> None:
    first = job.rank == 0
    odd = job.rank == job.size - 1
    other = rows(1)
    if odd:
        other[-1, -1] += 1
    sources = {
        "one array": rows(int(odd)),
        "the last element": other,
        "a tree": {"x": rows(0), "y": rows(int(odd))},
        "large": rows(int(odd), 100_000),
        "text": np.array(["a", "b" if odd else "c"] * 10),
    }
    for name, source in sources.items():
        data = hs.Dataset.from_tensor_slices(source).shuffle(10).batch(10)
        strategy.experimental_distribute_dataset(data)
        found = warnings(caplog)
        assert len(found) == (first and job.size > 1), name
        if found:
            assert f"on rank {job.size - 1} than on rank 0" in found[0]
    parts = [hs.Dataset.from_tensor_slices(rows(seed)) for seed in (2, int(odd))]
    strategy.experimental_distribute_dataset(parts[0].concatenate(parts[1]).batch(10))
    assert len(warnings(caplog)) == (first and job.size > 1)


def test_equal_arrays_and_rows_of_each_rank_are_not_warned_about(
    strategy: Any, job: Any, caplog: Any
) -> None:
    def distributed(source: Any, options: InputOptions | None = None) -> list[str]:
        data = hs.Dataset.from_tensor_slices(source).batch(10)
        strategy.experimental_distribute_dataset(data, options)
        return warnings(caplog)

    for source in (
        rows(0),
        rows(0, 100_000),
        rows(0)[::2],
        np.zeros((20, 0)),
        np.array([("a", job.rank)] * 20, object)[:, 0],
        # These have bytes that are not compared.
        rows(0).astype(np.longdouble),
    ):
        assert distributed(source) == []
    own = rows(job.rank)
    assert distributed(own, InputOptions(compare_every=0)) == []
    assert distributed(own, InputOptions(own_rows=True)) == []
    sharded = DatasetOptions(auto_shard_policy=AutoShardPolicy.OFF)
    data = hs.Dataset.from_tensor_slices(own).batch(10).with_options(sharded)
    strategy.experimental_distribute_dataset(data)
    strategy.distribute_datasets_from_function(lambda context: hs.Dataset(own, 10))
    assert warnings(caplog) == []
