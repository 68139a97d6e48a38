"""Rules for keeping checkpoints, compared with an oracle, and the files on the disk."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import hpcstrat as hs
from hpcstrat.checkpoint.file import skeleton
from hpcstrat.checkpoint.file.reader import read_header, read_root
from hpcstrat.checkpoint.file.schema import FORMAT_VERSION, checkpoint_name
from hpcstrat.checkpoint.keep import retention
from hpcstrat.checkpoint.keep.retention import (
    Found,
    KeepRules,
    best_path,
    checked_metrics,
    kept,
    ranked,
)
from hpcstrat.errors import CheckpointError, CorruptCheckpointError

NOW = 1_790_000_000_000_000_000
SECOND = 10**9


def _anchors(found: Sequence[Found], distance: timedelta) -> set[str]:
    """Return the checkpoints that are at least a distance after all earlier anchors."""
    anchors: list[Found] = []
    for one in found:
        since = [one.created_unix_ns - other.created_unix_ns for other in anchors]
        if all(each >= distance.total_seconds() * SECOND for each in since):
            anchors.append(one)
    return {one.path for one in anchors}


def _better(one: float, other: float, mode: str) -> bool:
    if math.isnan(one) or math.isnan(other):
        return not math.isnan(one)
    return one < other if mode == "min" else one > other


def _is_best(one: Found, found: Sequence[Found], rule: hs.KeepBest) -> bool:
    mine = one.metrics.get(rule.metric, math.nan)
    if math.isnan(mine):
        return False
    count = 0
    for other in found:
        theirs = other.metrics.get(rule.metric, math.nan)
        equal_and_earlier = theirs == mine and other.step < one.step
        count += _better(theirs, mine, rule.mode) or equal_and_earlier
    return count < rule.count


def _oracle(found: Sequence[Found], rules: KeepRules, now: int) -> set[str]:
    """Return the kept checkpoints, by checking each rule for each checkpoint."""
    keep = set()
    for one in found:
        newer = sum(other.step > one.step for other in found)
        asks = [rules.max_to_keep is None or newer < rules.max_to_keep]
        if isinstance(rules.keep_every, timedelta):
            asks.append(one.path in _anchors(found, rules.keep_every))
        elif rules.keep_every is not None:
            asks.append(one.step % rules.keep_every == 0)
        if rules.keep_best is not None:
            asks.append(_is_best(one, found, rules.keep_best))
        if isinstance(rules.keep_for, int):
            asks.append(now - one.created_unix_ns < rules.keep_for * SECOND)
        if any(asks):
            keep.add(one.path)
    return keep


# Draw from few values, so that many metrics are equal or special.
_numbers = st.sampled_from([0.0, -0.0, 0.5, 1.0, math.nan, math.inf, -math.inf])
_metrics = st.dictionaries(st.sampled_from(["loss", "accuracy"]), _numbers)


@st.composite
def _folders(draw: st.DrawFn) -> list[Found]:
    """Return checkpoints in order of steps; their clock times may decrease."""
    steps = sorted(draw(st.sets(st.integers(0, 15), max_size=10)))
    found = []
    for step in steps:
        age = draw(st.integers(-2, 9)) * SECOND
        found.append(Found(checkpoint_name(step), step, NOW - age, draw(_metrics)))
    return found


_rules = st.builds(
    KeepRules,
    max_to_keep=st.sampled_from([None, 1, 1, 1, 2, 3]),
    keep_every=st.none()
    | st.integers(1, 6)
    | st.integers(1, 5).map(lambda seconds: timedelta(seconds=seconds)),
    keep_best=st.none()
    | st.builds(
        hs.KeepBest,
        st.sampled_from(["loss", "accuracy"]),
        st.sampled_from(["min", "max"]),
        st.integers(1, 3),
    ),
    keep_for=st.none() | st.integers(1, 8),
)


def _aged(*ages: int) -> list[Found]:
    """Return checkpoints with equal metrics and with these ages in seconds."""
    return [
        Found(checkpoint_name(step), step, NOW - age * SECOND, {"loss": 0.5})
        for step, age in enumerate(ages, 1)
    ]


@example(_aged(6, 5, 4, 2, 0), KeepRules(1, timedelta(seconds=2)), Random(0))
@example(_aged(3, 2, 1, 0), KeepRules(1, keep_best=hs.KeepBest("loss")), Random(0))
@example(_aged(3, 2, 1, 0), KeepRules(1, keep_for=2), Random(0))
@given(_folders(), _rules, st.randoms())
def test_each_is_kept_that_any_rule_asks_for(
    found: list[Found], rules: KeepRules, order: Any
) -> None:
    wanted = _oracle(found, rules, NOW)
    if found:
        assert found[-1].path in wanted
    # The order in which the checkpoints are found does not matter.
    order.shuffle(found)
    assert kept(found, rules, NOW) == wanted


@given(_folders(), _rules)
def test_what_is_left_stays_until_another_one_comes(
    found: list[Found], rules: KeepRules
) -> None:
    keep = kept(found, rules, NOW)
    left = [one for one in found if one.path in keep]
    assert kept(left, rules, NOW) == keep


@example(_aged(6, 5, 4, 3, 2, 1, 0), KeepRules(1, timedelta(seconds=2)))
@given(_folders(), _rules)
def test_those_that_are_kept_for_ever_are_the_same_after_every_save(
    found: list[Found], rules: KeepRules
) -> None:
    """The kept checkpoints are the same for saves one by one, and for all at once."""
    left: list[Found] = []
    for one in found:
        left.append(one)
        keep = kept(left, rules, NOW)
        left = [other for other in left if other.path in keep]
    assert {one.path for one in left} == kept(found, rules, NOW)


def test_best_is_never_nan_and_the_earlier_of_equal_ones() -> None:
    values = [math.nan, 2.0, 1.0, 1.0, math.inf, None]
    found = [
        Found(str(step), step, NOW, {} if value is None else {"loss": value})
        for step, value in enumerate(values)
    ]
    least, greatest = hs.KeepBest("loss", count=9), hs.KeepBest("loss", "max", 9)
    assert [one.step for one in ranked(found, least)] == [2, 3, 1, 4]
    assert [one.step for one in ranked(found, greatest)] == [4, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_to_keep": 0}, "max_to_keep >= 1 or None, found 0"),
        ({"max_to_keep": "3"}, "max_to_keep >= 1 or None, found '3'"),
        ({"max_to_keep": 2.5}, "max_to_keep >= 1 or None, found 2.5"),
        ({"max_to_keep": True}, "max_to_keep >= 1 or None, found True"),
        ({"keep_every": 0}, "keep_every >= 1 or None, found 0"),
        ({"keep_every": -1.5}, "keep_every >= 1 or None, found -1.5"),
        ({"keep_every": timedelta(0)}, "keep_every to be a time above 0"),
        ({"keep_best": "loss"}, "keep_best to be a KeepBest or None, found 'loss'"),
        ({"keep_for": 0}, "keep_for to be a time above 0, found 0"),
        ({"keep_for": -1.0}, "keep_for to be a time above 0, found -1.0"),
        ({"keep_for": math.nan}, "keep_for to be a time above 0, found nan"),
        ({"keep_for": math.inf}, "keep_for to be a time above 0, found inf"),
        ({"keep_for": "1h"}, "keep_for to be a time above 0, found '1h'"),
        ({"keep_for": timedelta(days=-1)}, "keep_for to be a time above 0"),
    ],
)
def test_rules_that_cannot_be_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"expected .*; pass ") as caught:
        hs.CheckpointManager(tmp_path / "never", x=hs.Variable(1.0), **options)
    assert words in str(caught.value)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("",), "name of a metric"),
        ((7,), "name of a metric"),
        (("loss", "least"), "mode to be 'min' or 'max', found 'least'"),
        (("loss", "min", 0), "count >= 1, found 0"),
        (("loss", "min", 1.5), "count >= 1, found 1.5"),
    ],
)
def test_best_that_cannot_be_is_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hs.KeepBest(*arguments)


@pytest.mark.parametrize(
    "value",
    [0.25, np.float32(0.25), np.array(0.25, np.float16), np.longdouble(0.25)],
    ids=lambda value: type(value).__name__,
)
def test_metrics_are_numbers_of_any_kind(value: Any) -> None:
    found = checked_metrics({"b": value, "a": 3})
    assert list(found.items()) == [("a", 3.0), ("b", 0.25)]
    assert {type(number) for number in found.values()} == {float}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ([("loss", 1.0)], "metrics to be numbers by name"),
        (0.5, "metrics to be numbers by name, found 0.5"),
        ({"": 1.0}, "name of a metric, found ''"),
        ({3: 1.0}, "name of a metric, found 3"),
        ({"ä" * 128: 1.0}, "use text of 1 to 255 bytes"),
        ({"a\0b": 1.0}, "name of a metric"),
        ({"loss": "0.5"}, "metric 'loss' to be one real number, found '0.5'"),
        ({"loss": None}, "metric 'loss' to be one real number, found None"),
        ({"loss": np.ones(1)}, "metric 'loss' to be one real number"),
        ({"loss": 1j}, "metric 'loss' to be one real number, found 1j"),
        ({"loss": 10**400}, "metric 'loss' to be one real number"),
    ],
)
def test_metrics_that_are_no_numbers_are_refused(
    metrics: Any, words: str, tmp_path: Path
) -> None:
    manager = hs.CheckpointManager(tmp_path, x=hs.Variable(1.0))
    with pytest.raises(ValueError, match=r"expected .*; ") as caught:
        manager.save(1, metrics=metrics)
    assert words in str(caught.value)
    assert os.listdir(tmp_path) == []


def _steps(manager: Any) -> list[int]:
    return [int(Path(path).stem.removeprefix("ckpt-")) for path in manager.checkpoints]


@pytest.mark.parametrize("count", [1, 9, 300])
def test_metrics_are_attributes_that_anyone_reads(count: int, tmp_path: Path) -> None:
    manager = hs.CheckpointManager(tmp_path, x=hs.Variable(np.arange(3.0)))
    special = [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324]
    longest = [f"{number:03d}".ljust(255, "x") for number in range(1, count)]
    names = ["größe/a b", *longest]
    for step in (1, 2):
        # The second save changes numbers in the HDF5 structures of the first.
        wanted = {name: special[(k + step) % 6] for k, name in enumerate(names)}
        path = manager.save(step, metrics=wanted)
        with h5py.File(path, "r") as file:
            group = file["hpcstrat/metrics"]
            assert len(group) == 0
            raw = {name: group.attrs[name] for name in group.attrs}
        assert {value.dtype for value in raw.values()} == {np.dtype("<f8")}
        assert raw.keys() == wanted.keys()
        for header in (read_root(path), read_header(path)):
            assert header.step == step
            found = [header.metrics[name].hex() for name in wanted]
            assert found == [value.hex() for value in wanted.values()]
        manager.restore(path)
    bare = manager.save(3)
    with h5py.File(bare, "r") as file:
        assert "metrics" not in file["hpcstrat"]
    assert read_root(bare).metrics == {}


def test_metrics_are_under_the_hash_of_the_structures(tmp_path: Path) -> None:
    manager = hs.CheckpointManager(tmp_path, x=hs.Variable(1.0))
    path = Path(manager.save(1, metrics={"loss": 1234.56789}))
    content = path.read_bytes()
    stored = np.float64(1234.56789).tobytes()
    assert content.count(stored) == 1
    path.write_bytes(content.replace(stored, np.float64(0.5).tobytes()))
    # HDF5's own checksums do not cover this, so that hpcstrat's hashes must find it.
    with pytest.raises(CorruptCheckpointError, match="changed since they were written"):
        read_root(str(path))


def test_all_rules_together_on_the_disk(tmp_path: Path) -> None:
    manager = hs.CheckpointManager(
        tmp_path,
        max_to_keep=2,
        keep_every=4,
        keep_best=hs.KeepBest("accuracy", mode="max", count=2),
        x=hs.Variable(1.0),
    )
    assert manager.best() is None
    accuracy = {1: 0.1, 2: 0.9, 3: 0.5, 5: math.nan, 6: 0.7, 7: 0.9, 9: 0.2}
    for step in range(1, 11):
        metrics = {"accuracy": accuracy[step]} if step in accuracy else None
        manager.save(step, metrics=metrics)
    assert _steps(manager) == [2, 4, 7, 8, 9, 10]
    assert manager.best() == str(tmp_path / checkpoint_name(2))


def test_age_is_that_of_the_save_and_not_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [NOW]
    monkeypatch.setattr(time, "time_ns", lambda: clock[0])
    rules: list[dict[str, Any]] = [
        {"keep_for": 3600},
        {"keep_for": timedelta(hours=1)},
        {"keep_every": timedelta(hours=1)},
    ]
    for number, rule in enumerate(rules):
        folder = tmp_path / str(number)
        manager = hs.CheckpointManager(
            folder, max_to_keep=1, x=hs.Variable(1.0), **rule
        )
        for step in range(1, 8):
            path = manager.save(step)
            os.utime(path, (1, 1) if step % 2 else None)
            clock[0] += 20 * 60 * SECOND
        wanted = [1, 4, 7] if "keep_every" in rule else [5, 6, 7]
        assert _steps(manager) == wanted


def test_checkpoints_of_others_are_read_once_and_again_when_they_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    look = retention.read_root

    def noted(path: str) -> Any:
        read.append(os.path.basename(path))
        return look(path)

    monkeypatch.setattr(retention, "read_root", noted)
    options: dict[str, Any] = {
        "max_to_keep": 1,
        "keep_best": hs.KeepBest("loss", count=2),
        "x": hs.Variable(1.0),
    }
    manager = hs.CheckpointManager(tmp_path, **options)
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0), (4, 5.0), (5, 6.0)):
        manager.save(step, metrics={"loss": loss})
    manager.save(5, metrics={"loss": 0.5}, overwrite=True)
    assert _steps(manager) == [3, 5]
    assert read == []
    # A later job reads the existing checkpoints once.
    later = hs.CheckpointManager(tmp_path, **options)
    later.save(6)
    later.save(7, metrics={"loss": 9.0})
    assert read == [checkpoint_name(step) for step in (3, 5)]
    assert _steps(later) == [3, 5, 7]
    hs.CheckpointManager(tmp_path, **{**options, "max_to_keep": None}).save(
        7, metrics={"loss": 0.0}, overwrite=True
    )
    later.save(8)
    assert read[2:] == [checkpoint_name(7)]
    assert _steps(later) == [5, 7, 8]


def _rot(path: str) -> None:
    """Change a byte of the HDF5 structures, and keep the file's modification time."""
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(2048)
        byte = file.read(1)[0]
        file.seek(2048)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("rotten", [2, 3])
