"""After any number of kills, a log of metrics equals that of an undisturbed run."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import hpcstrat as hs
from hpcstrat.metrics.log_file import LogFile

STEPS = 12


class Killed(Exception):
    """Raised instead of killing the process."""


def _records(folder: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in record.items() if k != "time"}
        for record in hs.metrics.read_log(folder)
    ]


class Run:
    """A training that logs and saves; each attempt ends when ``kill`` says so."""

    def __init__(self, folder: Path, sinks: Callable[[], list[Any]] = list) -> None:
        self.folder = folder
        self.sinks = sinks

    def live(self, every: int, kill: Callable[[], None] = lambda: None) -> None:
        """Continue from the newest checkpoint to the end, or until killed."""
        self.log = hs.metrics.Log(self.folder, sinks=self.sinks())
        weights = hs.Variable(0, dtype="int64", name="weights")
        manager = hs.CheckpointManager(self.folder, weights=weights, log=self.log)
        try:
            start = manager.restore_or_initialize() or 0
            for step in range(start + 1, STEPS + 1):
                weights.assign_add(step)
                kill()
                value = float(weights.numpy())
                self.log.scalars(step, loss=value, ratio=1 / step)
                if step % 4 == 0:
                    kill()
                    self.log.text(step, "note", f"at {step}")
                kill()
                self.log.scalars(step, {"of/another": -value})
                if step % every == 0:
                    manager.save(step)
            self.log.flush()
        finally:
            manager.close()


def _undisturbed(every: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        Run(Path(name)).live(every)
        return _records(Path(name))


@hypothesis.given(
    every=st.integers(1, 5),
    lives=st.lists(st.integers(0, 30), max_size=5),
    torn=st.booleans(),
)
def test_a_log_that_was_killed_is_that_of_an_undisturbed_run(
    every: int, lives: list[int], torn: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name))
        for count in lives:
            left = itertools.count(count, -1)

            def kill(left: Iterator[int] = left) -> None:
                if next(left) == 0:
                    raise Killed

            try:
                run.live(every, kill)
            except Killed:
                if torn:
                    with (Path(name) / LogFile.NAME).open("ab") as file:
                        file.write(b'{"step": 3, "scal')
        run.live(every)
        assert _records(Path(name)) == _undisturbed(every)


def test_what_is_removed_is_kept_elsewhere(tmp_path: Path) -> None:
    log = hs.metrics.Log(tmp_path)
    weights = hs.Variable(0, dtype="int64", name="weights")
    with hs.CheckpointManager(tmp_path, weights=weights, log=log) as manager:
        log.scalars(1, loss=1)
        manager.save(1)
        log.scalars(2, loss=2)
        manager.restore()
        log.scalars(2, loss=3)
    assert [r["scalars"]["loss"] for r in _records(tmp_path)] == [1, 3]
    removed = (tmp_path / LogFile.REMOVED).read_text()
    assert json.loads(removed)["scalars"] == {"loss": 2}


def test_a_training_that_begins_anew_leaves_no_old_lines(tmp_path: Path) -> None:
    hs.metrics.Log(tmp_path).scalars(7, loss=1)
    assert len(_records(tmp_path)) == 1
    log = hs.metrics.Log(tmp_path)
    assert len(_records(tmp_path)) == 1
    log.scalars(1, loss=2)
    assert [record["step"] for record in _records(tmp_path)] == [1]
    assert "7" in (tmp_path / LogFile.REMOVED).read_text()


def test_another_file_than_that_of_the_checkpoint_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = hs.metrics.Log(tmp_path)
    weights = hs.Variable(0, dtype="int64", name="weights")
    with hs.CheckpointManager(tmp_path, weights=weights, log=log) as manager:
        log.scalars(1, loss=1)
        manager.save(1)
        text = (tmp_path / LogFile.NAME).read_text()
        (tmp_path / LogFile.NAME).write_text(text.replace("1.0", "2.0"))
        manager.restore()
        assert "found another log" in caplog.text
        log.scalars(2, loss=1)
        (tmp_path / LogFile.NAME).write_text("")
        manager.restore()
        assert "found a shorter log" in caplog.text
        log.scalars(2, loss=5)
    assert [record["step"] for record in _records(tmp_path)] == [2]


def test_lines_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    log = hs.metrics.Log(tmp_path)
    log.scalars(1, a=math.nan, b=-math.inf, c=np.float32(0.5), d=np.int64(3))
    line = (tmp_path / LogFile.NAME).read_text()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(line, parse_constant=refuse)["scalars"]["a"] == "NaN"
    found = _records(tmp_path)[0]["scalars"]
    assert math.isnan(found.pop("a"))
    assert found == {"b": -math.inf, "c": 0.5, "d": 3}


class Broken:
    """A sink whose server is unreachable."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError("no such host")


