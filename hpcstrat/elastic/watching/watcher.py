"""The watcher of one node: its state, and the rules by which it acts.

The main thread waits for events, and then looks at the run's folder. The lowest living
node leads: it claims a generation, has every node end the processes of older ones, and
starts the launcher. The page "Lost nodes" has the rules in words.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcstrat.elastic.completion_marker import write_marker
from hpcstrat.elastic.watching import claims
from hpcstrat.elastic.watching.allocation_end import end_allocation
from hpcstrat.elastic.watching.child_start import node_variables
from hpcstrat.elastic.watching.claims import Generation
from hpcstrat.elastic.watching.event_inbox import EventInbox
from hpcstrat.elastic.watching.local_requests import LocalRequests, NodeFolder
from hpcstrat.elastic.watching.mesh import Identity, Mesh
from hpcstrat.elastic.watching.node_programs import NodePrograms
from hpcstrat.elastic.watching.run_launch import Launch, environment_without_step
from hpcstrat.elastic.watching.watch_secret import run_name

__all__ = ["STATUSES", "WatchOptions", "Watcher"]

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
_CLEAN_SECONDS = 15.0
_ANNOUNCEMENT_SECONDS = 20.0
_HALF_WRITTEN_SECONDS = 2.0
_LEAVING_SECONDS = 600.0
_OLDER_SECONDS = 15.0
_SAVED_STATUS = 42
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class WatchOptions:
    """Options of a watcher.

    ``folder`` has the claims, the secret and the logs; ``marker`` is the file that
    shows that the program is complete. ``use`` is the number of nodes that run ranks,
    and ``least`` the number below which the job is queued again. After
    ``most_failures`` starts in a row without progress, the watchers end.
    """

    folder: Path
    marker: Path
    launch: Launch
    use: int
    least: int
    most_failures: int = 3
    gather_seconds: float = 30.0
    silent_seconds: float = 3.0
    start_seconds: float = 120.0


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


@dataclass
class _Leading:
    """The work of a leader for one generation, from its claim to its launcher's end."""

    number: int
    cleaned: set[str]
    until: float
    not_before: float
    reached: tuple[int, float]
    is_started: bool = False
    has_rank: bool = False
    num_right: int = 0
    failed_on: str = ""
    has_saved: bool = False
    status: int | None = None


