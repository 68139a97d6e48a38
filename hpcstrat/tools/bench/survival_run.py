"""Watched runs that lose ranks, launchers and nodes at random, and their steps."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcstrat.elastic.watching import claims
from hpcstrat.elastic.watching.child_start import FOLDERS
from hpcstrat.elastic.watching.watch_secret import run_name, shared_secret
from hpcstrat.tools.bench.run_file import BenchError

__all__ = ["SurvivalRun"]

# Kinds of losses, and the share of each.
_KINDS = {"rank": 0.55, "launcher": 0.15, "node": 0.3}
_LIMIT_SECONDS = 120.0
_HPCSTRAT = [sys.executable, "-m", "hpcstrat"]
_TRAINING = [sys.executable, "-m", "hpcstrat.tools.bench.survival_training"]


class SurvivalRun:
    """A run with the options of ``hpcstrat bench survive``.

    With ``queue_seconds``, each loss ends the job, and the next one starts after this
    time; without, the watchers go on in the same job. Nodes are lost only while there
    are spare ones.
    """

    def __init__(
        self,
        told: Mapping[str, Any],
        folder: Path,
        seed: int,
        queue_seconds: float | None = None,
    ) -> None:
        self._told, self._folder = told, folder
        self._random, self._queue_seconds = random.Random(seed), queue_seconds
        self.seconds, self.steps = 0.0, 0
        self.losses: list[tuple[float, str]] = []
        self._watchers: dict[str, subprocess.Popen[bytes]] = {}
        self._gone: set[str] = set()
        self._num_jobs, self._run = 0, ""

    def __repr__(self) -> str:
        return f"SurvivalRun({self.steps} steps, {len(self.losses)} losses)"

    @property
    def _job(self) -> Path:
        return self._folder / f"job-{self._num_jobs:06}"

    def go(self, num_losses: int, mean_seconds: float) -> None:
        """Run until there were so many losses, or for the mean time without any."""
        try:
            self._start_job()
            moment = time.monotonic()
            while len(self.losses) < num_losses:
                moment += self._random.expovariate(1 / mean_seconds)
                time.sleep(max(0.0, moment - time.monotonic()))
                kind = self._random.choices([*_KINDS], [*_KINDS.values()])[0]
                if self._queue_seconds is not None:
                    self._queue_again(kind, self._queue_seconds)
                    moment = time.monotonic()
                elif kind != "node" or self._num_spare():
                    self._lose(kind)
            moment += self._random.expovariate(1 / mean_seconds)
            rest = moment - time.monotonic() if num_losses else mean_seconds
            time.sleep(max(0.0, rest))
            self._complete()
        finally:
            self._end_watchers()

    def _num_spare(self) -> int:
        return len(self._told["nodes"]) - len(self._gone) - int(self._told["use"])

    def _queue_again(self, kind: str, queue_seconds: float) -> None:
        self.losses.append((time.time(), kind))
        self._end_watchers()
        time.sleep(queue_seconds)
        self._start_job()

    def _start(self, node: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a command on a node."""
        command = [*shlex.split(self._told["on_node"].format(node=node)), *words]
        with (self._job / f"output-{node}").open("ab") as output:
            try:
                return subprocess.Popen(command, stdout=output, stderr=output)
            except OSError as error:
                raise BenchError(
                    f"expected to start {command[0]}, found {error.strerror}; correct "
                    "--on-node"
                ) from error

    def _start_job(self) -> None:
        """Start watchers, and wait for the first step."""
        told, self._num_jobs = self._told, self._num_jobs + 1
        folder = self._job / "watch"
        folder.mkdir(mode=0o700, parents=True)
        self._run = run_name(shared_secret(folder))
        memory = 0 if self._queue_seconds is not None else told["snapshot_steps"]
        training = {**told, "folder": str(self._folder), "snapshot_steps": memory}
        # Without the number of the job, watchers do not end it after the run.
        words = ["env", "-u", "SLURM_JOB_ID", f"RUN_FOLDER={self._job}", *_HPCSTRAT]
        names = ",".join(told["nodes"])
        words += ["watch", "--job", str(time.time()), "--nodes", names]
        words += ["--launcher", "mpirun", "--use", str(told["use"])]
        words += ["--ranks-per-node", str(told["ranks_per_node"])]
        # Losses in quick succession let the run make no progress for some time.
        words += ["--most-failures", "1000", "--", *_TRAINING, json.dumps(training)]
        for node in told["nodes"]:
            self._watchers[node] = self._start(node, *words)
        self._wait_for(lambda: self._newest_step() > 0, "a first step")

    def _wait_for(self, fact: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _LIMIT_SECONDS
        while not fact():
            self._require_watchers()
            if time.monotonic() > until:
                raise BenchError(
                    f"expected {what} within {_LIMIT_SECONDS:g} s, found none; see the "
                    f"files output-* and watch/output-* in {self._job}"
                )
            time.sleep(0.02)

    def _require_watchers(self) -> None:
        if all(one.poll() is not None for one in self._watchers.values()):
            raise BenchError(
                "expected a watcher, found that all watchers have ended; see the files "
                f"output-* and watch/output-* in {self._job}"
            )

    def _newest_step(self) -> int:
        lines = self.records("step", self._job.name)
        return int(lines[-1][2]) if lines else 0

    def _complete(self) -> None:
        """End the run as a program that is complete, and count its time and steps."""
        before = self._newest_step()
        self._wait_for(lambda: self._newest_step() > before, "a step after a loss")
        (self._job / "stop").touch()
        self._wait_for((self._job / "done").exists, "the end of the training")
        ended, _, self.steps, *_ = self.records("step")[-1]
        self.seconds = ended - self.records("start")[0][0]
        for node in set(self._watchers) - self._gone:
            self._watchers[node].wait(_LIMIT_SECONDS)

    def _lose(self, kind: str) -> None:
        """Cause a loss; before the ranks have started, that of their launcher."""
        self._require_watchers()
        folder = self._job / "watch"
        claim = claims.read(folder, claims.newest(folder))
        if claim is None:
            return
        node = self._random.choice(claim.nodes)
        starts = [
            line
            for path in sorted(self._job.glob(f"steps-{claim.number:06}-*"))
            for line in _parsed(path)[:1]
        ]
        words = self._chaos("node")
        if kind == "rank" and starts:
            *_, node, pid = self._random.choice(starts)
            words = ["kill", "-KILL", str(pid)]
        elif kind != "node":
            node, kind, words = claim.leader, "launcher", self._chaos("launcher")
        done = self._start(node, *words)
        # The command fails if the part has ended by itself, or by an earlier loss.
        if done.wait(_LIMIT_SECONDS) == 0:
            self.losses.append((time.time(), kind))
            self._gone |= {node} if kind == "node" else set()

    def _end_watchers(self) -> None:
        """End everything that runs on the nodes, as the end of a job does."""
        living = [node for node, one in self._watchers.items() if one.poll() is None]
        for end in [self._start(node, *self._chaos("node")) for node in living]:
            end.wait(_LIMIT_SECONDS)
        for watcher in self._watchers.values():
            watcher.terminate()
            watcher.wait(_LIMIT_SECONDS)
        # A node that was lost, but lives, still has the memory of its watcher.
        remove = "sh", "-c", f"rm -rf {FOLDERS}{os.geteuid()}-{self._run}-*"
        for end in [self._start(node, *remove) for node in self._watchers]:
            end.wait(_LIMIT_SECONDS)
        self._watchers.clear()

    def _chaos(self, part: str) -> list[str]:
        return [*_HPCSTRAT, "chaos", "lose", "--run", self._run, part]

    def records(self, word: str, job: str = "job-*") -> list[list[Any]]:
        """Return the lines of rank 0 with this word, in the order of their times."""
        paths = self._folder.glob(f"{job}/steps-*-0")
        lines = [line for path in paths for line in _parsed(path)]
        return sorted(line for line in lines if line[1] == word)

    def wrong_restores(self) -> int:
        """Return the number of ranks that restored other values than were saved."""
        return len([*self._folder.glob("job-*/wrong-*")])

    def start_seconds(self) -> list[tuple[str, float]]:
        """Return each loss's kind, and the time to the start of the next steps.

        A loss is left out if another one came before these steps.
        """
        starts = [line[0] for line in self.records("start")]
        found = []
        for number, (moment, kind) in enumerate(self.losses):
            later = [start for start in starts if start > moment]
            following = self.losses[number + 1 : number + 2]
            if later and not (following and following[0][0] < later[0]):
                found.append((kind, later[0] - moment))
        return found


def _parsed(path: Path) -> list[list[Any]]:
    """Return the complete lines of a file that may be written now."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found
