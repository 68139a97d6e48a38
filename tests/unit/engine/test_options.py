"""Enumerations by name, and option dataclasses that validate their fields."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpcstrat as hs
from hpcstrat.engine import options

ENUMERATIONS = [
    hs.ReduceOp,
    hs.VariableSynchronization,
    hs.VariableAggregation,
    hs.CommunicationImplementation,
    hs.InputReplicationMode,
    hs.AutoShardPolicy,
]
RECORDS: list[Any] = [
    hs.CommunicationOptions,
    hs.RunOptions,
    hs.InputOptions,
    hs.InputContext,
    hs.ValueContext,
]


@pytest.mark.parametrize("kind", ENUMERATIONS)
def test_members_are_found_by_name_in_any_case(kind: Any) -> None:
    for name, member in kind.__members__.items():
        for word in (member, name, name.lower(), name.title()):
            assert kind.parse(word) is member


@pytest.mark.parametrize("kind", ENUMERATIONS)
@pytest.mark.parametrize("wrong", ["", "median", None, 17.5, 0, ["SUM"]])
def test_other_words_are_refused_with_the_members(kind: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match=", ".join(kind.__members__)):
        kind.parse(wrong)


@given(st.text())
def test_no_text_is_an_error_of_another_kind(text: str) -> None:
    try:
        member = hs.ReduceOp.parse(text)
    except ValueError:
        return
    assert member.name == text.upper()


def test_reductions_of_aggregations() -> None:
    convert = hs.ReduceOp.from_variable_aggregation
    assert convert("sum") is hs.ReduceOp.SUM
    assert convert(hs.VariableAggregation.MEAN) is hs.ReduceOp.MEAN
    for aggregation in {*hs.VariableAggregation.__members__} - {"SUM", "MEAN"}:
        with pytest.raises(ValueError, match=aggregation):
            convert(aggregation)


@pytest.mark.parametrize("record", RECORDS)
def test_records_have_defaults_are_frozen_and_compare(record: Any) -> None:
    instance = record()
    assert instance == record()
    assert hash(instance) == hash(record())
    assert pickle.loads(pickle.dumps(instance)) == instance
    field = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(instance, field, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_per_pack": -1},
        {"timeout_seconds": 0},
        {"timeout_seconds": -1.0},
        {"implementation": "gloo"},
    ],
)
def test_communication_options_check_their_values(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        hs.CommunicationOptions(**wrong)


def test_words_in_records_become_members() -> None:
    communication = hs.CommunicationOptions(implementation="ring")
    assert communication.implementation is hs.CommunicationImplementation.RING
    per_replica = hs.InputOptions(experimental_replication_mode="per_replica")
    mode = per_replica.experimental_replication_mode
    assert mode is hs.InputReplicationMode.PER_REPLICA


def test_hints_are_the_older_name() -> None:
    assert options.CollectiveHints(5, 2.0) == hs.CommunicationOptions(5, 2.0)


@given(st.integers(1, 50), st.integers(0, 500))
def test_batch_size_of_a_replica_divides_or_is_an_error(count: int, size: int) -> None:
    context = hs.InputContext(num_replicas_in_sync=count)
    if size % count:
        with pytest.raises(ValueError, match=str(size)):
            context.get_per_replica_batch_size(size)
    else:
        assert context.get_per_replica_batch_size(size) * count == size