def test_file_that_rots_later_does_not_count_and_stays(
    rotten: int, tmp_path: Path
) -> None:
    """A damaged checkpoint counts neither as the best nor as one of the newest."""
    manager = hs.CheckpointManager(
        tmp_path, max_to_keep=2, keep_best=hs.KeepBest("loss"), x=hs.Variable(1.0)
    )
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        manager.save(step, metrics={"loss": loss})
    assert _steps(manager) == [2, 3]
    _rot(manager.checkpoints[rotten - 2])
    manager.save(4, metrics={"loss": 4.0})
    manager.save(5, metrics={"loss": 5.0})
    assert _steps(manager) == [2, 3, 4, 5]
    whole = 5 - rotten
    assert manager.best() == str(tmp_path / checkpoint_name(whole))


def test_file_of_a_newer_library_does_not_count_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x = hs.Variable(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(skeleton, "UNTYPED_VERSION", FORMAT_VERSION + 1)
        hs.CheckpointManager(tmp_path, x=x).save(1)
    manager = hs.CheckpointManager(tmp_path, max_to_keep=1, x=x)
    manager.save(2)
    manager.save(3)
    assert _steps(manager) == [1, 3]
    manager.save(4, metrics={"loss": 1.0})
    found = best_path(str(tmp_path), hs.KeepBest("loss"))
    assert found == manager.checkpoints[-1]
    assert f"found version {FORMAT_VERSION + 1}" in caplog.text


def test_nothing_is_removed_before_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = hs.CheckpointManager(tmp_path, max_to_keep=1, x=hs.Variable(1.0))
    path = manager.save(1)
    seen: list[list[str]] = []
    remove = retention.remove

    def noted(which: str) -> None:
        seen.append([which, *manager.checkpoints])
        remove(which)

    monkeypatch.setattr(retention, "remove", noted)
    monkeypatch.setattr("hpcstrat.checkpoint.save.pending_save.publish", _full)
    with pytest.raises(CheckpointError, match="No space left"):
        manager.save(2)
    assert manager.checkpoints == [path]
    assert seen == []
    monkeypatch.undo()
    monkeypatch.setattr(retention, "remove", noted)
    new = manager.save(2)
    assert seen == [[path, path, new]]


def _full(*args: Any) -> None:
    raise OSError(28, "No space left on device")
