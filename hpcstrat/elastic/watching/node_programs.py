"""The processes that a watcher starts and watches on its node."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcstrat.elastic.watching.child_start import MPI_FOLDERS
from hpcstrat.elastic.watching.event_inbox import EventInbox
from hpcstrat.elastic.watching.old_processes import end_generations_before
from hpcstrat.elastic.watching.run_launch import child_words

__all__ = ["NodePrograms", "give_up"]

_EVER = 1 << 62
_WRITER = (sys.executable, "-m", "hpcstrat.checkpoint.node_memory.writer_process")


def is_begun(order: Path) -> bool:
    """Return whether a save is under way; see `OrderFile`, which needs NumPy."""
    states = "begun", "publishing"
    return any(order.with_name(f"{order.name}.{one}").exists() for one in states)


def give_up(order: Path, *states: str) -> None:
    """Give up a save that is in one of some states; default: not yet published."""
    for state in states or ("begun",):
        path = order.with_name(f"{order.name}.{state}")
        with contextlib.suppress(OSError):
            path.rename(order.with_name(f"{order.name}.failed"))


class NodePrograms:
    """The launcher, the daemons of mpirun, the ranks, and the writer of snapshots.

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
        self._writer: subprocess.Popen[bytes] | None = None
        # Nodes of the orders that were given to the writer.
        self._orders: dict[Path, list[str]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __repr__(self) -> str:
        return f"NodePrograms({len(self._ranks)} ranks)"

    @property
    def has_launcher(self) -> bool:
        """True if the launcher of a generation runs on this node."""
        return self._launcher is not None

    @property
    def has_ranks(self) -> bool:
        """True if ranks run on this node."""
        return bool(self._ranks)

    @property
    def has_writer(self) -> bool:
        """True if the process that writes snapshots runs."""
        return self._writer is not None

    def start_launcher(
        self, words: Sequence[str], environment: Mapping[str, str], number: int
    ) -> None:
        """Start the launcher of a generation; its end is an event ``launcher``."""
        with self._output.open("ab") as output:
            child = child_words(words)
            self._launcher = self._start(child, environment, output.fileno())
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
        child = child_words(["/bin/sh", "-c", line])
        self._daemons.append(self._start(child, env, out, folder))
        # A daemon is no zombie for long.
        self._daemons = [one for one in self._daemons if one.poll() is None]

    def save(self, order: Path, nodes: list[str]) -> None:
        """Have the writer execute an order, which these nodes take part in."""
        orders = self._orders.items()
        self._orders = {one: some for one, some in orders if is_begun(one)}
        self._orders[order] = nodes
        self._tell_writer("save", order.name)

    def save_newest(self, number: int, nodes: Sequence[str]) -> None:
        """Have the writer save the newest snapshot, after a generation."""
        self._tell_writer("end", str(number), *nodes)

    def _tell_writer(self, *words: str) -> None:
        """Give the writer a task; it has the lowest priority, and outlives the ranks.

        It is started when there is the first task, and ends with the watcher. Raises
        OSError if it has ended.
        """
        if self._writer is None:
            with self._output.open("ab") as output:
                words_of_writer = child_words(_WRITER, nice=19)
                self._writer = self._start(
                    words_of_writer,
                    self._environment,
                    output.fileno(),
                    stdin=subprocess.PIPE,
                )
            self._inbox.watch(self._writer.pid, "writer")
        assert self._writer.stdin is not None
        if self._writer.stdin.closed:
            raise BrokenPipeError("the writer takes no more tasks")
        self._writer.stdin.write(f"{' '.join(words)}\n".encode())
        self._writer.stdin.flush()

    def end_writer(self, *, at_once: bool = False) -> None:
        """End the writer when it has done its tasks, or at once."""
        if self._writer is None:
            return
        assert self._writer.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._writer.stdin.close()
        if at_once:
            self._writer.kill()

    def forget_writer(self) -> int:
        """Return the status of the writer, which has ended; its saves are given up."""
        assert self._writer is not None
        self.end_writer()
        status = self._writer.wait()
        self._writer = None
        own = self._environment["HPCSTRAT_WATCH_NODE"]
        for order, nodes in self._orders.items():
            # The first node of an order publishes the checkpoint.
            give_up(order, "begun", *["publishing"] * (nodes[0] == own))
        return status

    def give_up_saves(self, node: str) -> None:
        """Give up the saves to which a lost node would contribute."""
        for order, nodes in self._orders.items():
            if node in nodes:
                give_up(order)

    def _start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        folder: str | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(words),
            env=dict(environment),
            cwd=folder,
            stdin=stdin,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

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
        """End all processes of older generations, and return how many remain.

        If none remains, the shared memory that they have left is removed.
        """
        left = end_generations_before(self._run, number)
        folder = Path(self._environment["HPCSTRAT_WATCH_SOCKET"]).parent
        for path in [] if left else folder.glob(f"{MPI_FOLDERS}*"):
            if int(path.name.removeprefix(MPI_FOLDERS)) < number:
                shutil.rmtree(path, ignore_errors=True)
        return left

    def end_all(self) -> None:
        """End the processes of all generations."""
        self.end_before(_EVER)
