"""Watched runs that lose ranks, launchers and nodes at random, and their steps."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcstrat.elastic.watching import claims
from hpcstrat.tools.bench.run_file import BenchError

__all__ = ["KINDS", "SurvivalRun", "SurvivalSetup"]

KINDS = {"rank": 0.55, "launcher": 0.15, "node": 0.3}
"""What is lost, and the share of the losses that lose it."""

_LIMIT_SECONDS = 120.0
_NAP_SECONDS = 0.02


@dataclass(frozen=True)
class SurvivalSetup:
    """The nodes and the training of a benchmark, the same in all of its runs.

    ``on_node`` is the beginning of a command that runs on the node ``{node}``.
    """

    nodes: tuple[str, ...]
    use: int
    ranks_per_node: int
    on_node: str
    launch_options: str
    training: Mapping[str, Any]

    def start(self, node: str, words: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on a node; its output goes to a file."""
        command = [*shlex.split(self.on_node.format(node=node)), *words]
        with log.open("ab") as output:
            try:
                return subprocess.Popen(command, stdout=output, stderr=output)
            except OSError as error:
                raise BenchError(
                    f"expected to start {command[0]}, found {error.strerror}; correct "
                    "--on-node"
                ) from error


@dataclass
class SurvivalRun:
    """A run in one or more jobs, all with the same checkpoints.

    With ``queue_seconds``, each loss ends the job, and the next one starts after this
    time; without, the watchers go on in the job. ``seconds`` and ``steps`` exclude the
    time from a job that has no spare node left to the next one.
    """

    setup: SurvivalSetup
    folder: Path
    random: random.Random
    queue_seconds: float | None = None
    seconds: float = 0.0
    steps: int = 0
    losses: list[tuple[float, str]] = field(default_factory=list)
    _watchers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)
    _job: Path = Path()
    _from: tuple[float, int] = (0.0, 0)

    def go(self, num_losses: int, mean_seconds: float) -> None:
        """Run until there were so many losses, or for the mean time without any."""
        numbers = itertools.count(1)
        try:
            self._start_job(next(numbers))
            while len(self.losses) < num_losses:
                time.sleep(self.random.expovariate(1 / mean_seconds))
                kind = self.random.choices(list(KINDS), list(KINDS.values()))[0]
                if self.queue_seconds is not None:
                    self.losses.append((time.time(), kind))
                    self._end_watchers()
                    time.sleep(self.queue_seconds)
                    self._start_job(next(numbers), goes_on=True)
                elif kind == "node" and len(self._living()) == self.setup.use:
                    self._complete()
                    self._start_job(next(numbers))
                else:
                    self._lose(kind)
            wait = self.random.expovariate(1 / mean_seconds)
            time.sleep(wait if num_losses else mean_seconds)
            self._complete()
        finally:
            self._end_watchers()

    def _living(self) -> list[str]:
        return [name for name in self.setup.nodes if name not in self._gone]

    def _start_job(self, number: int, *, goes_on: bool = False) -> None:
        """Start watchers, and wait for the first step."""
        setup, self._job = self.setup, self.folder / f"job-{number}"
        self._job.mkdir(parents=True)
        self._gone.clear()
        told = json.dumps({**setup.training, "folder": str(self.folder)})
        program = [sys.executable, "-m", "hpcstrat.tools.bench.survival_training", told]
        # Without the number of the job, watchers do not end it after the run.
        words = ["env", "-u", "SLURM_JOB_ID", f"RUN_FOLDER={self._job}"]
        words += [*_hpcstrat(), "watch", "--job", f"{time.time()} {number}"]
        words += ["--nodes", ",".join(setup.nodes), "--launcher", "mpirun"]
        words += ["--use", str(setup.use), "--most-failures", "10"]
        words += ["--ranks-per-node", str(setup.ranks_per_node)]
        words += ["--launch-options", setup.launch_options, "--", *program]
        for node in setup.nodes:
            log = self._job / f"watcher-{node}"
            self._watchers[node] = setup.start(node, words, log)
        self._wait_for(lambda: self._newest_step() is not None, "a first step")
        if not goes_on:
            starts = [line for line in self.records() if line[1] == "start"]
            self._from = starts[-1][0], starts[-1][2]

    def _wait_for(self, fact: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _LIMIT_SECONDS
        while not fact():
            is_over = all(one.poll() is not None for one in self._watchers.values())
            if is_over or time.monotonic() > until:
                reason = "that all watchers have ended" if is_over else "none"
                raise BenchError(
                    f"expected {what} within {_LIMIT_SECONDS:g} s, found {reason}; see "
                    f"the files watcher-* and watch/output-* in {self._job}"
                )
            time.sleep(_NAP_SECONDS)

    def _newest_step(self) -> int | None:
        steps = [line[2] for line in self._lines(self._job) if line[1] == "step"]
        return steps[-1] if steps else None

    def _complete(self) -> None:
        """End the job as a program that is complete, and count its time and steps."""
        newest = self._newest_step
        before = newest() or 0
        self._wait_for(lambda: (newest() or 0) > before, "a step after the last loss")
        (self._job / "stop").touch()
        self._wait_for((self._job / "done").exists, "the end of the training")
        steps = [line for line in self._lines(self._job) if line[1] == "step"]
        self.seconds += steps[-1][0] - self._from[0]
        self.steps += steps[-1][2] - self._from[1]
        for node in self._living():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._watchers[node].wait(_LIMIT_SECONDS)

    def _lose(self, kind: str) -> None:
        """Cause a loss, unless its part is not there at this moment."""
        claim = claims.read(self._job / "watch", claims.newest(self._job / "watch"))
        if claim is None:
            return
        if kind == "rank":
            found = sorted(self._job.glob(f"steps-{claim.number:06}-*"))
            if not found:
                return
            chosen = self.random.choice(found)
            [_, _, _, node, pid] = next(_parsed(chosen))
            words = ["kill", "-KILL", str(pid)]
        else:
            node = (
                claim.leader if kind == "launcher" else self.random.choice(claim.nodes)
            )
            words = [*_hpcstrat(), "chaos", "lose", kind]
        if node in self._gone:
            return
        if kind == "node":
            self._gone.add(node)
        done = self.setup.start(node, words, self._job / "losses").wait(_LIMIT_SECONDS)
        if done == 0:
            self.losses.append((time.time(), kind))

    def _end_watchers(self) -> None:
        """End everything that runs on the nodes, as the end of a job does."""
        lose = [*_hpcstrat(), "chaos", "lose", "node"]
        ends = [
            self.setup.start(node, lose, self._job / "losses")
            for node, watcher in self._watchers.items()
            if watcher.poll() is None
        ]
        for end in ends:
            end.wait(_LIMIT_SECONDS)
        for watcher in self._watchers.values():
            watcher.terminate()
            watcher.wait(_LIMIT_SECONDS)
        self._watchers.clear()

    def records(self) -> list[list[Any]]:
        """Return the lines of rank 0 in all jobs, in the order of their times."""
        jobs = self.folder.glob("job-*")
        return sorted(line for job in jobs for line in self._lines(job))

    def _lines(self, job: Path) -> list[list[Any]]:
        paths = sorted(job.glob("steps-*-0"))
        return [line for path in paths for line in _parsed(path)]

    def wrong_restores(self) -> int:
        """Return the number of ranks that restored other values than were saved."""
        return len([*self.folder.glob("job-*/wrong-*")])

    def start_seconds(self) -> list[tuple[str, float]]:
        """Return each loss's kind, and the time to the start of the next steps.

        Losses during the start after another loss belong to that start, which is left
        out.
        """
        starts = [line[0] for line in self.records() if line[1] == "start"]
        found = []
        for number, (moment, kind) in enumerate(self.losses):
            later = [start for start in starts if start > moment]
            following = self.losses[number + 1 : number + 2]
            if later and not (following and following[0][0] < later[0]):
                found.append((kind, later[0] - moment))
        return found


def _hpcstrat() -> list[str]:
    return [sys.executable, "-m", "hpcstrat"]


def _parsed(path: Path) -> Iterator[list[Any]]:
    """Yield the complete lines of a file that may be written now."""
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
