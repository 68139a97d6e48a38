"""The part of a watcher that leads: it claims generations, and starts and judges them.

Every watcher has this part; only that of the lowest living node is at work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from hpcstrat.elastic.completion_marker import write_marker
from hpcstrat.elastic.watching import claims
from hpcstrat.elastic.watching.claims import Generation
from hpcstrat.elastic.watching.mesh import Mesh
from hpcstrat.elastic.watching.node_programs import NodePrograms
from hpcstrat.elastic.watching.run_state import RunState

__all__ = ["Leader"]

_CLEAN_SECONDS = 15.0
_SAVED_STATUS = 42


class Leader:
    """Leads a run by the rules of the page "Continuing after the loss of a node".

    ``variables`` are the environment variables of the ranks.
    """

    def __init__(
        self,
        state: RunState,
        mesh: Mesh,
        programs: NodePrograms,
        variables: Mapping[str, str],
    ) -> None:
        self._state, self._mesh, self._programs = state, mesh, programs
        self._variables = variables
        self._launch = state.options.launch
        self._hold_until = 0.0
        self._forget_reports()
        self._steps = self._lead_run()

    def __repr__(self) -> str:
        return f"Leader({self._num_ranks} ranks, {len(self._ends)} have ended)"

    def _forget_reports(self) -> None:
        """Begin a generation without reports of its nodes."""
        self._cleaned: set[str] = set()
        self._num_ranks = 0
        # Node and status of each rank that has ended.
        self._ends: list[tuple[str, int]] = []
        # The launcher must have started all ranks, or have ended after them.
        self._until = 0.0
        # The progress before the start.
        self._reached = -1, 0.0

    @property
    def launcher(self) -> str:
        """The name of the launcher."""
        return self._launch.launcher

    def give_way(self) -> None:
        """Forget the generation that another leader has replaced."""
        self._steps = self._lead_run()

    def take(self, name: str, kind: str, message: Mapping[str, Any]) -> None:
        """Take a report of a node, perhaps of this one."""
        if message["number"] != self._state.generation.number:
            return
        if kind == "cleaned":
            self._cleaned.add(name)
        elif kind == "rank":
            self._num_ranks += 1
        else:
            self._ends.append((name, message["status"]))
            if len(self._ends) == self._launch.ranks:
                self._until = time.monotonic() + self._state.options.start_seconds

    def lead(self) -> None:
        """Do what is to be done now; called after each event."""
        next(self._steps, None)

    def _lead_run(self) -> Iterator[None]:
        """Claim, start and judge generations; waits for events where it yields."""
        state = self._state
        while not state.reason:
            if (not_before := self._claim()) is None:
                yield
                continue
            number = state.generation.number
            while self._is_dirty(not_before) or time.monotonic() < not_before:
                yield
            if state.has_lost_node() or state.is_stopping:
                continue
            if not self._start_launcher():
                return
            while self._programs.has_launcher:
                if state.has_lost_node() or self._is_late():
                    self._programs.end_before(number + 1)
                yield
            self._programs.end_before(number + 1)
            # The reports of the ranks, or of a lost node, may come some time later.
            until = time.monotonic() + state.options.silent_seconds + 1
            while not self._judge(until):
                yield

    def _is_dirty(self, begin: float) -> bool:
        """Return whether a node may have processes of older generations."""
        others = {*self._state.generation.members} - {self._state.node}
        dirty = others - {*self._state.lost} - self._cleaned
        for name in dirty if time.monotonic() > begin + _CLEAN_SECONDS else ():
            self._state.log(f"expected {name} to end its older processes in time")
            self._mesh.lose(name)
        return bool(dirty)

    def _is_late(self) -> bool:
        """Return whether the launcher has not started, or outlives, its ranks."""
        wanted, is_late = self._launch.ranks, time.monotonic() > self._until
        if is_late and self._num_ranks < wanted:
            found = f"the launcher has started {self._num_ranks}"
            self._state.log(f"expected {wanted} ranks in time, found that {found}")
            return True
        if is_late and len(self._ends) >= wanted:
            self._state.log("expected the launcher to end after its ranks; ends it")
            return True
        return False

    def _judge(self, until: float) -> bool:
        """Decide whether a start whose launcher has ended has completed the program.

        mpirun has status 0 even after the loss of a node: the ranks' statuses decide.
        Returns whether these are known.
        """
        state, marker = self._state, self._state.options.marker
        status = self._programs.launcher_status
        statuses = [one for _, one in self._ends]
        failed_on = [name for name, one in self._ends if one not in (0, _SAVED_STATUS)]
        is_right = statuses.count(0) == self._launch.ranks
        try:
            is_over = state.has_lost_node() or marker.exists()
            is_clear = is_right or is_over or failed_on or status
            if not is_clear and time.monotonic() < until:
                return False
            if is_right and not marker.exists():
                write_marker(marker, {"generation": state.generation.number})
            if marker.exists():
                state.reason = "complete"
            elif _SAVED_STATUS in (*statuses, status):
                state.reason = "saved"
            elif not is_over:
                self._count_failure(status, failed_on[0] if failed_on else "")
        except OSError as error:
            state.log(f"cannot write {marker}: {error}; tries again")
            return False
        return True

    def _count_failure(self, status: int, name: str) -> None:
        state = self._state
        pairs = zip(state.reached(), self._reached, strict=True)
        has_progress = any(now > then for now, then in pairs)
        failures = 0 if has_progress else state.generation.failures + 1
        blamed = dict(state.generation.blamed)
        if name:
            blamed[name] = blamed.get(name, 0) + 1
        state.generation = replace(state.generation, failures=failures, blamed=blamed)
        where = f", the first failed rank was on {name}" if name else ""
        state.log(
            f"generation {state.generation.number} ended with status {status}{where}, "
            f"{failures} in a row without progress"
        )
        if not self._num_ranks and self.launcher == "srun":
            state.log("srun has started no rank; mpirun is tried next")
            self._launch = replace(self._launch, launcher="mpirun", options=())

    def _start_launcher(self) -> bool:
        state, current = self._state, self._state.generation
        number = {"HPCSTRAT_WATCH_GENERATION": str(current.number)}
        env = self._launch.environment(current.nodes, {**self._variables, **number})
        words = self._launch.words(current.nodes, env)
        self._until = time.monotonic() + state.options.start_seconds
        try:
            self._programs.start_launcher(words, env)
        except OSError as error:
            state.log(f"cannot start {self.launcher}: {error}")
            state.reason = "failed"
        return not state.reason

    def _claim(self) -> float | None:
        """Claim the next generation; return the time before which it must not start.

        Returns None if the run is at its end, or must wait.
        """
        state, options, living = self._state, self._state.options, self._state.living()
        if state.is_stopping:
            state.reason = "" if self._programs.ranks else "stopped"
            return None
        try:
            state.reason = self._reason_to_end(living)
            if state.reason or self._must_hold(living):
                return None
            base = claims.newest(options.folder)
            if base > state.generation.number and not state.may_pass(base):
                return None
            older = claims.read(options.folder, base) if base else None
            claim = self._next_generation(base + 1, living)
            reached = state.reached()
            if not claims.create(options.folder, claim):
                return None
        except OSError as error:
            state.log(f"cannot claim a generation: {error}; tries again")
            return None
        state.generation, self._hold_until = claim, 0.0
        self._forget_reports()
        self._reached = reached
        self._mesh.send(list(state.present), "generation", **asdict(claim))
        left = self._programs.end_before(claim.number)
        output = f"{options.folder}/output-{state.node}"
        state.log(
            f"starts generation {claim.number} on {', '.join(claim.nodes)} by "
            f"{self.launcher}; output in {output}"
        )
        if left:
            state.log("cannot end all processes of older generations on this node")
            state.reason = "failed"
            return None
        # Watchers of another job in this folder, if they live, see the claim meanwhile.
        is_new = older is not None and older.job != claim.job
        return time.monotonic() + 2 * options.silent_seconds * is_new

    def _reason_to_end(self, living: list[str]) -> str:
        state, options = self._state, self._state.options
        failures = state.generation.failures
        if options.marker.exists():
            return "complete"
        if failures >= options.most_failures:
            state.log(
                f"expected progress, found {failures} starts in a row without it; see "
                f"{options.folder}/output-*, correct the program, and submit it again"
            )
            return "no_progress"
        if len(living) < options.least:
            found = ", ".join(living)
            state.log(f"expected at least {options.least} nodes, found {found}")
            return "too_few"
        return ""

    def _next_generation(self, number: int, living: list[str]) -> Generation:
        last, options = self._state.generation, self._state.options

        def has_failed_often(name: str) -> bool:
            return last.blamed.get(name, 0) >= options.most_failures

        usable = sorted(living, key=has_failed_often)[: self._launch.use]
        return replace(
            last,
            number=number,
            leader=self._state.node,
            members=tuple(living),
            nodes=tuple(name for name in living if name in usable),
        )

    def _must_hold(self, living: list[str]) -> bool:
        state, now = self._state, time.monotonic()
        # The nodes of another part of the network become silent one after the other.
        if "silent" in state.lost.values() and self._mesh.doubtful(state.present):
            return True
        if not claims.is_minority(living, state.generation.members, state.lost):
            self._hold_until = 0.0
            return False
        if not self._hold_until:
            self._hold_until = now + 2 * state.options.silent_seconds
            state.log("this may be the smaller part of the nodes; waits for the others")
        return now < self._hold_until
