"""Tests whether the MPI library can read and write GPU memory; caches the result.

The library's version text is not reliable: builds with and without GPU support have the
same text, support may be missing for some operations only, and a wrong guess leads to a
segmentation fault. Therefore, separate processes really move buffers, and may crash.
Their environment has no variables of the job, because a child that joined the job as a
rank would hang all ranks. ``hpcstrat doctor`` runs the trial. The first rank of a job
with GPUs also runs it before MPI starts, if no result is cached for its kind of node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.probe.launching import (
    find_launcher,
    kept_settings,
    launch,
    scrubbed,
)
from hpcstrat.engine.gpu.probe.outcome import (
    OPERATIONS,
    Answer,
    TrialOutcome,
    read_outcome,
)
from hpcstrat.engine.logs import get_logger

__all__ = [
    "ABILITIES",
    "ProbeReport",
    "cache_path",
    "known",
    "node_kind",
    "probe",
    "save",
]

# For each ability, the operations that must all work.
ABILITIES = {
    "mpi_sendrecv": ("send", "receive", "sendrecv", "exchange"),
    "mpi_broadcast": ("broadcast",),
    "mpi_allreduce": ("allreduce",),
}

_PROGRAM = ("-m", "hpcstrat.engine.gpu.probe.probe_program")
_FORMAT = 1
_OUTPUT_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The result of a trial on one kind of node."""

    # The result of `node_kind`.
    kind: dict[str, str]
    # Date and time of the trial, in UTC.
    date: str
    # The processes and GPUs of the trial, or the reason why there are no answers.
    how: str
    # Answers by operation; empty if the trial could not run.
    answers: dict[str, Answer] = field(default_factory=dict)
    # True if a single process sent messages to itself. A trial of one process can prove
    # that an operation fails, but not that it works between two processes.
    weak: bool = False
    output: str = ""

    def answer(self, operations: Sequence[str]) -> tuple[bool, str]:
        """Return whether these operations all work between two processes, and why."""
        tried = {
            name: self.answers[name] for name in operations if name in self.answers
        }
        for name, found in tried.items():
            if not found.ok:
                return False, f"{name} of GPU memory: {found.reason}"
        if self.weak or len(tried) < len(operations):
            return False, f"not proven, because it was tried with {self.how}"
        return True, f"tried on {self.date} with {self.how}"


def node_kind(library_version: str) -> dict[str, str]:
    """Return versions, GPUs and settings that identify a kind of node. Loads CuPy."""
    found = library.versions()
    names = sorted({gpu.name for gpu in library.visible_gpus()})
    return {
        "mpi": library_version.strip("\0 \n"),
        "cupy": found.cupy,
        "driver": found.driver,
        "runtime": found.runtime,
        "gpus": ", ".join(names),
        "machine": platform.machine(),
        **kept_settings(os.environ),
    }


