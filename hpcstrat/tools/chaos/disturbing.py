"""Draws a schedule of disturbances from a seed, and executes it."""

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

# Short, so that a delayed rank is slow rather than stopped now and then.
_CYCLE_SECONDS = 0.02
_GUARD_SECONDS = 10.0
_DEATH_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Act:
    """One planned disturbance.

    Parameters
    ----------
    wait_seconds : float
        Time to wait before it.
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
        How long a rank is stopped.
    delay_seconds : float
        How long a delayed rank is slow.
    factor : float
        Factor by which it is slowed down; above 1.

    Raises
    ------
    ValueError
        If a value is out of its range.
    """

    stop_seconds: float = 1.0
    delay_seconds: float = 10.0
    factor: float = 4.0

    def __post_init__(self) -> None:
        """Check the values."""
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
    """Return the ranks that a text names.

    Not collective.

    Parameters
    ----------
    text : str
        Such as ``0-3,7``.

    Returns
    -------
    list of int
        In ascending order, each once.

    Raises
    ------
    ValueError
        If it is something else.
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
    """Draw what is done, from a seed.

    Not collective.

    Parameters
    ----------
    ranks : sequence of int
        Among which to choose.
    kinds : sequence of str
        Among which of `KINDS` to choose.
    every : float
        Mean of the exponentially distributed waits, in seconds.
    count : int
        How many acts; fewer where all ranks have been killed before.
    seed : int
        The same gives the same acts.

    Returns
    -------
    list of Act
        In order. Nothing is done to a rank after it has been killed.

    Raises
    ------
    ValueError
        If there is nothing to choose from, or a value is out of its range.
    """
    if not ranks or not kinds or not set(kinds) <= set(KINDS):
        raise ValueError(
            f"expected ranks, and kinds out of {', '.join(KINDS)}, found {list(ranks)} "
            f"and {list(kinds)}; name at least one of each"
        )
    _require_positive("every", every)
    if count < 1:
        raise ValueError(f"expected a count >= 1, found {count}; change it")
    # Sorted, so that the order in which ranks are named does not change the draw.
    generator, left = random.Random(seed), sorted(ranks)
    acts: list[Act] = []
    while left and len(acts) < count:
        wait = generator.expovariate(1 / every)
        act = Act(wait, generator.choice(kinds), generator.choice(left))
        acts.append(act)
        # Nothing can be done to it any more.
        if act.kind == "kill":
            left.remove(act.rank)
    return acts


class _Guard:
    """Pidfds of ranks, and a guard that continues the ranks if this process dies."""

    def __init__(self, held: Mapping[int, ProcessHandle]) -> None:
        self._held = held
        self._process = subprocess.Popen(
            # Isolated: it needs nothing of the program's paths.
            [sys.executable, "-I", str(Path(__file__).with_name("guard.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[one.fd for one in held.values()],
            # Ctrl-C in the terminal, and signals to the process group, do not reach it.
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Closes its input, at which it ends, and waits for it.
        self._process.communicate(timeout=_GUARD_SECONDS)

    def _tell(self, sign: str, rank: int) -> None:
        stream = self._process.stdin
        assert stream is not None
        stream.write(f"{sign}{self._held[rank].fd}\n".encode())
        # Flushed at once: data in a buffer would be lost if this process is killed.
        stream.flush()

    @contextlib.contextmanager
    def watching(self, rank: int) -> Iterator[ProcessHandle]:
        """Let a rank continue at the end of the block, whatever happens in it."""
        # Registered before it is stopped: this process may be killed in between.
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
    """Let a process run for a part of each of many short cycles."""
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
    """Execute the schedule; blocks until it is done.

    Not collective.

    Parameters
    ----------
    job : JobRanks
        The job of the ranks; pidfds of all that run are opened before the first act.
    acts : sequence of Act
        From `draw`.
    strength : Strength, optional
        Strength of the acts.
    report : callable, optional
        Called for each act, with the rank's process and its new state: ``killed``,
        ``stopped``, ``slowed down``, ``goes on``, or ``has ended``.

    Returns
    -------
    int
        How many acts were done to a rank that was running.

    Raises
    ------
    NoSuchRankError
        If an act is about a rank that is not of the job.
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
        # Opened before the first act: the number of a process that ends may be reused.
        for rank in sorted({act.rank for act in acts}):
            # A rank may have ended before the first act; each act says so.
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
    """Do one act, and report the new state of the rank."""
    went = held is not None and not held.ended()
    if held is not None and went:
        if act.kind == "kill":
            went = held.send(signal.SIGKILL)
            # A process in a system call takes a while to end.
            held.ended(_DEATH_SECONDS)
        else:
            with guard.watching(act.rank):
                yield "stopped" if act.kind == "stop" else "slowed down"
                if act.kind == "stop":
                    went = _stop(held, strength.stop_seconds)
                else:
                    went = _delay(held, strength.delay_seconds, strength.factor)
    yield ("killed" if act.kind == "kill" else "goes on") if went else "has ended"
