"""Functions that draw a schedule of disturbances from a seed, and execute it."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hpcstrat.tools.chaos.processes import (
    JobRanks,
    NoSuchRankError,
    ProcessHandle,
    RankProcess,
    choose,
    find_jobs,
)

__all__ = [
    "KINDS",
    "Act",
    "JobRanks",
    "NoSuchRankError",
    "RankProcess",
    "Strength",
    "choose",
    "disturb",
    "draw",
    "find_jobs",
    "parse_ranks",
]

KINDS = ("kill", "stop", "delay")
"""The kinds of disturbances."""

# A short cycle, so that a delayed rank is evenly slow.
_CYCLE_SECONDS = 0.02
_GUARD_SECONDS = 10.0
_DEATH_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Act:
    """One planned disturbance.

    Parameters
    ----------
    wait_seconds : float
        Time to wait before the disturbance.
    kind : str
        One of `KINDS`.
    rank : int
        The rank that is disturbed.
    """

    wait_seconds: float
    kind: str
    rank: int


@dataclass(frozen=True, slots=True)
class Strength:
    """The strength of disturbances.

    Parameters
    ----------
    stop_seconds : float
        Time for which a rank is stopped.
    delay_seconds : float
        Time for which a delayed rank is slow.
    factor : float
        Factor by which a delayed rank is slowed down; above 1.

    Raises
    ------
    ValueError
        If a value is out of its range.
    """

    stop_seconds: float = 1.0
    delay_seconds: float = 10.0
    factor: float = 4.0

    def __post_init__(self) -> None:
        """Raise ValueError if a value is out of its range."""
        for name in ("stop_seconds", "delay_seconds"):
            _require_positive(name, getattr(self, name))
        if not 1 < self.factor <= 1000:
            raise ValueError(
                f"expected 1 < factor <= 1000, found {self.factor}; change it"
            )


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"expected a positive {name}, found {value}; change it")


def parse_ranks(text: str) -> list[int]:
    """Return the ranks that a text such as ``0-3,7`` names.

    Not collective.

    Parameters
    ----------
    text : str
        Ranks, and ranges of ranks, separated by commas.

    Returns
    -------
    list of int
        The ranks in ascending order, without duplicates.

    Raises
    ------
    ValueError
        If ``text`` has another form.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f"expected ranks such as 0-3,7, found {text!r}; change it")
        first, last = int(low), int(high or low)
        if last < first:
            raise ValueError(
                f"expected the first rank before the last, found {part.strip()!r}; "
                "change it"
            )
        ranks.update(range(first, last + 1))
    return sorted(ranks)


def draw(
    ranks: Sequence[int], kinds: Sequence[str], *, every: float, count: int, seed: int
) -> list[Act]:
    """Draw a schedule of disturbances from a seed.

    Not collective.

    Parameters
    ----------
    ranks : sequence of int
        The ranks from which to draw.
    kinds : sequence of str
        The kinds, out of `KINDS`, from which to draw.
    every : float
        Mean of the exponentially distributed waits, in seconds.
    count : int
        Number of acts. The schedule is shorter if it kills all ranks before.
    seed : int
        The same seed results in the same acts.

    Returns
    -------
    list of Act
        The acts in their order. After a rank is killed, it has no more acts.

    Raises
    ------
    ValueError
        If ``ranks`` or ``kinds`` is empty, or a value is out of its range.
    """
    if not ranks or not kinds or not set(kinds) <= set(KINDS):
        raise ValueError(
            f"expected ranks, and kinds out of {', '.join(KINDS)}, found {list(ranks)} "
            f"and {list(kinds)}; name at least one of each"
        )
    _require_positive("every", every)
    if count < 1:
        raise ValueError(f"expected a count >= 1, found {count}; change it")
    # Sort the ranks, so that their order in the arguments does not change the draw.
    generator, left = random.Random(seed), sorted(ranks)
    acts: list[Act] = []
    while left and len(acts) < count:
        wait = generator.expovariate(1 / every)
        act = Act(wait, generator.choice(kinds), generator.choice(left))
        acts.append(act)
        if act.kind == "kill":
            left.remove(act.rank)
    return acts