class Watcher:
    """The watcher of one node; ``addresses`` has all nodes of the job, in order."""

    def __init__(
        self,
        options: WatchOptions,
        identity: Identity,
        addresses: dict[str, tuple[str, int]],
    ) -> None:
        self._options, self._identity = options, identity
        self._node, self._nodes = identity.node, list(addresses)
        self._inbox = EventInbox()
        self._log_path = options.folder / f"log-{self._node}"
        self._present: set[str] = set()
        self._lost: dict[str, str] = {}
        self._generation = Generation(0, "", tuple(self._nodes), (), job=identity.job)
        self._leading: _Leading | None = None
        self._launch = options.launch
        self._step = -1
        self._is_gathered = self._is_stopping = self._is_folder_gone = False
        self._reason = ""
        self._hold_until = 0.0
        self._doubted = (0, 0.0)
        self._gather_until = time.monotonic() + options.gather_seconds
        run, host = run_name(identity.secret), os.uname().nodename
        self._variables = {
            "HPCSTRAT_WATCH_FOLDER": str(options.folder),
            "HPCSTRAT_WATCH_RUN": run,
            "HPCSTRAT_WATCH_JOB": identity.job,
            "HPCSTRAT_WATCH_PORT": str(addresses[self._node][1]),
        }
        self._programs = NodePrograms(
            run,
            {
                **environment_without_step(os.environ),
                **self._variables,
                **node_variables(run, host),
            },
            options.folder / f"output-{self._node}",
            self._inbox,
        )
        self._mesh = Mesh(
            identity,
            addresses,
            self._inbox.put,
            silent_seconds=options.silent_seconds,
        )
        self._folder = _in_time(lambda: NodeFolder(run, host))
        LocalRequests(self._folder.path / "socket", self._inbox.put)

    def __repr__(self) -> str:
        return f"Watcher({self._node}, generation {self._generation.number})"

    def run(self) -> int:
        """Watch until the end of the run, and return the exit status."""
        for number in _SIGNALS:
            signal.signal(number, lambda number, _: self._inbox.put("signal", number))
        # The terminal, or the srun of the watchers' step, may be gone.
        signal.signal(signal.SIGHUP, lambda *_: None)
        # Processes of this run that an earlier watcher of this node has left.
        self._programs.end_all(beside=False)
        _in_time(self._mesh.start)
        self._log(f"watches, with {', '.join(self._nodes)}")
        while not self._reason:
            self._handle_events()
            self._look_for_newer_claim()
            if not self._reason:
                self._act()
        self._finish()
        return STATUSES[self._reason]

    def _log(self, text: str) -> None:
        clock = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(clock))
        line = f"{stamp}.{int(clock % 1 * 1000):03d} {self._node}: {text}\n"
        # The reader of stderr, or the folder, may be gone.
        with contextlib.suppress(OSError):
            sys.stderr.write(line)
            sys.stderr.flush()
        with contextlib.suppress(OSError), self._log_path.open("a") as file:
            file.write(line)

    # Events.

    def _handle_events(self) -> None:
        handlers: dict[str, Callable[..., None]] = {
            "came": self._on_came,
            "lost": self._on_lost,
            "message": self._on_message,
            "command": self._on_command,
            "local": self._on_local,
            "rank": self._on_rank_end,
            "beside": self._on_beside_end,
            "launcher": self._on_launcher_end,
            "signal": self._on_signal,
            "log": self._log,
            "failed": self._on_failure,
        }
        for kind, *values in self._inbox.wait(_TICK_SECONDS):
            handlers[kind](*values)

    def _on_failure(self, text: str) -> None:
        self._log(f"ends by an error of its connections: {text}; please report it")
        self._reason = "failed"

    def _on_came(self, name: str) -> None:
        self._present.add(name)

    def _on_lost(self, name: str, why: str) -> None:
        self._present.discard(name)
        self._lost[name] = why
        if self._reason:
            return
        words = {"closed": "has closed its connection", "silent": "is silent"}
        self._log(f"lost {name}, which {words[why]}")
        if name in self._generation.nodes or name == self._generation.leader:
            # This generation is over; the next leader waits for this as well.
            self._programs.end_before(self._generation.number + 1)

    def _on_message(self, name: str, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        number = message.get("number")
        leading = self._leading
        if kind == "generation":
            self._join(message)
        elif kind == "progress":
            self._step = max(self._step, message["step"])
        elif kind == "end":
            self._reason = message["reason"] if message["reason"] in STATUSES else ""
        elif leading is not None and number == leading.number:
            if kind == "cleaned":
                leading.cleaned.add(name)
            elif kind == "rank_came":
                leading.has_rank = True
            elif message["status"] == 0:
                leading.num_right += 1
            elif message["status"] == _SAVED_STATUS:
                leading.has_saved = True
            else:
                leading.failed_on = leading.failed_on or name

    def _join(self, told: dict[str, Any]) -> None:
        members, nodes = tuple(told.pop("members")), tuple(told.pop("nodes"))
        newer = Generation(members=members, nodes=nodes, job=self._identity.job, **told)
        if newer.number <= self._generation.number:
            return
        self._generation, self._leading, self._is_gathered = newer, None, True
        if self._programs.end_before(newer.number) == 0:
            self._mesh.send([newer.leader], "cleaned", number=newer.number)
        else:
            self._log("cannot end all processes of older generations on this node")

    def _on_command(self, message: dict[str, Any], stream: socket.socket) -> None:
        with stream:
            if message["number"] != self._generation.number:
                return
            try:
                self._programs.start_daemon(
                    message["line"],
                    message["folder"],
                    message["number"],
                    stream.fileno(),
                )
            except OSError as error:
                self._log(f"cannot start a daemon of mpirun: {error}")

    def _on_local(
        self, pid: int, message: dict[str, Any], answer: Callable[[Any], None]
    ) -> None:
        current = self._generation
        if message["kind"] == "progress":
            self._step = max(self._step, message["step"])
            self._mesh.send(list(self._present), "progress", step=self._step)
        elif message["kind"] == "rank_end":
            self._programs.set_status(pid, message["status"])
            answer({"accepted": message["number"]})
        elif message["kind"] == "start":
            try:
                folder = message["folder"]
                answer(
                    {"started": self._programs.start_beside(message["argv"], folder)}
                )
            except OSError as error:
                answer({"refused": str(error)})
        elif message["number"] != current.number or self._node not in current.nodes:
            answer(
                {
                    "refused": f"expected generation {current.number} on "
                    f"{', '.join(current.nodes)}, found a rank of generation "
                    f"{message['number']} on {self._node}"
                }
            )
        else:
            self._programs.add_rank(pid, current.number)
            self._tell_leader("rank_came", number=current.number)
            answer({"accepted": current.number})

    def _tell_leader(self, kind: str, **fields: int) -> None:
        if self._generation.leader == self._node:
            self._on_message(self._node, {"kind": kind, **fields})
        else:
            self._mesh.send([self._generation.leader], kind, **fields)

    def _on_rank_end(self, pid: int, number: int) -> None:
        status = self._programs.forget_rank(pid)
        if number == self._generation.number:
            self._tell_leader("rank_ended", number=number, status=status)

    def _on_beside_end(self, pid: int) -> None:
        if status := self._programs.forget_beside(pid):
            self._log(f"process {pid} beside the ranks ended with status {status}")

    def _on_signal(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._log(f"was told to stop (signal {number})")
            self._is_stopping = True
        if self._launch.launcher != "srun":
            # Slurm sends the signals of a job to the ranks' own step.
            self._programs.signal_ranks(number)

    def _on_launcher_end(self, number: int) -> None:
        status = self._programs.launcher_status()
        leading = self._leading
        self._programs.end_before(number + 1)
        if self._reason or leading is None or leading.number != number:
            return
        # The reports of the ranks, or of the loss of a node, may come some time later.
        leading.status = status
        leading.until = time.monotonic() + self._options.silent_seconds + 1

    def _judge(self, leading: _Leading, now: float) -> None:
        """Decide whether an ended generation has completed the program."""
        assert leading.status is not None
        is_right = leading.num_right == self._launch.ranks
        is_over = self._has_lost_node() or self._options.marker.exists()
        is_clear = is_right or is_over or leading.failed_on or leading.status
        if not is_clear and now < leading.until:
            return
        self._leading = None
        if is_right and not self._options.marker.exists():
            write_marker(self._options.marker, {"generation": leading.number})
        elif leading.has_saved or leading.status == _SAVED_STATUS:
            self._reason = "saved"
        elif not is_over:
            self._count_failure(leading, leading.status)

    def _has_lost_node(self) -> bool:
        return any(name in self._lost for name in self._generation.nodes)

    def _count_failure(self, leading: _Leading, status: int) -> None:
        current, name = self._generation, leading.failed_on
        has_progress = any(
            now > then
            for now, then in zip(self._reached(), leading.reached, strict=True)
        )
        failures = 0 if has_progress else current.failures + 1
        blamed = dict(current.blamed)
        if name:
            blamed[name] = blamed.get(name, 0) + 1
        self._generation = replace(current, failures=failures, blamed=blamed)
        where = f", first on {name}" if name else ""
        self._log(
            f"generation {current.number} ended with status {status}{where}, "
            f"{failures} in a row without progress"
        )
        if not leading.has_rank and self._launch.launcher == "srun":
            self._log("srun has started no rank; mpirun is tried next")
            self._launch = replace(self._launch, launcher="mpirun", options=())

    def _reached(self) -> tuple[int, float]:
        """Return the largest step, and the time of the newest checkpoint file."""
        newest = 0.0
        for path in self._options.marker.parent.rglob("*.h5"):
            with contextlib.suppress(OSError):
                newest = max(newest, path.stat().st_mtime)
        return self._step, newest

    # Decisions.

    def _living(self) -> list[str]:
        return [n for n in self._nodes if n == self._node or n in self._present]

    def _look_for_newer_claim(self) -> None:
        """End this watcher if the run went on without this node."""
        number = self._generation.number
        try:
            os.stat(self._options.folder)
            self._is_folder_gone = False
            if number and (self._options.folder / f"gen-{number + 1}").exists():
                self._may_pass(claims.newest(self._options.folder))
        except OSError as error:
            if not self._is_folder_gone:
                self._log(
                    f"expected the run's folder {self._options.folder}, found "
                    f"{error.strerror}; nothing is started until it is back"
                )
            self._is_folder_gone = True

    def _may_pass(self, number: int) -> bool:
        """Return whether a newer claim of somebody else leads to no run.

        If that claim has led to a run without this node, this watcher ends.
        """
        now = time.monotonic()
        if self._doubted[0] != number:
            self._doubted = number, now
        waited = now - self._doubted[1]
        claim = claims.read(self._options.folder, number)
        if claim is None and waited < _HALF_WRITTEN_SECONDS:
            return False
        job = self._identity.job
        if claim is not None and claim.job != job and not self._generation.number:
            # A claim of an earlier job in this folder.
            return True
        if claim is None or claim.job != job or self._node not in claim.members:
            self._log(
                f"the run goes on without this node, as generation {number} of "
                f"{claim.job if claim else 'another watcher'}; this node ends its ranks"
            )
            self._reason = "fenced"
            return False
        # Its leader will tell this node, unless it is lost.
        return claim.leader not in self._present or waited > _ANNOUNCEMENT_SECONDS

    def _act(self) -> None:
        now = time.monotonic()
        if not self._is_gathered:
            missing = set(self._nodes) - {self._node} - self._present - set(self._lost)
            if missing and now < self._gather_until:
                return
            self._is_gathered = True
            for name in missing:
                self._log(f"expected a watcher on {name}, found none in time")
                self._lost[name] = "silent"
                self._mesh.drop(name)
        if self._is_stopping:
            if self._leading and self._leading.status is not None:
                self._judge(self._leading, now)
            elif not self._programs.has_launcher and not self._programs.has_ranks:
                self._reason = "stopped"
        elif self._living()[0] == self._node and not self._is_folder_gone:
            self._lead(now)

    def _lead(self, now: float) -> None:
        leading, current = self._leading, self._generation
        is_over = self._has_lost_node()
        if self._programs.has_launcher:
            is_late = leading and not leading.has_rank and now > leading.until
            if is_over or is_late:
                if not is_over:
                    self._log("the launcher has started no rank in time; it is ended")
                # The end of the launcher is an event.
                self._programs.end_before(current.number + 1)
        elif leading and leading.status is not None:
            self._judge(leading, now)
        elif leading is None or is_over:
            self._leading = None
            self._claim(now)
        elif not leading.is_started:
            self._start_when_clean(leading, now)

    def _start_when_clean(self, leading: _Leading, now: float) -> None:
        others = set(self._generation.members) - {self._node} - set(self._lost)
        dirty = others - leading.cleaned
        if dirty and now > leading.until:
            for name in dirty:
                self._log(
                    f"expected {name} to end its older processes, found no answer"
                )
                self._mesh.drop(name)
        if dirty or now < leading.not_before:
            return
        current = self._generation
        leading.is_started = True
        leading.until = now + self._options.start_seconds
        variables = {
            **self._variables,
            "HPCSTRAT_WATCH_GENERATION": str(current.number),
        }
        env = self._launch.environment(variables)
        words = self._launch.words(current.nodes, env)
        try:
            self._programs.start_launcher(words, env, current.number)
        except OSError as error:
            self._log(f"cannot start {self._launch.launcher}: {error}")
            self._reason = "failed"

    def _claim(self, now: float) -> None:
        options, last, living = self._options, self._generation, self._living()
        if options.marker.exists():
            self._reason = "complete"
        elif last.failures >= options.most_failures:
            self._log(
                f"expected progress, found {last.failures} starts in a row without it; "
                f"see {options.folder}/output-*, correct the program, and submit again"
            )
            self._reason = "no_progress"
        elif len(living) < options.least:
            self._log(
                f"expected at least {options.least} nodes, found {', '.join(living)}"
            )
            self._reason = "too_few"
        if self._reason or self._must_hold(living, now):
            return
        base = claims.newest(options.folder)
        if base > last.number and not self._may_pass(base):
            return
        usable = sorted(
            living, key=lambda n: last.blamed.get(n, 0) >= options.most_failures
        )[: options.use]
        claim = replace(
            last,
            number=base + 1,
            leader=self._node,
            members=tuple(living),
            nodes=tuple(name for name in living if name in usable),
        )
        older = claims.read(options.folder, base) if base else None
        try:
            if not claims.create(options.folder, claim):
                return
        except OSError as error:
            self._log(f"cannot claim generation {claim.number}: {error}; tries again")
            return
        self._generation, self._hold_until = claim, 0.0
        # Watchers of another job in this folder, if they live, see the claim meanwhile.
        is_new = older is not None and older.job != claim.job
        self._leading = _Leading(
            claim.number,
            set(),
            until=now + _CLEAN_SECONDS,
            not_before=now + 2 * options.silent_seconds * is_new,
            reached=self._reached(),
        )
        told = asdict(claim)
        told.pop("job")
        self._mesh.send(list(self._present), "generation", **told)
        left = self._programs.end_before(claim.number)
        self._log(
            f"starts generation {claim.number} on {', '.join(claim.nodes)} by "
            f"{self._launch.launcher}; output in {options.folder}/output-{self._node}"
        )
        if left:
            self._log("cannot end all processes of older generations on this node")
            self._reason = "failed"

    def _must_hold(self, living: list[str], now: float) -> bool:
        if not claims.is_minority(living, self._generation.members, self._lost):
            self._hold_until = 0.0
            return False
        if not self._hold_until:
            self._hold_until = now + 2 * self._options.silent_seconds
            self._log("this may be the smaller part of the nodes; waits for the others")
        return now < self._hold_until

    # The end.

    def _finish(self) -> None:
        reason = self._reason
        is_batch_host_lost = self._nodes[0] in self._lost
        if reason in _COMMON_REASONS:
            self._mesh.send(list(self._present), "end", reason=reason)
        # Programs beside the ranks write the last saves.
        self._programs.end_all(beside=reason in ("fenced", "stopped", "failed"))
        while self._programs.has_beside:
            self._handle_events()
        self._folder.remove()
        self._log(f"ends: {reason}")
        if reason in _COMMON_REASONS:
            until = time.monotonic() + _LEAVING_SECONDS
            # The last watcher speaks with the scheduler.
            while self._present and self._living()[0] == self._node:
                self._handle_events()
                if time.monotonic() > until:
                    break
            if self._living() == [self._node]:
                end_allocation(
                    queue_again=reason in ("saved", "too_few"),
                    is_batch_host_lost=is_batch_host_lost,
                    log=self._log,
                )
        self._mesh.close()
