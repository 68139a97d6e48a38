"""The main job: the same training on any number of ranks, resumed or not."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.testing import Finished, launch, launch_command
from hpcstrat.testing.launcher import clean_environment

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "jobs"
SCRIPT = JOBS / "train_digits.py"
TIMEOUT_SECONDS = 240
STEPS_PER_EPOCH = 23
FULL = pytest.mark.full

Weights = dict[str, np.ndarray[Any, Any]]


def words(*options: object) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, options)]


def train(n: int, *options: object) -> Finished:
    """Run the job on n ranks, and assert that it succeeds."""
    finished = launch(n, words(*options), timeout=TIMEOUT_SECONDS)
    assert finished.returncode == 0, finished.stderr + finished.stdout
    return finished


def train_and_load(n: int, folder: Path, *options: object) -> Weights:
    file = folder / f"{n}.npz"
    train(n, *options, "--dump", file)
    with np.load(file) as arrays:
        return dict(arrays)


def accuracy_of(stdout: str) -> float:
    last = stdout.splitlines()[-1]
    found = re.fullmatch(r"test accuracy ([01]\.\d{4})", last)
    assert found, stdout
    return float(found[1])


def assert_same_bits(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.fixture(scope="module")
def network() -> ModuleType:
    path = JOBS / "digits_network.py"
    spec = importlib.util.spec_from_file_location("digits_network", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Weights]:
    """Return the weights after three epochs in one process, for both types."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        dtype: train_and_load(1, folder, "--epochs", 3, "--dtype", dtype)
        for dtype in ("float32", "float64")
    }


def test_gradients_are_those_of_the_mean_loss(network: ModuleType) -> None:
    generator = np.random.default_rng(1)
    images, labels = generator.random((5, 64)), np.array([3, 1, 4, 1, 5])
    parameters = list(network.initial_parameters(0, "float64").values())
    _, gradients, _ = network.losses_and_gradients(parameters, images, labels, 5)
    for values, gradient in zip(parameters, gradients, strict=True):
        assert gradient.shape == values.shape
        position = tuple(size // 2 for size in values.shape)
        means = []
        for change in (1e-6, -2e-6):
            values[position] += change
            losses, *_ = network.losses_and_gradients(parameters, images, labels, 5)
            means.append(losses.mean())
        values[position] += 1e-6
        slope = (means[0] - means[1]) / 2e-6
        np.testing.assert_allclose(gradient[position], slope, rtol=1e-6, atol=1e-9)


def test_an_empty_batch_has_no_losses_and_gradients_of_zero(
    network: ModuleType,
) -> None:
    parameters = list(network.initial_parameters(0, "float32").values())
    images, labels = np.zeros((0, 64), np.float32), np.zeros(0, np.uint8)
    losses, gradients, num_correct = network.losses_and_gradients(
        parameters, images, labels, 3
    )
    assert losses.shape == (0,)
    assert num_correct == 0
    for values, gradient in zip(parameters, gradients, strict=True):
        assert gradient.dtype == np.float32
        np.testing.assert_array_equal(gradient, np.zeros_like(values))


@pytest.mark.parametrize(
    ("n", "seed"),
    [
        (2, 1),
        pytest.param(1, 0, marks=FULL),
        pytest.param(3, 2, marks=pytest.mark.slow),
        pytest.param(4, 3, marks=pytest.mark.slow),
        pytest.param(2, 4, marks=pytest.mark.slow),
    ],
)
def test_accuracy_is_the_last_line_and_high(n: int, seed: int) -> None:
    finished = train(n, "--seed", seed, "--no-progress")
    where, how_fast, _ = finished.stdout.splitlines()
    assert re.fullmatch(rf"{n} replicas? on 1 host: \S+", where)
    assert re.fullmatch(r"30 epochs in [\d.]+ s: \d+ examples per second", how_fast)
    assert accuracy_of(finished.stdout) >= 0.97


def test_each_epoch_has_its_line_where_there_is_no_terminal() -> None:
    _, *lines, _, last = train(2, "--epochs", 2).stdout.splitlines()
    assert [line[:16] for line in lines] == ["epoch   1: loss ", "epoch   2: loss "]
    assert lines[-1].endswith(f", {last}")


# Three ranks have a first, a middle and a last one.
@pytest.mark.parametrize(
    "n", [pytest.param(2, marks=FULL), 3, pytest.param(4, marks=FULL)]
)
def test_training_does_not_depend_on_the_number_of_ranks(
    n: int, tmp_path: Path, alone: dict[str, Weights]
) -> None:
    float64 = train_and_load(n, tmp_path, "--epochs", 3, "--dtype", "float64")
    for name, expected in alone["float64"].items():
        found = float64[name]
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10, err_msg=name)
    float32 = train_and_load(n, tmp_path, "--epochs", 3, "--dtype", "float32")
    for name, expected in alone["float32"].items():
        found = float32[name]
        assert found.dtype == np.float32
        change = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert change <= 1e-5, name