class _Guard:
    """A guard process, which continues stopped ranks if this process dies."""

    def __init__(self, held: Mapping[int, ProcessHandle]) -> None:
        self._held = held
        self._process = subprocess.Popen(
            # Run isolated (-I): the guard needs no packages and no user settings.
            [sys.executable, "-I", str(Path(__file__).with_name("guard.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[one.fd for one in held.values()],
            # In a new session, Ctrl-C does not reach the guard.
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Close the guard's input, so that the guard ends, and wait for its end.
        self._process.communicate(timeout=_GUARD_SECONDS)

    def _tell(self, sign: str, rank: int) -> None:
        stream = self._process.stdin
        assert stream is not None
        stream.write(f"{sign}{self._held[rank].fd}\n".encode())
        # Flush now: if this process is killed, data in its buffer are lost.
        stream.flush()

    @contextlib.contextmanager
    def watching(self, rank: int) -> Iterator[ProcessHandle]:
        """Let a rank continue at the end of the block, even if the block raises."""
        # Register the rank before it is stopped: if this process is killed right after
        # the stop, the guard still continues the rank.
        self._tell("+", rank)
        try:
            yield self._held[rank]
        finally:
            self._held[rank].send(signal.SIGCONT)
            self._tell("-", rank)


def _stop(held: ProcessHandle, seconds: float) -> bool:
    if not held.send(signal.SIGSTOP) or held.ended(seconds):
        return False
    return held.send(signal.SIGCONT)


def _delay(held: ProcessHandle, seconds: float, factor: float) -> bool:
    """Slow a process down: let it run for only a part of each of many short cycles."""
    runs = _CYCLE_SECONDS / factor
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not _stop(held, _CYCLE_SECONDS - runs) or held.ended(runs):
            return False
    return True


def disturb(
    job: JobRanks,
    acts: Sequence[Act],
    strength: Strength | None = None,
    report: Callable[[Act, RankProcess, str], None] | None = None,
) -> int:
    """Execute a schedule, and return when it is finished.

    Not collective.

    Parameters
    ----------
    job : JobRanks
        The job that has the ranks. Before the first act, a pidfd is opened for each
        rank.
    acts : sequence of Act
        The schedule from `draw`.
    strength : Strength, optional
        Strength of the acts.
    report : callable, optional
        Called when an act changes a rank's state, with the act, the rank's process, and
        the new state: ``killed``, ``stopped``, ``slowed down``, ``goes on``, or ``has
        ended``.

    Returns
    -------
    int
        Number of acts that disturbed a running rank.

    Raises
    ------
    NoSuchRankError
        If the rank of an act does not belong to the job.
    """
    strength = strength or Strength()
    processes = {process.rank: process for process in job.ranks}
    for act in acts:
        if act.rank not in processes:
            raise NoSuchRankError(
                f"expected a rank of job {job.name} on this machine, one of "
                f"{list(processes)}, found {act.rank}; see hpcstrat chaos list"
            )
    with contextlib.ExitStack() as stack:
        held: dict[int, ProcessHandle] = {}
        # Open all pidfds before the first act: later, another process may have the
        # number of a rank that has ended.
        for rank in sorted({act.rank for act in acts}):
            # Ignore a rank that has ended already: each of its acts reports this.
            with contextlib.suppress(NoSuchRankError):
                held[rank] = ProcessHandle(processes[rank])
                stack.callback(held[rank].close)
        guard = stack.enter_context(_Guard(held))
        done = 0
        for act in acts:
            time.sleep(act.wait_seconds)
            for text in _do(act, guard, held.get(act.rank), strength):
                done += text in ("killed", "goes on")
                if report is not None:
                    report(act, processes[act.rank], text)
        return done


def _do(
    act: Act, guard: _Guard, held: ProcessHandle | None, strength: Strength
) -> Iterator[str]:
    """Execute one act, and yield the new states of the rank."""
    went = held is not None and not held.ended()
    if held is not None and went:
        if act.kind == "kill":
            went = held.send(signal.SIGKILL)
            # Wait, because a process in a system call takes a while to end.
            held.ended(_DEATH_SECONDS)
        else:
            with guard.watching(act.rank):
                yield "stopped" if act.kind == "stop" else "slowed down"
                if act.kind == "stop":
                    went = _stop(held, strength.stop_seconds)
                else:
                    went = _delay(held, strength.delay_seconds, strength.factor)
    yield ("killed" if act.kind == "kill" else "goes on") if went else "has ended"
