"""The repr of each public object describes the object."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs


@pytest.fixture
def objects(tmp_path: Path) -> dict[str, Any]:
    """Return objects that a program creates on one replica."""
    strategy = hs.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        weights = hs.Variable(np.zeros(2), name="w")
        optimizer = hs.optimizers.Adam(1e-3)
        mean = hs.metrics.Mean(name="loss")
    dataset = hs.Dataset(np.zeros((6, 2)), batch_size=3)
    manager = hs.CheckpointManager(tmp_path, w=weights, optimizer=optimizer)
    spec = hs.cluster_resolver.ClusterSpec({"worker": ["a:1", "b:1"]})
    return {
        "strategy": strategy,
        "extended": strategy.extended,
        "variable": weights,
        "optimizer": optimizer,
        "schedule": hs.optimizers.SGD(np.sqrt),
        "metric": mean,
        "group": hs.metrics.MetricGroup([mean]),
        "layer": hs.layers.SyncBatchNormalization(3, name="bn"),
        "dataset": dataset,
        "distributed": strategy.experimental_distribute_dataset(dataset),
        "stream": strategy.experimental_distribute_dataset(
            dataset.filter(lambda rows: True)
        ),
        "iterable": strategy.experimental_distribute_dataset([np.zeros((3, 2))]),
        "function": strategy.distribute_datasets_from_function(lambda _: dataset),
        "manager": manager,
        "algorithm": hs.ReductionToOneDevice(),
        "resolver": hs.cluster_resolver.SimpleClusterResolver(
            spec, task_type="worker", task_id=1
        ),
        "partitioner": hs.partitioners.MinSizePartitioner(16, 4),
        "memory": hs.elastic.Memory(),
        "rows": hs.Rows((4, 2), np.float32, lambda start, stop: np.zeros((4, 2))),
        "context": strategy.run(hs.get_replica_context),
        "server": hs.Server(num_ps=2),
    }


def test_objects_show_what_they_are(objects: dict[str, Any], tmp_path: Path) -> None:
    rows, end = "6 rows of float64[2]", ", for OneDeviceStrategy(replica 0 of 1)>"
    said = {name: repr(thing) for name, thing in objects.items()}
    assert not [text for text in said.values() if re.search(r" at 0x\w+>$", text)]
    assert said == {
        "strategy": "OneDeviceStrategy(replica 0 of 1)",
        "extended": "<StrategyExtended of OneDeviceStrategy(replica 0 of 1)>",
        "variable": "<Variable 'w' float64[2] array([0., 0.])>",
        "optimizer": "<Adam learning_rate=0.001>",
        "schedule": "<SGD learning_rate=sqrt>",
        "metric": "<Mean 'loss' total=0.0, count=0.0>",
        "group": "MetricGroup({'loss': <Mean 'loss' total=0.0, count=0.0>})",
        "layer": "<SyncBatchNormalization 'bn' channels=3, axis=-1, momentum=0.99, "
        "epsilon=0.001>",
        "dataset": "<Dataset of 6 rows of float64[2], in batches of 3>",
        "distributed": f"<DistributedDataset of {rows}, in batches of 3{end}",
        "stream": f"<StreamDataset of a data set of {rows}, in batches of 3, "
        f"filtered{end}",
        "iterable": f"<DealtDataset of the program's own batches{end}",
        "function": f"<DealtDataset of the program's own batches{end}",
        "manager": f"<CheckpointManager of optimizer, w in '{tmp_path}'>",
        "algorithm": "<ReductionToOneDevice(on replica 0)>",
        "resolver": "<SimpleClusterResolver, task worker 1>",
        "partitioner": "MinSizePartitioner(16, 4)",
        "memory": "<Memory of nothing yet, commit 0>",
        "rows": "Rows((4, 2), float32)",
        "context": "ReplicaContext(replica 0 of 1)",
        "server": "Server(num_ps=2, spare_ranks=0)",
    }


class Cells(HTMLParser):
    """An HTML parser that collects texts of cells, and names of tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def shown(thing: Any) -> tuple[str, dict[str, str]]:
    """Return title and rows of an object's table in a notebook."""
    cells = Cells()
    cells.feed(thing._repr_html_())
    assert cells.tags == {"table", "caption", "tbody", "tr", "th", "td", "pre"}
    title, *texts = cells.texts
    return title, dict(zip(texts[::2], texts[1::2], strict=True))


def test_notebooks_show_tables(objects: dict[str, Any]) -> None:
    assert shown(objects["variable"]) == (
        "Variable w",
        {
            "type": "float64[2]",
            "trainable": "True",
            "synchronization": "AUTO",
            "aggregation": "NONE",
            "this replica's value": "[0. 0.]",
        },
    )
    made = "6 rows of float64[2], in batches of 3"
    rows = {"elements": "2", "examples": "6", "global batch": "3", "made of": made}
    assert shown(objects["dataset"]) == ("Dataset", rows)
    title, rows = shown(objects["distributed"])
    assert title == "DistributedDataset"
    assert rows["global batches"] == "2"
    assert rows["strategy"] == repr(objects["strategy"])
    assert shown(objects["dataset"].repeat())[1]["elements"] == "no end"
    assert shown(hs.PerReplica(np.ones(2))) == (
        "PerReplica",
        {"own part 0": "array([1., 1.])"},
    )
    assert shown(hs.Mirrored(3)) == ("Mirrored", {"on all replicas": "3"})


def test_notebooks_run_nothing_that_a_name_or_value_holds() -> None:
    script = "<script>alert('&')</script>"
    _, rows = shown(hs.Mirrored(script))
    assert rows["on all replicas"] == repr(script)
    assert shown(hs.Variable(np.zeros(1), name='a<b>&"c'))[0] == 'Variable a<b>&"c'
    long = shown(hs.PerReplica("x" * 10**6))[1]["own part 0"]
    assert len(long) < 3000
    assert long.endswith("characters in all)")


def test_a_dataset_is_shown_without_calling_its_functions() -> None:
    def function(_: Any) -> Any:
        raise AssertionError

    dataset = hs.Dataset(np.zeros(6)).map(function)
    assert "mapped by" in shown(dataset)[1]["made of"]
