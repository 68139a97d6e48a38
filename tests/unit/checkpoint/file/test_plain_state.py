"""Plain state is restored with its types and values, or an error names its path."""

from __future__ import annotations

import enum
import json
import random
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcstrat as hs
from hpcstrat.checkpoint.file import reader, skeleton
from hpcstrat.checkpoint.file.plain_state import as_text, from_text, is_typed


class Level(enum.IntEnum):
    LOW = 1


class Name(str):
    __slots__ = ()


class State:
    """Plain state that a program saves in a checkpoint."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _text(value: Any) -> str:
    """Return a text that is equal for equal hashable values, for sets in any order."""
    if isinstance(value, (set, frozenset)):
        return f"{type(value)}{sorted(map(_text, value))}"
    if isinstance(value, tuple):
        return f"{type(value)}{list(map(_text, value))}"
    return f"{type(value)}{value!r}"


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in type and value, at all levels."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(_same(a, b) for a, b in pairs)
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_same(a, b) for a, b in pairs)
    if isinstance(one, (set, frozenset)):
        # Compare texts, because NaN is not equal to itself.
        return _text(one) == _text(other)
    return bool(one == other) if type(one) is int else repr(one) == repr(other)


_SCALARS = [np.dtype(letter).type for letter in "?bhilBHILefdFD"]
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**3000), 2**3000),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec=None, exclude_categories=())),
    st.sampled_from(["$", "$tuple", "$dict", '{"$', "\ud83d\ude00"]),
    st.binary(),
    st.binary().map(bytearray),
    st.builds(
        lambda kind, value: kind(value), st.sampled_from(_SCALARS), st.integers(0, 99)
    ),
    st.floats(width=32).map(np.float32),
)
_HASHABLE = st.recursive(
    _LEAVES.filter(lambda value: not isinstance(value, bytearray)),
    lambda keys: st.lists(keys, max_size=3).map(tuple) | st.frozensets(keys),
    max_leaves=4,
)


def _containers(values: Any) -> Any:
    pairs = st.lists(st.tuples(_HASHABLE, values), max_size=4)
    return st.one_of(
        st.lists(values, max_size=4),
        st.lists(values, max_size=4).map(tuple),
        pairs.map(dict),
        pairs.map(OrderedDict),
        st.dictionaries(st.text(max_size=3), values, max_size=4),
        st.lists(_HASHABLE, max_size=4).map(Counter),
        st.sets(_HASHABLE, max_size=4),
    )


_STATES = st.recursive(_LEAVES, _containers, max_leaves=20)


@settings(max_examples=300, deadline=None)
@given(_STATES)
def test_any_plain_state_comes_back(state: Any) -> None:
    text = as_text("counter", state)
    assert _same(from_text(text, typed=is_typed(text)), state)
    # The encoded text must be valid JSON for every value.
    json.loads(text)


STATES: tuple[Any, ...] = (
    {1: "one", "1": "text"},
    # Two values with equal hash slots, so that a set iterates over the later one first.
    {frozenset({7, 15})},
    {"betas": (0.9, 0.999), "best": np.float64(0.25), "steps": np.int32(7)},
    {None: 1, True: 2, 2.5: 3, (1, "a"): {4: 5}},
    {"$tuple": [1, 2]},
    # Two NaN are different keys of a dict.
    {(1, float("nan")): number for number in range(2)},
    {"numbers": [float("inf"), float("nan"), -0.0, 10**5000, -(2**70)]},
    {"raw": b"\x00\xff", "seen": {1, 2}, "both": frozenset({(1, 2)})},
    {"half": "\ud800", "two halves": "\ud83d\ude00", "whole": "😀"},
    random.Random(3).getstate(),
    OrderedDict([("b", 1), ("a", Counter("aab"))]),
)


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_plain_state_comes_back_from_a_file(state: Any, tmp_path: Path) -> None:
    saved, restored = State(state), State()
    hs.CheckpointManager(tmp_path, counter=saved).save(1)
    assert hs.CheckpointManager(tmp_path, counter=restored).restore() == 1
    assert _same(restored.state, state)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": [0, np.zeros(3)]}, r"numpy.ndarray at state\['a'\]\[1\]; keep"),
        ({"mode": Level.LOW}, r"Level at state\['mode'\]; turn it into int"),
        ({Level.LOW: 1}, r"Level at state\[<Level.LOW: 1>\]; turn"),
        ([Name("x")], r"Name at state\[0\]; turn it into str"),
        (defaultdict(int), r"defaultdict at state; turn it into dict"),
        ({"s": {(1, Level.LOW)}}, r"\['s'\] in a set\[1\]; turn it into int"),
        (np.longdouble(1), r"numpy.longdouble at state; return numbers"),
        (np.str_("x"), r"numpy.str_ at state; turn it into str"),
        (object(), r"type object at state; return numbers, text"),
    ],
)
def test_what_would_change_is_refused_by_its_place(
    state: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"state of 'counter'.*{words}"):
        hs.CheckpointManager(tmp_path, counter=State(state))
    counter = State()
    manager = hs.CheckpointManager(tmp_path, counter=counter)
    counter.state = state
    with pytest.raises(ValueError, match=f"state of 'counter'.*{words}"):
        manager.save(1)
    assert manager.checkpoints == []


def test_state_that_holds_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(ValueError, match=r"100 deep at state(\[0\]){8}\.\.\."):
        as_text("counter", state)


def test_files_say_whether_their_state_has_types(tmp_path: Path) -> None:
    counter = State({"plain": [1, 2.5, None, "$", {"$a": 1, "b": 2}]})
    manager = hs.CheckpointManager(tmp_path, max_to_keep=None, counter=counter)
    versions = []
    for step, state in enumerate(({"plain": 1}, {"$a": 1}, {"plain": 2}, (1, 2))):
        counter.state = state
        with h5py.File(manager.save(step)) as file:
            versions.append(int(file.attrs["hpcstrat_format_version"]))
    assert versions == [2, 3, 2, 3]


def test_objects_that_look_like_types_are_plain_in_older_files(tmp_path: Path) -> None:
    """A file of version 2 may contain a dict that encodes a tuple in version 3."""
    counter = State({"$tuple": [1, 2]})
    manager = hs.CheckpointManager(tmp_path, counter=counter)
    with pytest.MonkeyPatch.context() as patch:
        text = json.dumps(counter.state).encode()
        patch.setattr("hpcstrat.checkpoint.objects.as_text", lambda *_: text)
        patch.setattr(skeleton, "is_typed", lambda _: False)
        manager.save(1)
    manager.restore()
    assert counter.state == {"$tuple": [1, 2]}


def test_state_that_readers_would_refuse_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = State("x" * 5000)
    manager = hs.CheckpointManager(tmp_path, counter=counter)
    manager.save(1)
    monkeypatch.setattr(skeleton, "MOST_STATE_BYTES", 4096)
    with pytest.raises(hs.CheckpointError, match="most of it from 'counter'"):
        manager.save(2)
    monkeypatch.setattr(reader, "MOST_STATE_BYTES", 4096)
    with pytest.raises(hs.CheckpointError, match="8,192 bytes in python"):
        manager.restore(manager.checkpoints[0])


def _torch_object(kind: str, **members: Any) -> Any:
    """Return an object that looks like one of torch, which need not be installed."""
    base = type(kind, (State,), {"__module__": "torch.somewhere"})
    found = type("Mine", (base,), {"__module__": "program"})()
    for name, value in members.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    "thing",
    [
        _torch_object("Module"),
        _torch_object("Optimizer", defaults={"lr": 0.1, "betas": (0.9, 0.999)}),
        _torch_object("Optimizer", defaults={"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_torch_objects_with_tensors_are_refused_at_once(
    thing: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"as 'model', found a torch Mine.*Variables"):
        hs.CheckpointManager(tmp_path, model=thing)


def test_plain_torch_objects_are_saved(tmp_path: Path) -> None:
    descent = _torch_object("Optimizer", defaults={"lr": 0.1, "momentum": 0})
    schedule = _torch_object("LRScheduler")
    descent.state, schedule.state = {"state": {}}, {"milestones": Counter([3, 5])}
    manager = hs.CheckpointManager(tmp_path, descent=descent, schedule=schedule)
    manager.save(1)
    descent.state = schedule.state = None
    manager.restore()
    assert descent.state == {"state": {}}
    assert _same(schedule.state, {"milestones": Counter([3, 5])})


def test_models_of_torch_come_back_as_variables(tmp_path: Path) -> None:
    """Torch objects are saved in the form that the error and the guide advise."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="found a torch Sequential"):
        hs.CheckpointManager(tmp_path, model=model)
    weights = {k: hs.Variable(v.numpy()) for k, v in model.state_dict().items()}
    manager = hs.CheckpointManager(tmp_path, model=weights)
    model(torch.ones(5, 4)).sum().backward()
    wanted = {k: v.clone() for k, v in model.state_dict().items()}
    for key, value in model.state_dict().items():
        weights[key].assign(value.numpy())
    manager.save(1)
    for value in model.state_dict().values():
        value.zero_()
    manager.restore()
    restored = {k: torch.from_numpy(v.numpy()) for k, v in weights.items()}
    model.load_state_dict(restored)
    for key, value in model.state_dict().items():
        assert torch.equal(value, wanted[key]), key
