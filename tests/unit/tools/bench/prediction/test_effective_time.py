"""The effective time of runs with losses, beside closed forms and plain simulation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstrat.checkpoint.interval import best_seconds
from hpcstrat.cli.main import main
from hpcstrat.tools.bench.prediction.effective_time import LossyRun, MeasuredTimes
from hpcstrat.tools.bench.prediction.inputs import SURVIVE_FORMAT, read_given
from hpcstrat.tools.bench.run_file import BenchError

of = MeasuredTimes.of
TIMES = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6)


def simulated_interval(run: LossyRun, random: np.random.Generator) -> float:
    """Return the time from one save to the next, event by event."""

    def draw(times: MeasuredTimes) -> float:
        return float(random.choice(times.values, p=times.weights))

    def attempt() -> float:
        steps = sum(draw(run.steps) for _ in range(run.steps_per_save))
        return steps + draw(run.saves)

    now, loss, length = 0.0, random.exponential(run.loss_seconds), attempt()
    while now + length > loss:
        now = loss
        # Losses during the start end it.
        while True:
            loss = now + random.exponential(run.loss_seconds)
            start = draw(run.starts)
            if now + start <= loss:
                break
            now = loss
        now, length = now + start, attempt()
    return now + length


@given(
    step=st.floats(0.01, 10), save=st.floats(0, 10), start=st.floats(0, 50),
    mean=st.floats(5, 1e9), count=st.integers(1, 50),
)  # fmt: skip
def test_constant_times_give_the_formula_of_daly(
    step: float, save: float, start: float, mean: float, count: int
) -> None:
    """Equation 20 of https://doi.org/10.1016/j.future.2004.11.016."""
    run = LossyRun(of([step]), of([save]), of([start]), mean, count)
    length = count * step + save
    if length / mean > 300:
        return
    expected = mean * math.exp(start / mean) * math.expm1(length / mean)
    assert run.seconds_per_save()[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_measured_times_give_what_a_simulation_gives(seed: int) -> None:
    random = np.random.default_rng(seed)
    steps, saves, starts = (
        of(random.gamma(1.0, scale, random.integers(1, 8))) for scale in (1.0, 2.0, 5.0)
    )
    mean = float(random.uniform(8, 40))
    run = LossyRun(steps, saves, starts, mean, int(random.integers(1, 9)))
    found = np.array([simulated_interval(run, random) for _ in range(4000)])
    mean, deviation = run.seconds_per_save()
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - mean) < 4 * error
    # The error of a sample's variance follows from its fourth moment.
    fourth = ((found - found.mean()) ** 4).mean()
    error = math.sqrt((fourth - found.var() ** 2) / len(found))
    assert abs(found.var() - deviation**2) < 5 * error


@given(TIMES, TIMES, TIMES, st.integers(1, 20))
@settings(max_examples=50)
def test_rare_losses_approach_a_run_without(
    steps: list[float], saves: list[float], starts: list[float], count: int
) -> None:
    times = of(steps), of(saves), of(starts)
    expected = LossyRun(*times, math.inf, count).seconds_per_save()
    variance = count * np.var(steps) + np.var(saves)
    assert expected == pytest.approx(
        (count * np.mean(steps) + np.mean(saves), math.sqrt(variance))
    )
    for mean in (1e8, 1e10, 1e12):
        found = LossyRun(*times, mean, count).seconds_per_save()
        assert found[0] == pytest.approx(expected[0], rel=1e4 / mean)
        assert found[1] ** 2 == pytest.approx(variance, rel=1e-3, abs=0.1 + 1e7 / mean)


def test_the_deviation_is_that_of_whole_runs() -> None:
    random = np.random.default_rng(5)
    run = LossyRun(of([0.5, 1.5]), of([1.0]), of([4.0, 8.0]), 60.0, 10)
    useful = 40 * 10 * 1.0
    shares = [
        useful / sum(simulated_interval(run, random) for _ in range(40))
        for _ in range(300)
    ]
    found = run.effective_time(useful)
    assert np.mean(shares) == pytest.approx(found.mean, rel=0.02)
    assert np.std(shares) == pytest.approx(found.deviation, rel=0.2)
    assert found.losses == pytest.approx(useful / found.mean / 60.0)


