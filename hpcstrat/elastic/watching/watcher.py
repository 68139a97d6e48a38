"""The watcher of one node: its connections, its processes, and its end."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcstrat.elastic.watching import claims
from hpcstrat.elastic.watching.allocation_end import end_allocation
from hpcstrat.elastic.watching.child_start import node_variables
from hpcstrat.elastic.watching.claims import Generation
from hpcstrat.elastic.watching.leader import Leader
from hpcstrat.elastic.watching.local_requests import make_node_folder, take_requests
from hpcstrat.elastic.watching.mesh import Identity, Mesh
from hpcstrat.elastic.watching.node_programs import NodePrograms, give_up
from hpcstrat.elastic.watching.run_launch import environment_without_step
from hpcstrat.elastic.watching.run_state import RunState, WatchOptions
from hpcstrat.elastic.watching.watch_messages import MessageStream
from hpcstrat.elastic.watching.watch_secret import run_name

__all__ = ["STATUSES", "Watcher"]

STATUSES = {
    "complete": 0,
    "no_progress": 1,
    "saved": 42,
    "failed": 70,
    "too_few": 75,
    "fenced": 76,
    "stopped": 143,
}
"""Exit status of a watcher, by the reason of its end."""

_COMMON_REASONS = ("complete", "no_progress", "saved", "too_few")
_TICK_SECONDS = 0.25
_LEAVING_SECONDS = 600.0
_OLDER_SECONDS = 15.0
# Limits for the last saves; Slurm ends a job 30 s after SIGTERM.
_STOPPED_SECONDS, _SAVING_SECONDS = 25.0, 3600.0
_STOP = signal.SIGTERM, signal.SIGINT
_SIGNALS = (*_STOP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


def _in_time(act: Callable[[], Any]) -> Any:
    """Return the result of an act; an older watcher may still have what it needs."""
    until = time.monotonic() + _OLDER_SECONDS
    while True:
        try:
            return act()
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(_TICK_SECONDS)


class Watcher:
    """The watcher of one node; ``addresses`` has all nodes of the job, in order."""

    def __init__(
        self,
        options: WatchOptions,
        identity: Identity,
        addresses: dict[str, tuple[str, int]],
    ) -> None:
        self._node = identity.node
        # Each event is a tuple of its kind and its values. A signal handler may put
        # events, too, because a SimpleQueue is reentrant.
        self._events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        nodes = tuple(addresses)
        self._state = RunState(
            options, self._node, nodes, Generation(0, "", nodes, (), job=identity.job)
        )
        self._is_gathered = self._is_folder_gone = False
        self._stop_until = 0.0
        self._gather_until = time.monotonic() + options.gather_seconds
        run, host = run_name(identity.secret), os.uname().nodename
        variables = {
            "HPCSTRAT_WATCH_FOLDER": str(options.folder),
            "HPCSTRAT_WATCH_RUN": run,
            "HPCSTRAT_WATCH_JOB": identity.job,
            "HPCSTRAT_WATCH_PORT": str(addresses[self._node][1]),
            "HPCSTRAT_WATCH_START_SECONDS": str(options.start_seconds),
        }
        own = {**environment_without_step(os.environ), **variables}
        about_node = {
            "HPCSTRAT_WATCH_NODE": self._node,
            "HPCSTRAT_WATCH_ADDRESS": addresses[self._node][0],
        }
        self._programs = NodePrograms(
            run,
            {**own, **node_variables(run, host), **about_node},
            options.folder / f"output-{self._node}",
        )
        self._mesh = Mesh(
            identity,
            addresses,
            self._deliver,
            silent_seconds=options.silent_seconds,
        )
        self._leader = Leader(self._state, self._mesh, self._programs, variables)
        self._folder = _in_time(lambda: make_node_folder(run, host))
        take_requests(self._folder / "socket", self._deliver)

    def __repr__(self) -> str:
        return f"Watcher({self._node}, generation {self._state.generation.number})"

    def _deliver(self, *event: Any) -> None:
        self._events.put(event)

    def run(self) -> int:
        """Watch until the end of the run, and return the exit status."""
        for number in _SIGNALS:
            signal.signal(number, lambda number, _: self._deliver("signal", number))
        # The terminal, or the srun of the watchers' step, may be gone.
        signal.signal(signal.SIGHUP, lambda *_: None)
        # Processes of this run that an earlier watcher of this node has left.
        self._programs.end_all()
        _in_time(self._mesh.start)
        self._state.log(f"watches, with {', '.join(self._state.nodes)}")
        while not self._state.reason:
            self._handle_events()
            if not self._state.reason:
                self._look_and_act()
        self._finish()
        return STATUSES[self._state.reason]

    def _handle_events(self) -> None:
        """Handle the events so far, after at most a short time without any."""
        handlers: dict[str, Callable[..., None]] = {
            "came": self._state.present.add,
            "lost": self._on_lost,
            "message": self._on_message,
            "command": self._on_command,
            "local": self._on_local,
            "left": self._end_rank,
            "signal": self._on_signal,
            "log": self._state.log,
            "failed": self._on_failure,
        }
        with contextlib.suppress(queue.Empty):
            kind, *values = self._events.get(timeout=_TICK_SECONDS)
            while True:
                handlers[kind](*values)
                kind, *values = self._events.get_nowait()
        self._programs.look_at_daemons()
        if status := self._programs.look_at_writer():
            self._state.log(f"the writer of snapshots ended with status {status}")

    def _on_failure(self, text: str) -> None:
        self._state.log(
            f"ends by an error of its connections: {text}; please report it"
        )
        self._state.reason = "failed"

    def _on_lost(self, name: str, why: str) -> None:
        self._state.present.discard(name)
        self._state.lost[name] = why
        self._programs.give_up_saves(name)
        if self._state.reason:
            return
        words = {"closed": "has closed its connection", "silent": "is silent"}
        self._state.log(f"lost {name}, which {words[why]}")
        current = self._state.generation
        if name in (*current.nodes, current.leader):
            # This generation is over; the next leader waits for this as well.
            self._programs.end_before(current.number + 1)

    def _on_message(self, name: str, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "generation":
            self._join(Generation.of(message))
        elif kind == "progress":
            self._state.step = max(self._state.step, message["step"])
        elif kind == "save":
            self._save(self._state.options.folder / message["order"], message["nodes"])
        elif kind == "end":
            is_told = self._state.is_stopping and name == self._state.generation.leader
            if message["reason"] in _COMMON_REASONS or is_told:
                self._state.reason = message["reason"]
        else:
            self._leader.take(name, kind, message)

    def _join(self, newer: Generation) -> None:
        if newer.number <= self._state.generation.number:
            return
        self._state.generation, self._is_gathered = newer, True
        self._leader.give_way()
        if self._state.is_stopping:
            # The leader, which was not told to stop, goes on without this node.
            self._state.reason = "stopped"
        if self._programs.end_before(newer.number) == 0:
            self._mesh.send([newer.leader], "cleaned", number=newer.number)
        else:
            self._state.log(
                "cannot end all processes of older generations on this node"
            )

    def _on_command(self, message: dict[str, Any], stream: socket.socket) -> None:
        number = message["number"]
        try:
            if number == self._state.generation.number:
                self._programs.start_daemon(message["line"], number, stream)
                return
        except OSError as error:
            self._state.log(f"cannot start a daemon of mpirun: {error}")
        stream.close()

    def _on_local(
        self, pid: int, message: dict[str, Any], stream: MessageStream
    ) -> None:
        if message["kind"] == "rank":
            self._add_rank(pid, message["number"], stream)
        elif message["kind"] == "rank_end":
            self._end_rank(pid, message["status"])
        else:
            self._mesh.send(message.get("nodes", self._state.living()), **message)

    def _add_rank(self, pid: int, number: int, stream: MessageStream) -> None:
        current = self._state.generation
        with contextlib.suppress(OSError):
            if number == current.number and self._node in current.nodes:
                self._programs.ranks[pid] = number
                self._mesh.send([current.leader], "rank", number=number)
                stream.send("accepted", node=self._node)
                return
            reason = (
                f"expected generation {current.number} on {', '.join(current.nodes)}, "
                f"found a rank of generation {number} on {self._node}"
            )
            stream.send("refused", reason=reason)

    def _end_rank(self, pid: int, status: int = 128 + signal.SIGKILL) -> None:
        """Report the end of a rank; one that has reported no status was killed."""
        number, current = self._programs.ranks.pop(pid, None), self._state.generation
        if number == current.number:
            fields = {"number": number, "status": status}
            self._mesh.send([current.leader], "rank_end", **fields)

    def _save(self, order: Path, nodes: list[str]) -> None:
        """Have this node's part of a snapshot written."""
        try:
            self._programs.save(order, nodes)
        except OSError as error:
            self._state.log(f"cannot have a snapshot written: {error}")
            give_up(order)
        if lost := self._state.lost.keys() & nodes:
            self._programs.give_up_saves(lost.pop())

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            # A child has ended, which is looked at after each event.
            return
        if number in _STOP:
            self._state.log(f"was told to stop (signal {number})")
            self._state.is_stopping = True
            self._stop_until = time.monotonic() + _STOPPED_SECONDS
        if self._leader.launcher != "srun":
            # Slurm sends the signals of a job to the ranks' own step.
            self._programs.signal_ranks(number)

    def _look_and_act(self) -> None:
        """Do what is to be done now, unless the run's folder is gone."""
        state, folder = self._state, self._state.options.folder
        number = state.generation.number
        try:
            os.stat(folder)
            if number and (folder / f"gen-{number + 1}").exists():
                # The run may have gone on without this node.
                state.may_pass(claims.newest(folder))
            if not state.reason:
                self._act()
            self._is_folder_gone = False
        except OSError as error:
            if not self._is_folder_gone:
                state.log(
                    f"expected the run's folder {folder}, found {error.strerror}; "
                    "nothing is started until it is back"
                )
            self._is_folder_gone = True
            if self._state.is_stopping and not self._programs.ranks:
                state.reason = "stopped"

    def _act(self) -> None:
        now = time.monotonic()
        if not self._is_gathered:
            known = {*self._state.living(), *self._state.lost}
            missing = [name for name in self._state.nodes if name not in known]
            if missing and now < self._gather_until:
                return
            self._is_gathered = True
            for name in missing:
                self._state.log(f"expected a watcher on {name}, found none in time")
                self._state.lost[name] = "silent"
                self._mesh.lose(name)
        if self._state.is_stopping:
            # The ranks of other nodes may be at work, which the leader knows.
            leads = self._state.generation.leader not in self._state.present
            if leads or now > self._stop_until:
                self._leader.lead()
        elif self._state.living()[0] == self._node:
            self._leader.lead()

    def _end_saves(self, reason: str) -> None:
        """Have the last saves written, in the time that is left."""
        limit = _STOPPED_SECONDS if reason == "stopped" else _SAVING_SECONDS
        until = time.monotonic() + limit
        current, living = self._state.generation, self._state.living()
        nodes = [name for name in current.nodes if name in living]
        has_snapshots = any(self._folder.glob("memory/*/*.record"))
        is_early = reason in ("no_progress", "stopped", "too_few")
        if is_early and has_snapshots and self._node in nodes:
            self._state.log("saves the newest snapshot in node memory to the disk")
            with contextlib.suppress(OSError):
                self._programs.save_newest(current.number, nodes)
        self._programs.end_writer(at_once=reason in ("fenced", "failed"))
        while self._programs.has_writer:
            self._handle_events()
            if time.monotonic() > until:
                self._state.log(
                    f"expected a save within {limit:.0f} s, found none; the steps "
                    "after the newest checkpoint on the disk are lost"
                )
                until = float("inf")
                self._programs.end_writer(at_once=True)

    def _finish(self) -> None:
        reason = self._state.reason
        is_batch_host_lost = self._state.nodes[0] in self._state.lost
        if reason in (*_COMMON_REASONS, "stopped"):
            self._mesh.send(list(self._state.present), "end", reason=reason)
        self._programs.end_all()
        self._end_saves(reason)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._state.log(f"ends: {reason}")
        if reason in _COMMON_REASONS:
            until = time.monotonic() + _LEAVING_SECONDS
            # The last watcher speaks with the scheduler.
            while self._state.present and self._state.living()[0] == self._node:
                self._handle_events()
                if time.monotonic() > until:
                    break
            if self._state.living() == [self._node]:
                self._remove_files_of_saves()
                end_allocation(
                    queue_again=reason in ("saved", "too_few"),
                    is_batch_host_lost=is_batch_host_lost,
                    log=self._state.log,
                )
        self._mesh.close()

    def _remove_files_of_saves(self) -> None:
        """Remove orders for which no rank has waited; called without other watchers."""
        folder = self._state.options.folder
        with contextlib.suppress(OSError):
            for path in (*folder.glob("save-*"), *folder.glob("held-*")):
                path.unlink()
