"""A real OpenPBS on pretend hosts of this machine, and its jobs, for tests."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cluster.sge import SGE, SGEJob

__all__ = ["PBS", "PBSJob"]


class PBS(SGE):
    """Hosts of an OpenPBS; jobs are submitted on node1. Raises as `Hosts`."""

    _NAME = "pbs"

    def submit(
        self, folder: Path, script: str, *words: str, options: str = ""
    ) -> PBSJob:
        """Submit a script of ``jobs`` from a folder; ``words`` is its program."""
        program = f"-v PROGRAM='{' '.join(words)}'" if words else ""
        line = f"qsub -V {program} {options} jobs/{script}"
        return PBSJob(self, self._submit(folder, line), folder)


class PBSJob(SGEJob):
    """A submitted job of OpenPBS."""

    @property
    def output(self) -> str:
        """Return the output of the job, and of the jobs that it has submitted."""
        paths = sorted(self.folder.glob("logs/*.OU"))
        return "".join(path.read_text(encoding="utf-8") for path in paths)

    def is_known(self) -> bool:
        """Return whether the job, or a job that it has submitted, is queued or runs."""
        return bool(self.sge.command("qselect").strip())

    def _statuses(self) -> list[str]:
        said = self.sge.try_command("qstat", "-xf", self.number).stdout
        return re.findall(r"^ +Exit_status = (\d+)", said, re.MULTILINE)