@pytest.mark.parametrize("count", [4, pytest.param(8, marks=FULL)])
def test_logical_replicas_give_the_same_bits_on_any_number_of_ranks(
    count: int, tmp_path: Path
) -> None:
    options = "--epochs", 2, "--logical-replicas", count
    first, *others = (train_and_load(n, tmp_path, *options) for n in (1, 2, 3))
    for found in others:
        assert_same_bits(found, first)


@FULL
def test_batches_smaller_than_the_number_of_ranks_train_alike(tmp_path: Path) -> None:
    # 1,438 images in batches of 479 leave one image in the last batch, for one rank.
    options = ("--epochs", 2, "--dtype", "float64", "--global-batch", 479)
    expected = train_and_load(1, tmp_path, *options)
    found = train_and_load(3, tmp_path, *options)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-10)


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_longer_run_resumes_a_shorter_one_bit_by_bit(n: int, tmp_path: Path) -> None:
    expected = train_and_load(n, tmp_path, "--epochs", 3)
    folder = tmp_path / "checkpoints"
    options = ("--checkpoint-dir", folder, "--resume")
    first = train(n, *options, "--epochs", 2)
    assert f"no whole checkpoint in {folder}: starting at epoch 1" in first.stdout
    dump = tmp_path / "resumed.npz"
    second = train(n, *options, "--epochs", 3, "--dump", dump)
    assert f"resumed from {folder}: step 46, 2 epochs are done" in second.stdout
    with np.load(dump) as found:
        assert_same_bits(dict(found), expected)
    third = train(n, *options, "--epochs", 3)
    assert accuracy_of(third.stdout) == accuracy_of(second.stdout)


