"""The processes that a watcher starts and watches on its node."""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcstrat.elastic.watching.child_start import MPI_FOLDERS, with_own_files
from hpcstrat.elastic.watching.old_processes import end_generations_before
from hpcstrat.elastic.watching.run_launch import child_words

__all__ = ["NodePrograms", "give_up"]

_EVER = 1 << 62
# One save and one copy are under way, the others have ended.
_MOST_ORDERS = 8
_WRITER = (sys.executable, "-m", "hpcstrat.checkpoint.node_memory.writer_process")


def _shell() -> str:
    """Return the shell for which mpirun writes the command lines of its daemons."""
    with contextlib.suppress(KeyError):
        if (shell := pwd.getpwuid(os.getuid()).pw_shell).endswith("csh"):
            return shell
    return "/bin/sh"


def give_up(order: Path, *states: str) -> None:
    """Give up a save that is in one of some states; default: not yet published.

    See `OrderFile`, which needs NumPy.
    """
    for state in states or ("begun",):
        path = order.with_name(f"{order.name}.{state}")
        with contextlib.suppress(OSError):
            path.rename(order.with_name(f"{order.name}.failed"))


class NodePrograms:
    """The launcher, the daemons of mpirun, the ranks, and the writer of snapshots.

    Ranks are children of their launcher; ``ranks`` has the generation of each process
    that has started one, and has registered. ``environment`` is that of all programs,
    without the generation.
    """

    def __init__(self, run: str, environment: Mapping[str, str], output: Path) -> None:
        self._run, self._environment, self._output = run, environment, output
        folder = os.path.dirname(environment["HPCSTRAT_WATCH_SOCKET"])
        self._mpi_folders = f"{folder}/{MPI_FOLDERS}"
        self.ranks: dict[int, int] = {}
        self._launcher: subprocess.Popen[bytes] | None = None
        self._writer: subprocess.Popen[bytes] | None = None
        # Nodes of the last orders that were given to the writer.
        self._orders: dict[Path, list[str]] = {}
        self._daemons: list[tuple[subprocess.Popen[bytes], socket.socket]] = []

    def __repr__(self) -> str:
        return f"NodePrograms({len(self.ranks)} ranks)"

    def start_launcher(
        self, words: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Start the launcher of a generation."""
        own = environment if words[0] == "srun" else self._for_launchers(environment)
        self._launcher = self._start(words, own)

    @property
    def has_launcher(self) -> bool:
        """True while the launcher of a generation runs on this node."""
        return self._launcher is not None and self._launcher.poll() is None

    @property
    def launcher_status(self) -> int:
        """The status of the last launcher, which has ended."""
        assert self._launcher is not None
        return self._launcher.wait()

    def start_daemon(self, line: str, number: int, agent: socket.socket) -> None:
        """Start a daemon of mpirun, whose output goes to the agent."""
        env = {**self._environment, "HPCSTRAT_WATCH_GENERATION": str(number)}
        words, out = [_shell(), "-c", line], agent.fileno()
        self._daemons.append((self._start(words, self._for_launchers(env), out), agent))

    def look_at_daemons(self) -> None:
        """Tell the agents the exit statuses of ended daemons, as their last byte."""
        for daemon, agent in [*self._daemons]:
            if (status := daemon.poll()) is not None:
                self._daemons.remove((daemon, agent))
                told = status if status >= 0 else 128 - status
                with agent, contextlib.suppress(OSError):
                    agent.send(bytes([told]), socket.MSG_DONTWAIT)
                    agent.shutdown(socket.SHUT_RDWR)

    def _for_launchers(self, env: Mapping[str, str]) -> dict[str, str]:
        number = env["HPCSTRAT_WATCH_GENERATION"]
        return with_own_files(env, f"{self._mpi_folders}{number}")

    def save(self, order: Path, nodes: list[str]) -> None:
        """Have the writer execute an order, which these nodes take part in."""
        self._orders = dict([*self._orders.items()][-_MOST_ORDERS:])
        self._orders[order] = nodes
        self._tell_writer("save", order.name)

    def save_newest(self, number: int, nodes: Sequence[str]) -> None:
        """Have the writer save the newest snapshot, after a generation."""
        self._tell_writer("end", str(number), *nodes)

    def _tell_writer(self, *words: str) -> None:
        """Give the writer a task; it has the lowest priority, and outlives the ranks.

        It is started when there is the first task, and ends with the watcher. Raises
        OSError if it takes no more.
        """
        # A writer that has just ended is replaced.
        self.look_at_writer()
        if self._writer is None:
            environment, pipe = self._environment, subprocess.PIPE
            self._writer = self._start(_WRITER, environment, nice=19, stdin=pipe)
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

    @property
    def has_writer(self) -> bool:
        """True until the end of the writer has been noticed by `look_at_writer`."""
        return self._writer is not None

    def look_at_writer(self) -> int:
        """Give up the saves of an ended writer, and return its status; else 0."""
        if self._writer is None or (status := self._writer.poll()) is None:
            return 0
        self.end_writer()
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
        output: int | None = None,
        nice: int = 0,
        **more: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a program that ends with this process; it writes to this node's file.

        Further arguments are those of Popen.
        """
        with self._output.open("ab") as file:
            return subprocess.Popen(
                child_words(words, nice),
                env=dict(environment),
                stdout=file if output is None else output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **{"stdin": subprocess.DEVNULL, **more},
            )

    def signal_ranks(self, number: int) -> None:
        """Send a signal to the ranks of this node."""
        for pid in self.ranks:
            with contextlib.suppress(OSError):
                # Each rank has a process group.
                if (group := os.getpgid(pid)) != os.getpgid(0):
                    os.killpg(group, number)

    def end_before(self, number: int) -> int:
        """End all processes of older generations, and return how many remain.

        If none remains, the files of MPI that they have left are removed.
        """
        left = end_generations_before(self._run, number)
        for path in [] if left else glob.glob(f"{self._mpi_folders}*"):
            if int(path.removeprefix(self._mpi_folders)) < number:
                shutil.rmtree(path, ignore_errors=True)
        return left

    def end_all(self) -> None:
        """End the processes of all generations."""
        self.end_before(_EVER)
