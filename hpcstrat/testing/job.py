"""One launcher and all the processes that it started, until they have ended.

The end of the launcher is not the end of the job: ranks of Open MPI survive a SIGKILL
of mpirun, and ranks of MPICH leave the launcher's session. Therefore every process of a
job has the job's folder in its environment, and the ranks of ``run`` write their
process numbers into the folder. `Job.end` kills all processes that the environment or
these numbers show.

A killed launcher does not remove its session directory, whose name has the launcher's
process number. A later mpirun with the same number would fail ("The PMIx server's
listener thread failed to start"). Therefore each job's session directory is in the
job's folder.

Open MPI 5.0's mpirun may deadlock after its ranks have ended: its main thread, in
PMIx_server_deregister_client, waits for a thread that waits for a lock. On a busy
machine, this happened in about one of fifty jobs whose ranks kill each other.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcstrat.engine.topology.process_stat import START, STATE, process_stat

__all__ = ["Job", "note_rank", "start_time", "wait_until", "write_whole"]

_NAP_SECONDS = 0.02
_STACKS_SECONDS = 3.0
_TERMINATE_SECONDS = 2.0
# Seconds between searches for a launcher's processes, and seconds that a launcher may
# still run after its processes have ended.
_LOOK_SECONDS = 2.0
_ALONE_SECONDS = 6.0
_PROC = Path("/proc")

# Environment variable: folders of the jobs of a process, the innermost job last.
_MARK = "HPCSTRAT_TESTING_JOBS"

# Environment variable: folder for the session directory of Open MPI's mpirun.
_SESSIONS = "PRTE_MCA_prte_tmpdir_base"


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll a condition until it is true or the time is up; return its last result."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(_NAP_SECONDS)
    return met


def start_time(pid: int) -> str:
    """Return the start time of a process; a later process of its number has another.

    The time is in clock ticks since the machine started; empty if it is unknown.
    """
    try:
        _, fields = process_stat(pid)
    except OSError:
        return ""
    # A zombie has ended, although its process number is not free yet.
    return "" if fields[STATE] == "Z" else fields[START]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that other processes see either the whole file or no file."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_bytes(content)
    partial.rename(path)


def note_rank(folder: Path, rank: int) -> None:
    """Register this process with a job, which can then read its stacks and end it."""
    stacks = (folder / f"{rank}.stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    pid = os.getpid()
    write_whole(folder / f"{rank}.pid", f"{pid} {start_time(pid)}".encode())


def _signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Job:
    """A launcher in its own session, and the processes that the launcher starts.

    Their output is in files of ``folder``, which must exist; the caller removes it.
    ``environment`` is the launcher's whole environment.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.folder = folder
        outer = environment.get(_MARK, "")
        self._mark = str(folder)
        marks = os.pathsep.join(filter(None, [outer, self._mark]))
        # Whether the launcher has started processes, and the time when they were first
        # seen to have ended.
        self._has_started = False
        self._alone_since: float | None = None
        # Output goes to files, because a rank that outlives the launcher would keep a
        # pipe open, and a reader of the pipe would wait for the rank.
        with (
            self._output("stdout").open("wb") as out,
            self._output("stderr").open("wb") as err,
        ):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={_SESSIONS: str(folder), **environment, _MARK: marks},
                # In its own session, the launcher does not receive the terminal's
                # Ctrl-C; the caller receives it, and ends the job.
                start_new_session=True,
            )

    def _output(self, name: str) -> Path:
        return self.folder / f"launcher.{name}"

    @property
    def stdout(self) -> str:
        """The standard output of the launcher and the ranks so far."""
        return self._output("stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """The standard error of the launcher and the ranks so far."""
        return self._output("stderr").read_text(errors="replace")

    def wait(self, seconds: float) -> int | None:
        """Wait for the launcher; return its exit code, None if it still runs.

        A code of -9 means that signal 9 (SIGKILL) ended the launcher. This method sends
        SIGKILL to a launcher that is in a deadlock.
        """
        deadline = time.monotonic() + max(seconds, 0)
        while True:
            left = max(deadline - time.monotonic(), 0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout=min(left, _LOOK_SECONDS))
            if left <= _LOOK_SECONDS:
                return None
            self._end_launcher_alone()

    def _end_launcher_alone(self) -> None:
        """End a launcher that still runs long after its processes have ended."""
        now = time.monotonic()
        if (self._marked() | self._ranks()) - {self._process.pid}:
            self._has_started, self._alone_since = True, None
        elif self._has_started:
            self._alone_since = self._alone_since or now
            if now > self._alone_since + _ALONE_SECONDS:
                with self._output("stderr").open("a", encoding="utf-8") as err:
                    err.write(
                        "hpcstrat: expected the launcher to end after its processes, "
                        f"found it waiting for {_ALONE_SECONDS:g} s more; it is ended\n"
                    )
                self._process.kill()

    def _marked(self) -> set[int]:
        """Return the live processes with this job's folder in their environment."""
        found = set()
        for path in _PROC.glob("[0-9]*/environ"):
            # Other users' processes cannot be read, and a process may end meanwhile.
            with contextlib.suppress(OSError):
                for entry in path.read_bytes().split(b"\0"):
                    name, _, jobs = os.fsdecode(entry).partition("=")
                    if name == _MARK and self._mark in jobs.split(os.pathsep):
                        found.add(int(path.parent.name))
        return found

    def _ranks(self) -> set[int]:
        """Return the live processes that wrote their number into the folder."""
        ranks = set()
        for path in self.folder.glob("*.pid"):
            number, _, started = path.read_text().partition(" ")
            # With another start time, the number belongs to a later process.
            if start_time(int(number)) == started:
                ranks.add(int(number))
        return ranks

    def show_stacks(self) -> None:
        """Make every Python process of the job write its threads' stacks.

        Ranks of ``run`` write their stacks into files of the folder, and continue.
        Other programs write their stacks to standard error, and end.
        """
        ranks = self._ranks()
        for pid in ranks:
            _signal(pid, signal.SIGUSR1)
        python = Path(sys.executable).resolve()
        for pid in self._marked() - ranks:
            with contextlib.suppress(OSError):
                if (_PROC / str(pid) / "exe").resolve() == python:
                    # With PYTHONFAULTHANDLER, SIGABRT prints the stacks. The limit of 0
                    # prevents a core file.
                    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
                    os.kill(pid, signal.SIGABRT)
        wait_until(lambda: len(self.stacks()) >= len(ranks), _STACKS_SECONDS)
        time.sleep(10 * _NAP_SECONDS)  # The last rank may still be writing.

    def stacks(self) -> dict[int, str]:
        """Return the stacks that ranks have written since `show_stacks`, by rank."""
        found = {}
        for path in self.folder.glob("*.stacks"):
            if text := path.read_text(errors="replace"):
                found[int(path.stem)] = text
        return found

    def end(self) -> None:
        """End all processes of the job that still run."""
        if self.wait(0) is None:
            # Send SIGTERM first, so that the launcher removes its own temporary files.
            _signal(self._process.pid, signal.SIGTERM)
            self.wait(_TERMINATE_SECONDS)
        if self.wait(0) is None:
            self._process.kill()
            self._process.wait()
        # Repeat, because killed processes end slowly, and may have started processes.
        wait_until(self._kill, _TERMINATE_SECONDS)

    def _kill(self) -> bool:
        """Kill all remaining processes; return whether there were none."""
        left = self._ranks() | self._marked()
        for pid in left:
            _signal(pid, signal.SIGKILL)
        return not left