def cache_path(kind: Mapping[str, str]) -> Path:
    """Return the path of the cached report, in ``$XDG_CACHE_HOME/hpcstrat``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    text = json.dumps([_FORMAT, sorted(kind.items())])
    name = hashlib.sha256(text.encode()).hexdigest()[:20]
    return Path(base) / "hpcstrat" / f"mpi-{name}.json"


def known(library_version: str) -> ProbeReport | None:
    """Return the cached report on this kind of node, or None. Loads CuPy.

    Also returns None if the file is damaged; the next trial replaces the file.
    """
    kind = node_kind(library_version)
    try:
        return _parsed(json.loads(cache_path(kind).read_text()), kind)
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _parsed(content: Any, kind: dict[str, str]) -> ProbeReport:
    """Return the report in a file; raise if it is damaged or of another node kind."""
    if content["format"] != _FORMAT or content["kind"] != kind:
        raise ValueError("expected a report on this kind of node")
    answers = {
        str(name): Answer(ok=answer["ok"] is True, reason=str(answer["reason"]))
        for name, answer in content["answers"].items()
    }
    if not answers or set(answers) - set(OPERATIONS):
        raise ValueError("expected answers")
    return ProbeReport(
        kind,
        str(content["date"]),
        str(content["how"]),
        answers,
        weak=content["weak"] is not False,
        output=str(content["output"]),
    )


def save(report: ProbeReport) -> str:
    """Write a report that has answers to the cache; return an error message, or ""."""
    if not report.answers:
        return ""
    path = cache_path(report.kind)
    partial = path.with_suffix(f".{platform.node()}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, **asdict(report)}, indent=1)
        partial.write_text(text + "\n")
        # Rename atomically, because ranks of other jobs may be reading the file.
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        return str(error)
    return ""


def probe(
    library_version: str,
    *,
    launcher: Sequence[str] | None = None,
    program: Sequence[str] = _PROGRAM,
    limit_seconds: float = 90.0,
) -> ProbeReport:
    """Test, in other processes, which MPI operations work with GPU memory.

    Do not call this function in a rank whose MPI runs, because the trial would compete
    with the rank for network and GPU. ``launcher`` is a command that starts two ranks
    (``["srun", "-n2", "--mpi=pmix"]``); the default is the mpirun of this MPI library.
    Without a launcher, one process runs a weaker trial. ``program`` has the arguments
    of Python, and ``limit_seconds`` limits each start of the program. If the trial
    cannot run, the report has no answers, and its ``how`` is the reason.
    """
    kind = node_kind(library_version)
    python = [sys.executable, *program]
    environment = scrubbed(os.environ, allocation=launcher is not None)
    how = ""
    if launcher is None:
        launcher, how = find_launcher(library_version, environment)
    if launcher:
        command = [*launcher, *python]
        report = _tried(kind, command, environment, limit_seconds, num_ranks=2)
        if report.answers:
            return report
        how = report.how
    alone = _tried(kind, python, scrubbed(os.environ), limit_seconds, num_ranks=1)
    if not alone.answers:
        return dataclasses.replace(alone, how=how or alone.how)
    words = f"one process that sent to itself, because two could not be tried: {how}"
    return dataclasses.replace(alone, how=words, weak=True)


def _tried(
    kind: dict[str, str],
    command: Sequence[str],
    environment: Mapping[str, str],
    limit_seconds: float,
    *,
    num_ranks: int,
) -> ProbeReport:
    """Start the program repeatedly, until all operations have an answer."""
    answers: dict[str, Answer] = {}
    how, output = "", ""
    while len(answers) < len(OPERATIONS):
        words = [*command, "--skip", ",".join(answers)]
        outcome = _started(words, environment, limit_seconds, num_ranks)
        output = outcome.output[-_OUTPUT_CHARACTERS:]
        used = outcome.library
        if outcome.answers and used != kind["mpi"]:
            how = f"the trial used another MPI library, {used.splitlines()[0]}"
            break
        how = outcome.how if outcome.answers else how or outcome.how
        answers |= outcome.answers
        # An operation that crashed the program is skipped in the next start.
        _leave_out(answers)
        # Stop if a start gave no new answer: the next start would give none either.
        if outcome.complete or not outcome.answers:
            break
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return ProbeReport(kind, date, how, answers, output=output)


def _leave_out(answers: dict[str, Answer]) -> None:
    """Mark an ability's untried operations as failed if another of them has failed."""
    for names in ABILITIES.values():
        failed = [name for name in names if name in answers and not answers[name].ok]
        for name in names if failed else ():
            text = f"not tried, because {failed[0]} failed"
            answers.setdefault(name, Answer(False, text))


def _started(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit_seconds: float,
    num_ranks: int,
) -> TrialOutcome:
    """Run the trial program once."""
    with tempfile.TemporaryDirectory(prefix="hpcstrat-probe-") as folder:
        # Use a new folder for Open MPI's session directories, which are named by
        # process numbers: a directory left by a killed launcher would stop a later
        # launcher with the same number (see hpcstrat.testing.job).
        names = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
        ended = launch(
            [*command, folder],
            {**environment, **dict.fromkeys(names, folder)},
            folder,
            limit_seconds=limit_seconds,
            num_ranks=num_ranks,
        )
        return read_outcome(Path(folder), ended)


def main() -> int:
    """Run the trial on this node: ``python -m hpcstrat.engine.gpu.probe.probe``."""
    from hpcstrat.engine.gpu.probe.probe_program import library_version

    report = probe(library_version())
    trouble = save(report)
    for name, answer in report.answers.items():
        word = "yes" if answer.ok else "no"
        sys.stdout.write(f"{name:10} {word:4}{answer.reason}\n")
    sys.stdout.write(f"{report.how}\n")
    if trouble:
        get_logger("device").warning("the report could not be kept: %s", trouble)
    return 0 if report.answers else 1


if __name__ == "__main__":
    sys.exit(main())
