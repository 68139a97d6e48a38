"""The command ``hpcstrat bench survive``: bad input, and the judgement of records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpcstrat.cli.main import main
from hpcstrat.tools.bench.survival_run import SurvivalRun


def command(*words: str) -> Result:
    """Run the command without a job of Slurm."""
    env = dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_JOB_ID"))
    return CliRunner().invoke(main, ["bench", "survive", *words], env=env)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected a job of Slurm, or nodes and a command"),
        (["--nodes", "a,b"], "expected a job of Slurm, or nodes and a command"),
        (["--nodes", "a", "--on-node", "true"], "expected a spare node"),
        (["--nodes", "a,b", "--on-node", "true", "--use", "2"], "2 of 2 nodes run"),
        (["--nodes", "a,b", "--on-node", "/nowhere/x {node}"], "correct --on-node"),
        # The command ends at once, so that there is no watcher.
        (["--nodes", "a,b", "--on-node", "false"], "that all watchers have ended"),
    ],
)
def test_bad_input_is_said(tmp_path: Path, words: list[str], said: str) -> None:
    done = command("--folder", str(tmp_path / "new"), *words)
    assert done.exit_code == 1
    assert said in done.output


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    words = ["--nodes", "a,b", "--on-node", "true", "--folder", str(tmp_path)]
    done = command(*words)
    assert done.exit_code == 1
    assert f"found {tmp_path}: File exists; use --folder" in done.output


def test_a_start_that_another_loss_ends_is_left_out(tmp_path: Path) -> None:
    run = SurvivalRun({}, tmp_path, 1)
    starts = {1: 10.0, 2: 25.0, 3: 43.0}
    (tmp_path / "job-1").mkdir()
    for number, moment in starts.items():
        path = tmp_path / f"job-1/steps-{number:06}-0"
        # The last line may be incomplete.
        path.write_text(json.dumps([moment, "start", 0, "a", 7]) + '\n[12.5, "st')
    run.losses = [(20.0, "rank"), (40.0, "node"), (41.0, "launcher"), (99.0, "rank")]
    assert run.start_seconds() == [("rank", 5.0), ("launcher", 2.0)]
