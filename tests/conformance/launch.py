"""Start the replay jobs, one for each number of ranks, and report their failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "num_ranks", "replay", "run_job"]

ROOT = Path(__file__).resolve().parents[2]
# Seconds that other ranks may still run after the first rank has ended a case.
_STRAGGLER_SECONDS = 8.0
_POLL_SECONDS = 0.03
# Variables of a launcher around this process, which would confuse a new launcher.
_LAUNCHER_VARIABLES = (
    "HYDI_",
    "MPI_LOCAL",
    "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_",
    "PMIX_",
    "PMI_",
    "PRTE_LAUNCHED",
)


@dataclass
class Outcome:
    """The outcome of one case: each rank's record, or the reason why there is none."""

    records: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None


def num_ranks(case: dict[str, Any]) -> int:
    """Return the number of ranks of a case: one per replica, but at most ``ranks``."""
    sizes: list[int] = [case["replicas"]]

    def visit(steps: Sequence[dict[str, Any]]) -> None:
        for step in steps:
            if step.get("op") in ("new_strategy", "other_strategy"):
                sizes.append(step["replicas"])
            visit(step.get("body", []))

    visit(case["program"])
    return min(max(sizes), case.get("ranks", max(sizes)))


def _launcher() -> list[str]:
    """Return the command that starts ranks, with its fixed options.

    The launcher in the environment of the running interpreter has priority, because
    mpi4py is bound to the MPI library of this environment.
    """
    own = Path(sys.executable).parent
    found = [str(own / name) for name in ("mpirun", "mpiexec")]
    found += [shutil.which(name) or "" for name in ("mpirun", "mpiexec")]
    for command in found:
        if command and os.access(command, os.X_OK):
            break
    else:
        raise FileNotFoundError(
            f"expected mpirun or mpiexec in {own} or on PATH, found neither; install "
            "an MPI library"
        )
    version = subprocess.run(
        [command, "--version"], capture_output=True, text=True, check=False
    ).stdout
    if "Open MPI" in version or "OpenRTE" in version or "PRRTE" in version:
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        return [command, *options]
    return [command]


class _Tail:
    """A reader of one rank's events, while the rank writes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self.pid: int | None = None
        self.current: int | None = None
        self.step = 0
        self.since = 0.0
        self.ended: dict[int, tuple[float, dict[str, Any]]] = {}

    def poll(self) -> None:
        """Read the new events."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._event(json.loads(line))

    def _event(self, event: dict[str, Any]) -> None:
        if "pid" in event:
            self.pid = event["pid"]
        elif "begin" in event:
            self.current, self.step, self.since = event["begin"], 0, time.monotonic()
        elif "step" in event:
            self.step = event["step"]
        elif "end" in event:
            self.ended[event["end"]] = (time.monotonic(), event["record"])
            self.current = None


