"""The processes that a watcher starts and watches on its node."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcstrat.elastic.watching.event_inbox import EventInbox
from hpcstrat.elastic.watching.old_processes import end_generations_before
from hpcstrat.elastic.watching.run_launch import child_words

__all__ = ["NodePrograms"]

_EVER = 1 << 62


class NodePrograms:
    """The launcher, the daemons of mpirun, the ranks, and the programs beside them.

    Ranks are children of their launcher; they are known because they register.
    ``environment`` is that of all programs, without the generation.
    """

    def __init__(
        self, run: str, environment: Mapping[str, str], output: Path, inbox: EventInbox
    ) -> None:
        self._run, self._environment = run, environment
        self._output, self._inbox = output, inbox
        self._launcher: subprocess.Popen[bytes] | None = None
        self._ranks: dict[int, int | None] = {}
        self._beside: dict[int, subprocess.Popen[bytes]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __repr__(self) -> str:
        return f"NodePrograms({len(self._ranks)} ranks, {len(self._beside)} beside)"

    @property
    def has_launcher(self) -> bool:
        """True if the launcher of a generation runs on this node."""
        return self._launcher is not None

    @property
    def has_ranks(self) -> bool:
        """True if ranks run on this node."""
        return bool(self._ranks)

    @property
    def has_beside(self) -> bool:
        """True if programs run beside the ranks."""
        return bool(self._beside)

    def start_launcher(
        self, words: Sequence[str], environment: Mapping[str, str], number: int
    ) -> None:
        """Start the launcher of a generation; its end is an event ``launcher``."""
        with self._output.open("ab") as output:
            self._launcher = self._start(words, environment, output.fileno())
        self._inbox.watch(self._launcher.pid, "launcher", number)

    def launcher_status(self) -> int:
        """Return the status of the launcher, which has ended, and forget it."""
        assert self._launcher is not None
        status = self._launcher.wait()
        self._launcher = None
        return status

    def start_daemon(self, line: str, folder: str, number: int, out: int) -> None:
        """Start a daemon of mpirun, whose output goes to a socket."""
        generation = {"HPCSTRAT_WATCH_GENERATION": str(number)}
        env = {**self._environment, **generation}
        self._daemons.append(self._start(["/bin/sh", "-c", line], env, out, folder))
        # A daemon is no zombie for long.
        self._daemons = [one for one in self._daemons if one.poll() is None]

    def start_beside(self, argv: Sequence[str], folder: str) -> int:
        """Start a program beside the ranks, and return its process id.

        It has the lowest priority, outlives the ranks, and ends with the watcher.
        """
        with self._output.open("ab") as output:
            words = child_words(argv, nice=19)
            one = self._start(words, self._environment, output.fileno(), folder, words)
        self._beside[one.pid] = one
        self._inbox.watch(one.pid, "beside", one.pid)
        return one.pid

    def _start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        folder: str | None = None,
        whole: Sequence[str] | None = None,
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(whole or child_words(words)),
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def forget_beside(self, pid: int) -> int:
        """Return the status of a program beside the ranks that has ended."""
        return self._beside.pop(pid).wait()

    def add_rank(self, pid: int, number: int) -> None:
        """Watch the process that has started a rank; its end is an event ``rank``."""
        self._ranks[pid] = None
        self._inbox.watch(pid, "rank", pid, number)

    def set_status(self, pid: int, status: int) -> None:
        """Keep the exit status that the process of a rank has reported."""
        if pid in self._ranks:
            self._ranks[pid] = status

    def forget_rank(self, pid: int) -> int:
        """Return the status of a rank that has ended; as after SIGKILL if unknown."""
        status = self._ranks.pop(pid, None)
        return 128 + signal.SIGKILL if status is None else status

    def signal_ranks(self, number: int) -> None:
        """Send a signal to the ranks of this node."""
        for pid in self._ranks:
            with contextlib.suppress(OSError):
                # Each rank has a process group.
                if (group := os.getpgid(pid)) != os.getpgid(0):
                    os.killpg(group, number)

    def end_before(self, number: int) -> int:
        """End all processes of older generations, and return how many remain."""
        return end_generations_before(self._run, number)

    def end_all(self, *, beside: bool) -> None:
        """End the processes of all generations, and those beside them if asked."""
        self.end_before(_EVER)
        if beside:
            for one in self._beside.values():
                with contextlib.suppress(OSError):
                    os.killpg(one.pid, signal.SIGKILL)
