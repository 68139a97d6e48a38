"""A real Grid Engine on pretend hosts of this machine, and its jobs, for tests."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from hpcstrat.testing.launcher import clean_environment
from tests.cluster.hosts import Hosts
from tests.cluster.slurm import ROOT, copy_scripts

__all__ = ["SGE", "SGEJob", "as_root"]

_NAP_SECONDS = 0.4


def as_root(folder: Path) -> dict[str, str]:
    """Return the environment of root as a user, with the scripts in a folder."""
    copy_scripts(folder)
    allowed = {
        f"{word}_ALLOW_RUN_AS_ROOT{end}": "1"
        for word in ("OMPI", "PRTE")
        for end in ("", "_CONFIRM")
    }
    # Let waiting ranks yield, because the hosts share cores; see mpirun.sh.
    shares = {
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_coll": "^han",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    own = {"SITE_VENV": sys.prefix, "PYTHONPATH": str(ROOT)}
    return {**clean_environment(), **allowed, **shares, **own}


class SGE(Hosts):
    """Hosts of a Grid Engine; jobs are submitted on node1. Raises as `Hosts`."""

    _NAME = "sge"

    def __init__(self, num_nodes: int, slots: int = 2) -> None:
        self._slots = slots
        super().__init__(num_nodes)
        text = (self.folder / self._NAME / "env").read_text(encoding="utf-8")
        words = [word for word in text.split() if "=" in word]
        self.env = dict(word.split("=", 1) for word in words)

    def _up(self, owner: list[str], num_hosts: int, rate: str) -> list[str]:
        del rate
        return [
            f"{self._NAME}_up.sh",
            *owner,
            "-n",
            str(num_hosts),
            "-c",
            str(self._slots),
        ]

    def command(self, *words: str) -> str:
        """Return the output of a Grid Engine command, which must succeed."""
        done = self.try_command(*words)
        assert done.returncode == 0, f"{words}: {done.stderr}{done.stdout}"
        return done.stdout

    def try_command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a Grid Engine command, and return its status and output."""
        return self._on_first(words, Path("/"), {**clean_environment(), **self.env})

    def _on_first(
        self, words: tuple[str, ...], folder: Path, env: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.folder / "hx"), "node1", *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=folder,
            env=env,
        )

    def submit(
        self, folder: Path, script: str, *words: str, options: str = ""
    ) -> SGEJob:
        """Submit a script of ``jobs`` from a folder, with the options in its head."""
        # -V passes the environment on: this Python is not installed on hosts, and
        # waiting ranks must yield cores.
        line = f"qsub -V -terse {options} jobs/{script} {' '.join(words)}"
        return SGEJob(self, self._submit(folder, line), folder)

    def _submit(self, folder: Path, line: str) -> str:
        """Submit a job, and return the output of the command."""
        done = self._on_first(
            ("bash", "-euc", f". jobs/site.env && {line}"),
            folder,
            {**as_root(folder), **self.env},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


class SGEJob:
    """A submitted job of Grid Engine."""

    def __init__(self, sge: SGE, number: str, folder: Path) -> None:
        self.sge, self.number, self.folder = sge, number, folder

    @property
    def output(self) -> str:
        """Return the output of the job."""
        paths = self.folder.glob(f"logs/*-{self.number}.out")
        return "".join(path.read_text(encoding="utf-8") for path in paths)

    def is_known(self) -> bool:
        """Return whether the job is queued or runs."""
        return bool(re.search(rf"^\s*{self.number} ", self.sge.command("qstat"), re.M))

    def wait_for_text(self, text: str, seconds: float = 90) -> None:
        """Wait until the job's output contains a text."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            time.sleep(_NAP_SECONDS)

    def wait_to_end(self, seconds: float = 120) -> int:
        """Wait for the end of the job, and return its exit status."""
        deadline = time.monotonic() + seconds
        while self.is_known():
            assert time.monotonic() < deadline, self.output
            time.sleep(_NAP_SECONDS)
        statuses: list[str] = []
        # The accounting follows an end by some seconds; status 99 means a requeued job.
        while not statuses or statuses[-1] == "99":
            assert time.monotonic() < deadline, self.output
            time.sleep(_NAP_SECONDS)
            statuses = self._statuses()
        return int(statuses[-1])

    def _statuses(self) -> list[str]:
        """Return the exit statuses of the job's runs that are in the accounting."""
        said = self.sge.try_command("qacct", "-j", self.number).stdout
        return re.findall(r"^exit_status +(\d+)", said, re.MULTILINE)