class _Job:
    """One run of the launcher over the cases in ``order``."""

    def __init__(
        self, cases: Sequence[dict[str, Any]], order: Sequence[int], size: int
    ) -> None:
        self.cases = cases
        self.order = list(order)
        self.size = size

    def run(self, limit_seconds: float) -> dict[int, Outcome]:
        """Run until all cases are done, or one ends the job; return the outcomes."""
        with tempfile.TemporaryDirectory(prefix="conformance-") as name:
            directory = Path(name)
            self._write_job(directory)
            self._tails = [
                _Tail(directory / f"rank{rank}.jsonl") for rank in range(self.size)
            ]
            output = directory / "output.txt"
            command = [*_launcher(), "-n", str(self.size), sys.executable, "-m"]
            command += ["tests.conformance.worker", str(directory / "job.json")]
            with output.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=_environment(name),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    why = self._watch(process, limit_seconds)
                    if why is not None:
                        why += self._stacks(directory)
                finally:
                    self._end(process)
            for tail in self._tails:
                tail.poll()
            said = output.read_text(encoding="utf-8", errors="replace")[-1500:]
            return self._collect(why, process.returncode, said)

    def _write_job(self, directory: Path) -> None:
        for index in self.order:
            (directory / f"case{index}").mkdir()
        wanted = set(self.order)
        job = {
            "directory": str(directory),
            "order": self.order,
            # JSON has no integer keys, so the cases are a list with gaps.
            "cases": [
                case if index in wanted else None
                for index, case in enumerate(self.cases)
            ],
        }
        (directory / "job.json").write_text(json.dumps(job), encoding="utf-8")

    def _watch(
        self, process: subprocess.Popen[bytes], limit_seconds: float
    ) -> str | None:
        """Wait for the job's end; return a reason to end the job before, or None."""
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            for tail in self._tails:
                tail.poll()
            why = self._overdue(limit_seconds)
            if why is not None:
                return why
        return None

    def _overdue(self, limit_seconds: float) -> str | None:
        """Return a text about the case that hangs, or None."""
        now = time.monotonic()
        for rank, tail in enumerate(self._tails):
            index = tail.current
            if index is None:
                continue
            firsts = [t.ended[index][0] for t in self._tails if index in t.ended]
            late = firsts and now - min(firsts) > _STRAGGLER_SECONDS
            if late or now - tail.since > limit_seconds:
                op = self.cases[index]["program"][tail.step]["op"]
                who = "the others have ended it" if late else f"{limit_seconds:g} s"
                return f"hangs: rank {rank} is in step {tail.step} ({op}), {who}"
        return None

    def _stacks(self, directory: Path) -> str:
        """Make ranks that hang write their stacks; return these stacks."""
        for tail in self._tails:
            if tail.pid is not None and tail.current is not None:
                _signal(tail.pid, signal.SIGUSR1)
        time.sleep(0.3)
        text = ""
        for rank, tail in enumerate(self._tails):
            path = directory / f"rank{rank}.stacks"
            if tail.current is not None and path.exists():
                lines = path.read_text(encoding="utf-8").splitlines()[-14:]
                text += f"\n  stack of rank {rank}:\n    " + "\n    ".join(lines)
        return text

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End the launcher and its ranks, by their process numbers."""
        if process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # Ranks can outlive their launcher.
        for tail in self._tails:
            if tail.pid is not None:
                _signal(tail.pid, signal.SIGKILL)

    def _collect(
        self, why: str | None, returncode: int, said: str
    ) -> dict[int, Outcome]:
        """Return the outcomes of the finished cases, and of the case that failed."""
        outcomes: dict[int, Outcome] = {}
        for index in self.order:
            if all(index in tail.ended for tail in self._tails):
                records = [tail.ended[index][1] for tail in self._tails]
                outcomes[index] = Outcome(records)
                continue
            failure = why or f"the job ended with exit code {returncode}:\n{said}"
            known = [tail.ended.get(index, (0, {}))[1] for tail in self._tails]
            outcomes[index] = Outcome(known, failure)
            begun = any(tail.current == index for tail in self._tails)
            if not begun and not any(index in tail.ended for tail in self._tails):
                # The job broke between two cases, so this case has not started.
                outcomes[index].failure = f"not started: {failure}"
            break
        return outcomes


def _environment(folder: str) -> dict[str, str]:
    """Return the environment of a job whose files are in a folder."""
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(_LAUNCHER_VARIABLES)
    }
    paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        env[name] = "1"
    # A killed mpirun leaves files that stop a later mpirun with the same number.
    env["PRTE_MCA_prte_tmpdir_base"] = folder
    return env


def run_job(
    size: int, *words: str, folder: str, limit_seconds: float, survives: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m WORDS`` on ``size`` ranks; ``TimeoutExpired`` after the limit.

    ``folder`` is temporary. If the job ``survives``, the ranks continue when a rank
    dies.
    """
    command = [*_launcher(), *(["--with-ft", "ulfm"] if survives else [])]
    return subprocess.run(
        [*command, "-n", str(size), sys.executable, "-m", *words],
        cwd=ROOT,
        env=_environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        check=False,
    )


def _signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def replay(
    cases: Sequence[dict[str, Any]], indices: Sequence[int], limit_seconds: float
) -> dict[int, Outcome]:
    """Replay the cases with these indices; return the outcome of each case."""
    outcomes: dict[int, Outcome] = {}
    by_size: dict[int, list[int]] = {}
    for index in indices:
        by_size.setdefault(num_ranks(cases[index]), []).append(index)
    for size, order in sorted(by_size.items()):
        pending = order
        restarted: set[int] = set()
        while pending:
            found = _Job(cases, pending, size).run(limit_seconds)
            for index, outcome in found.items():
                not_started = (outcome.failure or "").startswith("not started")
                if not_started and index not in restarted:
                    restarted.add(index)
                    continue
                outcomes[index] = outcome
            pending = [index for index in pending if index not in outcomes]
    return outcomes
