"""Datasets whose elements may differ from TensorFlow's, or which TensorFlow refuses.

Each function checks a step that differs, and returns the id of the table row that
declares the difference, or None.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from tests.conformance.compare import difference, join
from tests.conformance.inputs import function_pipeline, plain_element
from tests.conformance.rules import Memory, equal_on_all
from tests.conformance.views import View

__all__ = ["pipeline_per_replica", "static_tail"]


def _one_shape(spec: Mapping[str, Any]) -> bool:
    """Return whether all elements of a step's dataset have one shape."""
    if "per_replica_batch_of" in spec or "ragged_batches" in spec["source"]:
        return False
    batches = [part for part in spec.get("transforms", []) if "batch" in part]
    return not batches or bool(batches[-1].get("drop_remainder"))


def _has_one_step_more(expected: Any, seen: Any) -> bool:
    """Return whether a dataset has one more step, and is otherwise as expected."""
    steps = expected["elements"]
    if not steps or steps[-1] != "end":
        return False
    known = {**expected, "elements": steps[:-1]}
    found = {**seen, "elements": seen["elements"][: len(steps) - 1]}
    rest = seen["elements"][len(steps) - 1 :]
    one_more = bool(rest) and rest[0] != "end" and rest[1:] in ([], ["end"])
    return one_more and difference(known, found) is None


def static_tail(view: View, memory: Memory) -> str | None:
    """Declare a last step for only those replicas for which there are batches."""
    if view.spec["op"] != "dataset_from_function" or not _one_shape(view.spec):
        return None
    if not view.complete or view.expected_error() is not None:
        return None
    seen = [record["seen"] for record in view.present]
    pairs = [(view.expected, join(seen))]
    if view.per_worker:
        pairs = [(view.expected_of(r), view.seen(r)) for r in range(view.size)]
    declared = all(_has_one_step_more(*pair) for pair in pairs)
    return "dataset-fn-static-tail" if declared else None


def pipeline_per_replica(view: View, memory: Memory) -> str | None:
    """Declare a separate pipeline for each replica, also on several workers.

    The model is the plain iteration of the pipeline that the function makes.
    """
    spec, options = view.spec, view.spec.get("options") or {}
    mode = options.get("experimental_replication_mode")
    if spec["op"] != "dataset_from_function" or mode != "PER_REPLICA":
        return None
    if not (view.per_worker and view.complete):
        return None
    if view.expected_error() != "NotImplementedError":
        return None
    wanted = []
    for rank in range(view.size):
        pipeline, context = function_pipeline(spec, view.size, rank, view.size)
        pull = spec.get("pull")
        elements: list[Any] = [
            [plain_element(element)] for element in itertools.islice(pipeline, pull)
        ]
        if pull is None or len(elements) < pull:
            elements.append("end")
        wanted.append({"contexts": [context], "elements": elements})
    return equal_on_all(view, wanted, "pipeline-per-replica")
