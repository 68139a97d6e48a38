"""The part of a watcher that leads: it claims generations, and starts and judges them.

Every watcher has this part; only that of the lowest living node is at work.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
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


@dataclass
class _LedStart:
    """A start of the program, from its claim to the judgement of its end.

    ``until`` is the limit of what it waits for; ``reached`` is the progress before it.
    ``ends`` has the node and the status of each rank that has ended.
    """

    until: float
    not_before: float
    reached: tuple[int, float]
    cleaned: set[str] = field(default_factory=set)
    is_started: bool = False
    is_ended: bool = False
    num_ranks: int = 0
    ends: list[tuple[str, int]] = field(default_factory=list)


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
        self._start: _LedStart | None = None
        self._hold_until = 0.0

    def __repr__(self) -> str:
        return f"Leader({self._start})"

    @property
    def launcher(self) -> str:
        """The name of the launcher."""
        return self._launch.launcher

    def give_way(self) -> None:
        """Forget the start that another leader has replaced."""
        self._start = None

    def take(self, name: str, kind: str, message: Mapping[str, Any]) -> None:
        """Take a report of a node, perhaps of this one."""
        start = self._start
        if start is None or message["number"] != self._state.generation.number:
            return
        if kind == "cleaned":
            start.cleaned.add(name)
        elif kind == "rank":
            start.num_ranks += 1
        else:
            start.ends.append((name, message["status"]))
            if len(start.ends) == self._launch.ranks:
                start.until = time.monotonic() + self._state.options.start_seconds

    def finish(self, now: float) -> None:
        """Judge a start whose launcher has ended, and start nothing."""
        if not self._programs.has_launcher:
            if self._start is not None and self._start.is_started:
                self._judge(self._start, now)
            elif not self._programs.ranks:
                self._state.reason = "stopped"

    def lead(self, now: float) -> None:
        """Do what is to be done now."""
        state, start, is_over = self._state, self._start, self._state.has_lost_node()
        if self._programs.has_launcher:
            if is_over or (start and self._is_late(start, now)):
                self._programs.end_before(state.generation.number + 1)
            return
        if start and start.is_started:
            self._judge(start, now)
        elif is_over:
            self._start = None
        if self._start is None and not state.reason:
            self._claim(now)
        if self._start and not self._start.is_started and not state.reason:
            self._start_when_clean(self._start, now)

    def _is_late(self, start: _LedStart, now: float) -> bool:
        """Return whether the launcher has not started, or outlives, its ranks."""
        wanted, is_late = self._launch.ranks, now > start.until
        if is_late and start.num_ranks < wanted:
            found = f"the launcher has started {start.num_ranks}"
            self._state.log(f"expected {wanted} ranks in time, found that {found}")
            return True
        if is_late and len(start.ends) >= wanted:
            self._state.log("expected the launcher to end after its ranks; ends it")
            return True
        return False

    def _judge(self, start: _LedStart, now: float) -> None:
        """Decide whether a start whose launcher has ended has completed the program.

        mpirun has status 0 even after the loss of a node: the ranks' statuses decide.
        """
        state, marker = self._state, self._state.options.marker
        if not start.is_ended:
            self._programs.end_before(state.generation.number + 1)
            # The reports of the ranks, or of a lost node, may come some time later.
            start.is_ended, start.until = True, now + state.options.silent_seconds + 1
        status = self._programs.launcher_status
        statuses = [one for _, one in start.ends]
        failed_on = [name for name, one in start.ends if one not in (0, _SAVED_STATUS)]
        is_right = statuses.count(0) == self._launch.ranks
        is_over = state.has_lost_node() or marker.exists()
        is_clear = is_right or is_over or failed_on or status
        if not is_clear and now < start.until:
            return
        if is_right and not marker.exists():
            write_marker(marker, {"generation": state.generation.number})
        self._start = None
        if marker.exists():
            state.reason = "complete"
        elif _SAVED_STATUS in (*statuses, status):
            state.reason = "saved"
        elif not is_over:
            self._count_failure(start, status, failed_on[0] if failed_on else "")

    def _count_failure(self, start: _LedStart, status: int, name: str) -> None:
        state = self._state
        pairs = zip(state.reached(), start.reached, strict=True)
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
        if not start.num_ranks and self.launcher == "srun":
            state.log("srun has started no rank; mpirun is tried next")
            self._launch = replace(self._launch, launcher="mpirun", options=())

    def _start_when_clean(self, start: _LedStart, now: float) -> None:
        state, current = self._state, self._state.generation
        dirty = {*current.members} - {state.node} - {*state.lost} - start.cleaned
        if dirty and now > start.until:
            for name in dirty:
                state.log(f"expected {name} to end its older processes in time")
                self._mesh.lose(name)
        if dirty or now < start.not_before:
            return
        start.is_started, start.until = True, now + state.options.start_seconds
        number = {"HPCSTRAT_WATCH_GENERATION": str(current.number)}
        variables = {**self._variables, **number}
        env = self._launch.environment(current.nodes, variables)
        words = self._launch.words(current.nodes, env)
        try:
            self._programs.start_launcher(words, env)
        except OSError as error:
            state.log(f"cannot start {self.launcher}: {error}")
            state.reason = "failed"

    def _claim(self, now: float) -> None:
        """Claim the next generation, unless the run is at its end, or must wait."""
        state, options, living = self._state, self._state.options, self._state.living()
        state.reason = self._reason_to_end(living)
        if state.reason or self._must_hold(living, now):
            return
        try:
            base = claims.newest(options.folder)
            if base > state.generation.number and not state.may_pass(base):
                return
            older = claims.read(options.folder, base) if base else None
            claim = self._next_generation(base + 1, living)
            if not claims.create(options.folder, claim):
                return
        except OSError as error:
            state.log(f"cannot claim a generation: {error}; tries again")
            return
        state.generation, self._hold_until = claim, 0.0
        # Watchers of another job in this folder, if they live, see the claim meanwhile.
        is_new = older is not None and older.job != claim.job
        not_before = now + 2 * options.silent_seconds * is_new
        until = not_before + _CLEAN_SECONDS
        self._start = _LedStart(until, not_before, state.reached())
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

    def _must_hold(self, living: list[str], now: float) -> bool:
        state = self._state
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
