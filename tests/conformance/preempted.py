"""A training job that gets a preemption notice: its rank program, and its launch.

Each step of such a program is a separate job, because the job ends by itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hpcstrat as hs
from tests.conformance.launch import Outcome, run_job

__all__ = ["main", "replay_jobs"]

_WATCHED_SECONDS = 2.0


def replay_jobs(case: dict[str, Any], limit_seconds: float) -> Outcome:
    """Run the jobs of a program one after the other; they share a folder."""
    steps: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="conformance-") as name:
        for number, step in enumerate(case["program"]):
            folder = Path(name, f"job{number}")
            folder.mkdir()
            job = {**step, "checkpoints": f"{name}/checkpoints", "told": str(folder)}
            words = "tests.conformance.preempted", json.dumps(job)
            size = step["workers"]
            try:
                ended = run_job(size, *words, folder=name, limit_seconds=limit_seconds)
            except subprocess.TimeoutExpired:
                return Outcome([], f"step {number} hangs: {limit_seconds:g} s")
            files = [folder / f"{rank}.json" for rank in range(size)]
            if not all(file.exists() for file in files):
                return Outcome([], f"step {number} ended early:\n{ended.stderr}")
            seen = [json.loads(file.read_text(encoding="utf-8")) for file in files]
            if ended.returncode != max(told["exit_code"] for told in seen):
                said = f"exit code {ended.returncode}, expected that of {seen}"
                return Outcome([], f"step {number}: {said}:\n{ended.stderr}")
            whole = {"before": {}, "after": {}, "events": [], "replicas": 1}
            steps.append({**whole, "seen": seen})
    return Outcome([{"steps": steps}])


class _Training:
    """One rank of a job, with the options of its step."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.noticed = job, False
        self.exits = self.saves = 0
        self.executed: list[int] = []
        self.strategy = hs.MultiWorkerMirroredStrategy()
        self.rank = self.strategy.replica_id
        with self.strategy.scope():
            self.v = hs.Variable(0.0, dtype="float32", aggregation="sum", name="v")
        self.handler = hs.PreemptionCheckpointHandler(
            None,
            hs.CheckpointManager(job["checkpoints"], max_to_keep=1, v=self.v),
            termination_config=hs.TerminationConfig(
                (lambda: self.noticed) if job.get("watcher") else None,
                self.exit if "exit_fn" in job else None,
                save_fn=self.save if job.get("save_fn") else None,
            ),
        )
        self.calls_at_start = self.handler.total_run_calls
        self.value_at_start = float(self.v.numpy())

    def exit(self) -> None:
        """Exit with a status, or return."""
        self.exits += 1
        if self.job["exit_fn"] == "exit_7":
            sys.exit(7)

    def save(self) -> None:
        """Count the call, and save nothing."""
        self.saves += 1

    def notice(self) -> None:
        """Send the preemption notice to this rank."""
        if self.job.get("watcher"):
            self.noticed = True
            time.sleep(_WATCHED_SECONDS)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def step(self, number: int) -> None:
        """Make one training step."""
        self.strategy.run(lambda: self.v.assign_add(1.0))
        self.executed.append(number)

    def train(self) -> None:
        """Make the remaining training steps."""
        wanted = self.job.get("notice") or {"worker": -1, "before_step": -1}
        for number in range(self.handler.total_run_calls, self.job["steps"]):
            if (self.rank, number) == (wanted["worker"], wanted["before_step"]):
                self.notice()
            if self.job.get("api") == "save_checkpoint_if_preempted":
                self.step(number)
                self.handler.save_checkpoint_if_preempted()
            else:
                self.handler.run(self.step, number)

    def observed(self, code: int, *, finished: bool) -> dict[str, Any]:
        """Return the observations of this rank's job."""
        return {
            "exit_code": code,
            "total_run_calls_at_start": self.calls_at_start,
            "value_at_start": self.value_at_start,
            "executed_steps": self.executed,
            "last_value": float(self.v.numpy()),
            "exit_fn_calls": self.exits,
            "save_fn_calls": self.saves,
            "finished": finished,
        }


def main() -> None:
    """Train with the options in the argument, and write the observations."""
    job = json.loads(sys.argv[1])
    training = _Training(job)
    path = Path(job["told"], f"{training.rank}.json")
    try:
        training.train()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        seen = training.observed(code, finished=False)
        path.write_text(json.dumps(seen), encoding="utf-8")
        raise
    seen = training.observed(0, finished=True)
    path.write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
