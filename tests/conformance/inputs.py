"""The steps of programs that use distributed datasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import hpcstrat as hs
from tests.conformance.observe import UNION, encode_tensor, own
from tests.conformance.pipeline import Pipeline
from tests.conformance.session import Frame, NotBuiltError, Session, VocabularyError

__all__ = ["INPUT_STEPS", "PLAIN_INPUT_STEPS", "function_pipeline", "plain_element"]

# A program without `pull` on an infinite dataset would never end.
_MOST_STEPS = 10_000


def _pipeline(step: dict[str, Any]) -> Pipeline:
    """Return the dataset that the step describes."""
    return Pipeline(step["source"], step.get("transforms", []), step.get("autoshard"))


def _options(step: dict[str, Any]) -> Any:
    """Return the step's input options, or None."""
    options = step.get("options")
    return hs.InputOptions(**options) if options else None


def _distribute(session: Session, pipeline: Pipeline, options: Any) -> Any:
    """Distribute a pipeline with the strategy."""
    return session.strategy.experimental_distribute_dataset(pipeline, options)


def _distributed(session: Session, step: dict[str, Any]) -> Any:
    return _distribute(session, _pipeline(step), _options(step))


def plain_element(value: Any) -> Any:
    """Return this replica's part of an element in JSON form; dicts stay dicts."""
    if isinstance(value, dict):
        return {key: plain_element(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_element(part) for part in value]
    return encode_tensor(value)


def _element(session: Session, element: Any) -> list[Any]:
    """Return the observation of one element of a dataset."""
    return [
        own(plain_element(part)) for part in session.strategy.replicas.parts(element)
    ]


def _pull(session: Session, iterator: Iterator[Any], pull: int | None) -> list[Any]:
    """Call next up to ``pull`` times; if ``pull`` is None, call it until the end."""
    seen: list[Any] = []
    while pull is None or len(seen) < pull:
        if len(seen) > _MOST_STEPS:
            raise VocabularyError("the data set has no end and the step no 'pull'")
        try:
            element = next(iterator)
        except StopIteration:
            seen.append("end")
            break
        seen.append(_element(session, element))
    return seen


def _op_dataset(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    session.iterator = iter(_distributed(session, step))
    return _pull(session, session.iterator, step.get("pull"))


def function_pipeline(
    step: dict[str, Any], num_pipelines: int, pipeline_id: int, num_replicas: int
) -> tuple[Pipeline, dict[str, int]]:
    """Return the dataset that an input function makes, and the context it saw."""
    context = hs.InputContext(num_pipelines, pipeline_id, num_replicas)
    seen = {
        "num_input_pipelines": num_pipelines,
        "input_pipeline_id": pipeline_id,
        "num_replicas_in_sync": num_replicas,
    }
    transforms = list(step.get("transforms", []))
    if step.get("shard"):
        transforms.insert(0, {"shard": [num_pipelines, pipeline_id]})
    if step.get("per_replica_batch_of") is not None:
        size = context.get_per_replica_batch_size(step["per_replica_batch_of"])
        seen["per_replica_batch"] = size
        transforms.append({"batch": size})
    return Pipeline(step["source"], transforms, step.get("autoshard")), seen


def _op_dataset_from_function(
    session: Session, frame: Frame, step: dict[str, Any]
) -> Any:
    contexts: list[dict[str, int]] = []

    def make_dataset(context: Any) -> Pipeline:
        pipeline, seen = function_pipeline(
            step,
            context.num_input_pipelines,
            context.input_pipeline_id,
            context.num_replicas_in_sync,
        )
        contexts.append(seen)
        return pipeline

    dataset = session.strategy.distribute_datasets_from_function(
        make_dataset, _options(step)
    )
    session.iterator = iter(dataset)
    elements = _pull(session, session.iterator, step.get("pull"))
    return {"contexts": {UNION: contexts}, "elements": elements}


def _op_dataset_reduce(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    axis = tuple(step["axis"]) if isinstance(step["axis"], list) else step["axis"]
    return [
        session.strategy.reduce(step["reduce_op"], element, axis=axis)
        for element in _distributed(session, step)
    ]


def _length(value: Any) -> int:
    """Return the number of examples in this replica's part of an element."""
    while isinstance(value, dict | list | tuple):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return int(np.shape(value)[0])


def _op_dataset_loop(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    return [
        [own(_length(part)) for part in session.strategy.replicas.parts(element)]
        for element in _distributed(session, step)
    ]


def _op_get_next_as_optional(
    session: Session, frame: Frame, step: dict[str, Any]
) -> Any:
    session.iterator = iter(_distributed(session, step))
    if not hasattr(session.iterator, "get_next_as_optional"):
        raise NotBuiltError("DistributedIterator.get_next_as_optional")
    seen = []
    for _ in range(step.get("pull") or 1):
        optional = session.iterator.get_next_as_optional()
        present = bool(optional.has_value())
        element = _element(session, optional.get_value()) if present else None
        seen.append([present, element])
    return seen


def _op_next_again(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    return _pull(session, session.iterator, 1)


def _op_two_iterators(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    dataset = _distributed(session, step)
    return [[_element(session, element) for element in iter(dataset)] for _ in range(2)]


INPUT_STEPS = {
    "dataset": _op_dataset,
    "dataset_from_function": _op_dataset_from_function,
    "dataset_reduce": _op_dataset_reduce,
    "dataset_loop": _op_dataset_loop,
    "get_next_as_optional": _op_get_next_as_optional,
    "next_again": _op_next_again,
    "two_iterators": _op_two_iterators,
}
PLAIN_INPUT_STEPS = set(INPUT_STEPS) - {"dataset_reduce"}