def test_a_sink_that_fails_stops_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = hs.metrics.Log(tmp_path, sinks=[Broken()])
    log.scalars(1, loss=1)
    log.scalars(2, loss=1)
    assert len(_records(tmp_path)) == 2
    assert caplog.text.count("no such host") == 1


@pytest.fixture
def one_second_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each event file another second in its name, as in separate jobs."""
    from tensorboard.summary.writer import event_file_writer

    seconds = itertools.count(int(time.time()))

    class Clock:
        time = staticmethod(lambda: next(seconds))

    monkeypatch.setattr(event_file_writer, "time", Clock)


def _in_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def _by_name(records: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.get("scalars", {}).items():
            found.setdefault(name, []).append((record["step"], value))
    return found


@pytest.mark.framework("tensorboard")
@pytest.mark.usefixtures("one_second_apart")
@hypothesis.settings(
    max_examples=15,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    every=st.integers(1, 5), lives=st.lists(st.integers(0, 30), max_size=4)
)
def test_tensorboard_shows_what_an_undisturbed_run_logs(
    every: int, lives: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), lambda: [hs.metrics.TensorBoard()])
        for count in lives:
            left = itertools.count(count, -1)

            def kill(left: Iterator[int] = left) -> None:
                if next(left) == 0:
                    # Flush more than a killed job might have had time to write.
                    run.log.flush()
                    raise Killed

            try:
                run.live(every, kill)
            except Killed:
                continue
        run.live(every)
        run.log.close()
        expected = _by_name(_undisturbed(every))
        found = _in_tensorboard(Path(name))
        assert found.keys() == expected.keys()
        for tag, points in expected.items():
            steps, values = zip(*points, strict=True)
            assert [step for step, _ in found[tag]] == list(steps)
            np.testing.assert_allclose([v for _, v in found[tag]], values, rtol=1e-6)


@pytest.mark.framework("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_a_run_with_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()

    def sinks() -> list[Any]:
        return [hs.metrics.MLflow("digits", tracking_uri=uri)]

    run, left = Run(tmp_path / "log", sinks), itertools.count(20, -1)

    def kill() -> None:
        if next(left) == 0:
            run.log.flush()
            raise Killed

    with pytest.raises(Killed):
        run.live(5, kill)
    run.live(5)
    run.log.close()
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("digits")
    [found] = client.search_runs([experiment.experiment_id])
    for name, points in _by_name(_undisturbed(5)).items():
        history = client.get_metric_history(found.info.run_id, name)
        assert [(metric.step, metric.value) for metric in history] == points
    assert found.info.status == "FINISHED"
    paths = [
        file.path for file in client.list_artifacts(found.info.run_id, "text/note")
    ]
    assert paths == ["text/note/12.txt", "text/note/4.txt", "text/note/8.txt"]


def _rows_of_wandb(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an offline run, whose file has the format of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    block, header = 32768, 7
    data, at, parts, rows = path.read_bytes(), header, b"", list[dict[str, Any]]()
    while at + header <= len(data):
        if block - at % block < header:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + header : at + header + length]
        at += header + length
        # A record may be divided: its first, middle and last parts are 2, 3 and 4.
        if kind in (1, 4):
            items = Record.FromString(parts).history.item
            rows.append(
                {item.nested_key[0]: json.loads(item.value_json) for item in items}
            )
            parts = b""
    return [row for row in rows if "step" in row]


@pytest.mark.framework("wandb")
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_has_a_run_with_each_step_once(tmp_path: Path) -> None:
    import wandb

    def sinks() -> list[Any]:
        return [hs.metrics.WeightsAndBiases("digits", mode="offline")]

    run = Run(tmp_path, sinks)
    for number in (20, 9):
        left = itertools.count(number, -1)

        def kill(left: Iterator[int] = left) -> None:
            if next(left) == 0:
                raise Killed

        with pytest.raises(Killed):
            run.live(5, kill)
    run.live(5)
    run.log.close()
    # The files are complete when the process of wandb has ended.
    wandb.teardown()
    [path] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = _rows_of_wandb(path)
    expected = _by_name(_undisturbed(5))
    for name, points in expected.items():
        assert [(row["step"], row[name]) for row in rows if name in row] == points
    notes = [row["step"] for row in rows if "note" in row]
    assert notes == [4, 8, 12]


def _picture(step: int) -> Any:
    return np.full((4, 5, 3), step / 10)


@pytest.mark.framework("PIL")
@pytest.mark.framework("tensorboard")
@pytest.mark.usefixtures("one_second_apart")
def test_pictures_are_files_that_are_removed_with_their_steps(tmp_path: Path) -> None:
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = hs.metrics.Log(tmp_path, sinks=[hs.metrics.TensorBoard()])
    weights = hs.Variable(0, dtype="int64", name="weights")
    with hs.CheckpointManager(tmp_path, weights=weights, log=log) as manager:
        log.picture(1, "digits", _picture(1))
        manager.save(1)
        log.picture(1, "digits", _picture(9))
        log.picture(2, "digits", _picture(2))
        manager.restore()
        assert [p.name for p in (tmp_path / "pictures/digits").iterdir()] == ["1.png"]
        log.picture(3, "digits", _picture(3)[:, :, 0])
    log.close()
    paths = [record["pictures"]["digits"] for record in _records(tmp_path)]
    assert paths == ["pictures/digits/1.png", "pictures/digits/3.png"]
    with Image.open(tmp_path / paths[0]) as image:
        assert image.size == (5, 4)
        assert image.getpixel((0, 0)) == (26, 26, 26)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    images = found.Images("digits")
    assert [(image.step, image.width, image.height) for image in images] == [
        (1, 5, 4),
        (3, 5, 4),
    ]
    with pytest.raises(ValueError, match=r"expected a picture of shape .* \(2,\)"):
        log.picture(4, "digits", np.ones(2))


def test_progress_is_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with hs.metrics.Progress(4, "training", start=1, every_seconds=0) as progress:
        progress.advance(loss=0.25)
        progress.advance(2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("training: 2 of 4 (50%), ")
    assert lines[0].endswith(" s left, loss 0.25")
    assert lines[-1].startswith("training: 4 of 4 (100%)")
    with hs.metrics.Progress(4, "training", every_seconds=3600) as progress:
        progress.advance(4)
    assert len(capsys.readouterr().err.splitlines()) == 1
    with hs.metrics.Progress(4, show=False) as progress:
        progress.advance(4)
    assert capsys.readouterr().err == ""
    with hs.metrics.Progress(4, "training", show=True) as progress:
        assert progress.has_bar
        progress.advance(4, loss=0.5)
    assert "100%" in capsys.readouterr().err


@contextlib.contextmanager
def _full_disk(file: Path, room: int) -> Iterator[None]:
    """Let writes fail ``room`` bytes after a file's last line, as on a full disk."""
    size = file.read_bytes().rfind(b"\n") + 1 if file.exists() else 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@hypothesis.given(
    actions=st.lists(
        st.one_of(st.just("save"), st.just("log"), st.integers(0, 40)),
        min_size=3,
        max_size=12,
    ),
    data=st.data(),
)
def test_a_failed_write_removes_its_own_line_only(
    actions: list[Any], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, logged = Path(name), list[int]()
        log = hs.metrics.Log(folder)
        weights = hs.Variable(0, dtype="int64", name="weights")
        options = {"max_to_keep": None, "weights": weights, "log": log}
        saved = dict[str, list[int]]()
        with hs.CheckpointManager(folder, **options) as manager:
            for step, action in enumerate(actions, 1):
                if action == "save":
                    saved[manager.save(step)] = list(logged)
                elif action == "log":
                    log.scalars(step, loss=step)
                    logged.append(step)
                else:
                    with (
                        _full_disk(folder / LogFile.NAME, action),
                        pytest.raises(OSError, match="File too large"),
                    ):
                        log.scalars(step, loss=step)
            if saved:
                path = data.draw(st.sampled_from(sorted(saved)))
                manager.restore(path)
                logged = saved[path]
                log.scalars(99, loss=99)
                logged.append(99)
        assert [record["step"] for record in _records(folder)] == logged


def test_lines_that_cannot_be_moved_stay_and_are_moved_once(tmp_path: Path) -> None:
    log = hs.metrics.Log(tmp_path)
    weights = hs.Variable(0, dtype="int64", name="weights")
    with hs.CheckpointManager(tmp_path, weights=weights, log=log) as manager:
        log.scalars(1, loss=1)
        manager.save(1)
        log.scalars(2, loss=2)
        log.scalars(3, loss=3)
        with (
            _full_disk(tmp_path / LogFile.REMOVED, 20),
            pytest.raises(OSError, match="File too large"),
        ):
            manager.restore()
        assert [record["step"] for record in _records(tmp_path)] == [1, 2, 3]
        manager.restore()
    assert [record["step"] for record in _records(tmp_path)] == [1]
    removed = hs.metrics.read_log(tmp_path / LogFile.REMOVED)
    assert [record["step"] for record in removed] == [2, 3]


def test_a_training_that_cannot_begin_anew_keeps_the_old_lines_apart(
    tmp_path: Path,
) -> None:
    hs.metrics.Log(tmp_path).scalars(7, loss=1)
    log = hs.metrics.Log(tmp_path)
    with (
        _full_disk(tmp_path / LogFile.REMOVED, 20),
        pytest.raises(OSError, match="File too large"),
    ):
        log.scalars(1, loss=1)
    log.scalars(2, loss=2)
    assert [record["step"] for record in _records(tmp_path)] == [2]
    removed = hs.metrics.read_log(tmp_path / LogFile.REMOVED)
    assert [record["step"] for record in removed] == [7]


def test_a_failed_fsync_is_followed_by_a_new_copy_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = hs.metrics.Log(tmp_path)
    log.scalars(1, loss=1)
    file, own = tmp_path / LogFile.NAME, os.fsync
    before = file.stat().st_ino

    def fail(number: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    # No device of this machine fails when it is told to.
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        log.flush()
    monkeypatch.setattr(os, "fsync", own)
    log.flush()
    assert file.stat().st_ino != before
    log.scalars(2, loss=2)
    log.flush()
    assert [record["step"] for record in _records(tmp_path)] == [1, 2]


@pytest.mark.parametrize("saves", ["first", "second"])
def test_a_log_with_the_lines_of_another_is_restored_with_both(
    saves: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = hs.metrics.Log(tmp_path), hs.metrics.Log(tmp_path)
    weights = hs.Variable(0, dtype="int64", name="weights")
    first.scalars(1, loss=1)
    second.scalars(2, loss=2)
    first.scalars(3, loss=3)
    second.scalars(4, loss=4)
    log = {"first": first, "second": second}[saves]
    with hs.CheckpointManager(tmp_path, weights=weights, log=log) as manager:
        manager.save(1)
        log.scalars(5, loss=5)
        manager.restore()
    assert "give each log a folder of its own" in caplog.text
    assert [record["step"] for record in _records(tmp_path)] == [2, 3, 4]


def test_a_picture_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    log = hs.metrics.Log(tmp_path)
    noise = np.random.default_rng(1).random((40, 50, 3))
    with (
        _full_disk(tmp_path / "none", 100),
        pytest.raises(OSError, match="File too large"),
    ):
        log.picture(1, "digits", noise)
    log.picture(1, "digits", noise)
    assert [p.name for p in (tmp_path / "pictures/digits").iterdir()] == ["1.png"]