def kill_after_first_checkpoint(n: int, folder: Path) -> int:
    """Start a long run on n ranks, kill it, and return the number of epochs saved."""
    options = ("--epochs", 1000, "--checkpoint-dir", folder)
    with subprocess.Popen(
        [*launch_command(n), *words(*options)],
        env=clean_environment({"PYTHONPATH": str(ROOT)}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as job:
        try:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while not any(folder.glob("ckpt-*.h5")):
                assert job.poll() is None, "the run ended before its first checkpoint"
                assert time.monotonic() < deadline, "found no checkpoint in time"
                time.sleep(0.01)
        finally:
            job.terminate()  # Sent to mpirun, which ends the ranks.
    assert job.returncode != 0
    steps = [int(file.stem.removeprefix("ckpt-")) for file in folder.glob("ckpt-*.h5")]
    return max(steps) // STEPS_PER_EPOCH


@FULL
def test_a_killed_run_resumes_bit_by_bit(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    epochs = ("--epochs", kill_after_first_checkpoint(2, folder) + 2)
    expected = train_and_load(2, tmp_path, *epochs)
    dump = tmp_path / "resumed.npz"
    options = ("--checkpoint-dir", folder, "--resume", "--dump", dump)
    assert "resumed from" in train(2, *epochs, *options).stdout
    with np.load(dump) as found:
        assert_same_bits(dict(found), expected)


def kill_at_some_time(n: int, folder: Path, seconds: float) -> None:
    """Start or resume a long run with a log, and kill all of it after some time."""
    options = ("--epochs", 1000, "--checkpoint-dir", folder, "--resume")
    with subprocess.Popen(
        [*launch_command(n), *words(*options, *TENSORBOARD)],
        env=clean_environment({"PYTHONPATH": str(ROOT)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("epoch"):
                break
        time.sleep(seconds)
        job.kill()


def logged(folder: Path) -> list[tuple[int, dict[str, float]]]:
    records = hs.metrics.read_log(folder)
    return [(record["step"], record["scalars"]) for record in records]


HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
TENSORBOARD = ("--tensorboard",) if HAS_TENSORBOARD else ()


def test_the_log_of_a_run_that_was_killed_thrice_has_each_epoch_once(
    tmp_path: Path,
) -> None:
    folder, other = tmp_path / "killed", tmp_path / "undisturbed"
    generator = np.random.default_rng()
    for _ in range(3):
        kill_at_some_time(2, folder, generator.uniform(0, 0.5))
    newest = max(int(file.stem[5:]) for file in folder.glob("ckpt-*.h5"))
    epochs = ("--epochs", newest // STEPS_PER_EPOCH + 2)
    train(2, *epochs, "--checkpoint-dir", folder, "--resume", *TENSORBOARD)
    train(2, *epochs, "--checkpoint-dir", other)
    assert len(logged(other)) == epochs[1]
    assert logged(folder) == logged(other)
    if HAS_TENSORBOARD:
        from tensorboard.backend.event_processing import event_accumulator

        found = event_accumulator.EventAccumulator(
            str(folder / "tensorboard"), size_guidance={"scalars": 0}
        )
        found.Reload()
        events = [(e.step, np.float32(e.value)) for e in found.Scalars("loss")]
        assert events == [(n, np.float32(v["loss"])) for n, v in logged(other)]


@FULL
def test_another_number_of_ranks_can_resume(tmp_path: Path) -> None:
    expected = train_and_load(1, tmp_path, "--epochs", 3, "--dtype", "float64")
    options = ("--dtype", "float64", "--checkpoint-dir", tmp_path, "--resume")
    train(3, *options, "--epochs", 1)
    found = train_and_load(2, tmp_path, *options, "--epochs", 3)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-10)


def test_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    file = tmp_path / "new folder" / "curves.png"
    train(1, "--epochs", 1, "--picture", file)
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("n", "options", "message"),
    [
        # Errors that the first rank finds, and errors that all ranks find.
        (2, ["--data", "{tmp}/none.h5"], "found no such file; make it with"),
        (2, ["--epochs", "0"], "0 is not in the range"),
        # Further errors of the first kind, and of the second kind.
        (1, ["--data", "{tmp}/text"], "expected an HDF5 file with"),
        (1, ["--dump", "{tmp}/text/weights.npz"], "found {tmp}/text: a file"),
        (1, ["--checkpoint-dir", "{tmp}"], "add --resume to go on"),
        (1, ["--resume"], "--resume needs --checkpoint-dir"),
        *[
            pytest.param(*case, marks=FULL)
            for case in (
                (1, ["--checkpoint-dir", "{tmp}/text"], "found {tmp}/text: a file"),
                (
                    1,
                    ["--picture", "{tmp}/curves.txt"],
                    "found {tmp}/curves.txt; change it",
                ),
            )
        ],
    ],
)
def test_mistakes_end_the_job_with_one_clear_line(
    n: int, options: Sequence[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("not HDF5")
    (tmp_path / "ckpt-1.h5").touch()
    filled = [option.format(tmp=tmp_path) for option in options]
    finished = launch(n, words(*filled), timeout=TIMEOUT_SECONDS)
    assert finished.returncode != 0
    assert finished.stderr.count(message.format(tmp=tmp_path)) == 1
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--seed", 1),
        pytest.param("--dtype", "float64", marks=pytest.mark.slow),
    ],
)
def test_options_that_the_checkpoint_does_not_fit_are_refused(
    option: str, value: object, tmp_path: Path
) -> None:
    options = ("--epochs", 1, "--checkpoint-dir", tmp_path, "--resume")
    train(2, *options)
    finished = launch(2, words(*options, option, value), timeout=TIMEOUT_SECONDS)
    assert finished.returncode != 0
    assert finished.stderr.count(f"no way to resume from {tmp_path}: expected") == 1
    assert "Traceback" not in finished.stderr