def test_a_run_that_never_reaches_a_save_has_no_effective_time() -> None:
    run = LossyRun(of([10.0]), of([1.0]), of([1.0]), 0.01, 100)
    assert run.effective_time(100).mean == 0.0
    run = LossyRun(of([1.0]), of([1.0]), of([1e6]), 1.0, 1)
    assert run.effective_time(100).mean == 0.0
    words = ["--save", "1s", "--restart", "1s", "--nodes", "1", "--losses", "1e6"]
    done = command("--compute-ms", "0", *words)
    assert done.exit_code == 0, done.output
    assert "0.0000 +- 0.0000" in done.output


@given(TIMES, st.integers(1, 5))
def test_the_slowest_of_some_is_their_maximum(values: list[float], count: int) -> None:
    found = of(values).slowest_of(count)
    every = np.array(np.meshgrid(*[values] * count)).reshape(count, -1).max(axis=0)
    assert found.mean == pytest.approx(every.mean())
    assert found.deviation == pytest.approx(every.std(), abs=1e-6)


def test_the_best_interval_is_that_of_automatic_saves(tmp_path: Path) -> None:
    words = ["--compute-ms", "250", "--save", "20ms", "--restart", "5s", "--nodes", "1"]
    for losses in (0, 60):
        path = tmp_path / "out.json"
        done = command(*words, "--losses", str(losses), "--json", str(path))
        assert done.exit_code == 0, done.output
        [point] = json.loads(path.read_text())["points"]
        mean = 60.0 if losses else 6 * 3600.0
        assert point["steps_per_save"] == math.ceil(best_seconds(0.02, mean) / 0.25)


def survival() -> dict[str, object]:
    """Return the part of a file of hpcstrat bench survive that predictions need."""
    return {
        **SURVIVE_FORMAT,
        "num_nodes": 2,
        "replicas_per_node": 1,
        "step_seconds": [0.1, 0.2],
        "save_seconds": [0.05],
        "start_seconds": [3.0, 5.0],
    }


def command(*words: str) -> Result:
    """Run the command ``hpcstrat bench predict``."""
    return CliRunner().invoke(main, ["bench", "predict", *words])


def test_the_command_predicts_from_a_measured_survival(tmp_path: Path) -> None:
    path, output = tmp_path / "survive.json", tmp_path / "out.json"
    path.write_text(json.dumps(survival()))
    words = ["--nodes", "2,8", "--losses", "0.5", "--steps-per-save", "40"]
    done = command(str(path), *words, "--json", str(output))
    assert done.exit_code == 0, done.output
    small, large = json.loads(output.read_text())["points"]
    run = LossyRun(of([0.1, 0.2]), of([0.05]), of([3.0, 5.0]), 3600.0, 40)
    expected = run.effective_time(24 * 3600)
    assert small["effective_time"] == pytest.approx(expected.mean)
    assert small["effective_time_deviation"] == pytest.approx(expected.deviation)
    assert f"{expected.mean:.4f} +- {expected.deviation:.4f}" in done.output
    # The slowest of four times two nodes: 0.2 s but for one time in 2**4.
    assert large["mean_step_seconds"] == pytest.approx(0.2 - 0.1 / 16)
    assert large["effective_time"] < small["effective_time"]


def test_the_command_needs_no_file() -> None:
    words = ["--compute-ms", "100", "--losses", "1e-3", "--nodes", "1000"]
    done = command(*words, "--save", "1s", "--restart", "5min")
    assert done.exit_code == 0, done.output
    count = math.ceil(best_seconds(1.0, 3600.0) / 0.1)
    run = LossyRun(of([0.1]), of([1.0]), of([300.0]), 3600.0, count)
    assert f"{run.effective_time(86400).mean:.4f} +- " in done.output


@pytest.mark.parametrize("missing", ["--save", "--restart", "--compute-ms"])
def test_the_command_names_a_missing_figure(missing: str) -> None:
    words = {"--compute-ms": "100", "--save": "1s", "--restart": "5s"}
    del words[missing]
    given = [word for pair in words.items() for word in pair]
    done = command("--losses", "1e-3", "--nodes", "10", *given)
    assert done.exit_code == 1
    assert f"expected {missing}" in done.output


@pytest.mark.parametrize("bad", [[], [-1.0], [math.nan], ["x"], None])
def test_a_damaged_survival_is_said(tmp_path: Path, bad: object) -> None:
    path = tmp_path / "survive.json"
    path.write_text(json.dumps({**survival(), "start_seconds": bad}))
    with pytest.raises(BenchError, match=r"survive\.json"):
        read_given(str(path))
