"""Names of modules and of classes are unique in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hpcstrat"
MODULES = sorted(PACKAGE.rglob("*.py"))

# For each name that exists twice, the reason.
MODULE_EXCEPTIONS = {
    "bench": "folders of two benchmarks: of scaling, and of writing checkpoints",
    "commands": "each tool has its commands beside it",
    "elastic": "horovod.torch.elastic, as Horovod has it",
    "inside": "the calls among the ranks of a replica: in NumPy, PyTorch and JAX",
    "rows": "data.rows, and data.files.rows",
    "streams": "of a data set, and of a GPU",
    "torch": "horovod.torch, as Horovod has it",
}
CLASS_EXCEPTIONS = {
    "Batches": "private ones of stages of data sets, beside that of Keras",
    "Client": "a name of tf.distribute.experimental.rpc, which refuses",
    "DealtBatches": "those of a data set, and those that Keras asks for",
    "Memory": "that of hs.elastic, and one that XLA lends",
    "MultiWorkerMirroredStrategy": "that of tf.distribute.experimental, too",
    "Order": "of a shuffled data set, and of calls in a program of XLA",
    "Rows": "hs.Rows makes an initial value on servers",
    "Server": "a name of tf.distribute.experimental.rpc, which refuses",
    "ShardedVariable": "of a strategy with servers, and of one without",
    "Sink": "of a log, and of bytes that are restored",
    "SyncBatchNorm": "that of Horovod's interface, too",
}


def _twice(found: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for name, place in found:
        places[name].append(place)
    return {name: several for name, several in places.items() if len(several) > 1}


def _module_names() -> Iterable[tuple[str, str]]:
    for path in MODULES:
        place = str(path.relative_to(PACKAGE))
        if path.stem == "__init__":
            yield path.parent.name, place
        elif path.stem not in (path.parent.name, "__main__"):
            # A folder and its main module count as one.
            yield path.stem, place


def _class_names() -> Iterable[tuple[str, str]]:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                yield node.name.lstrip("_"), place


def test_a_module_name_means_one_thing() -> None:
    twice = _twice(_module_names())
    assert {n: p for n, p in twice.items() if n not in MODULE_EXCEPTIONS} == {}
    assert set(MODULE_EXCEPTIONS) <= set(twice), "an exception is needed no more"


def test_a_class_name_means_one_thing() -> None:
    twice = _twice(_class_names())
    assert {n: p for n, p in twice.items() if n not in CLASS_EXCEPTIONS} == {}
    assert set(CLASS_EXCEPTIONS) <= set(twice), "an exception is needed no more"
