"""Reads the results of a trial's processes, including processes that crashed.

Each rank writes a line of JSON to ``rank-N.jsonl`` before and after each operation;
faulthandler writes a rank's fatal signal or timeout to ``rank-N.fault``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["OPERATIONS", "Answer", "LauncherEnd", "TrialOutcome", "read_outcome"]

# The operations, in the order of the trial.
OPERATIONS = ("send", "receive", "sendrecv", "exchange", "broadcast", "allreduce")

_CALLS = {
    "send": "Send",
    "receive": "Recv",
    "sendrecv": "Sendrecv",
    "exchange": "Isend and Irecv",
    "broadcast": "Bcast",
    "allreduce": "Allreduce",
}
_FAULTS = {
    "Segmentation fault": "the process ended by SIGSEGV",
    "Bus error": "the process ended by SIGBUS",
    "Aborted": "the process ended by SIGABRT",
    "Timeout": "the process hung",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether an operation works; ``reason`` is the error, or describes the trial."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LauncherEnd:
    """Exit status and output of a launcher."""

    # Exit status, negative after a signal; None if the launcher had to be killed.
    status: int | None
    output: str
    num_ranks: int = 1

    def __str__(self) -> str:
        """Return how the launcher ended, as text for messages."""
        if self.status is None:
            return "it had to be killed, because it did not end in time"
        word = "signal" if self.status < 0 else "exit status"
        return f"{word} {abs(self.status)}"


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The result of one run of the trial program."""

    # Answers by operation, without operations that the run did not reach.
    answers: dict[str, Answer] = field(default_factory=dict)
    complete: bool = False
    # The processes and GPUs of the run, or the reason why there is no answer.
    how: str = ""
    library: str = ""
    output: str = ""


def read_outcome(folder: Path, ended: LauncherEnd) -> TrialOutcome:
    """Return the outcome of a trial from the files that its processes wrote.

    The operation in which a process crashed has an answer, too.
    """
    ranks = {
        int(path.stem.partition("-")[2]): _lines(path)
        for path in sorted(folder.glob("rank-*.jsonl"))
    }
    greetings = [line for lines in ranks.values() for line in lines if "hello" in line]
    problems = [str(line["problem"]) for line in greetings if line.get("problem")]
    if problems:
        return TrialOutcome(how=problems[0], output=ended.output)
    # The launcher of another MPI library starts separate programs, all with rank 0.
    if not greetings or len(ranks) < ended.num_ranks:
        return TrialOutcome(how=_not_started(ranks, ended), output=ended.output)
    faults = {
        rank: _fault(folder / f"rank-{rank}.fault", ended, len(ranks) == 1)
        for rank in ranks
    }
    answers = {name: _answer(name, ranks, faults) for name in OPERATIONS}
    return TrialOutcome(
        {name: answer for name, answer in answers.items() if answer is not None},
        complete=all(any("done" in line for line in lines) for lines in ranks.values()),
        how=_how(greetings),
        library=str(greetings[0]["hello"]),
        output=ended.output,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete JSON lines of a file."""
    found = []
    for text in path.read_text(errors="replace").splitlines():
        # The last line is truncated if the process was killed while it wrote.
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict):
                found.append(line)
    return found


def _not_started(ranks: Mapping[int, Any], ended: LauncherEnd) -> str:
    """Return the reason why there are no results."""
    last = [line.strip() for line in ended.output.splitlines() if line.strip()]
    said = f": {last[-1][:200]}" if last else ""
    if ranks:
        return (
            f"the launcher started {len(ranks)} connected processes, not "
            f"{ended.num_ranks}; it is another MPI library's ({ended}){said}"
        )
    return f"the processes did not come to the first operation ({ended}){said}"


def _how(greetings: list[dict[str, Any]]) -> str:
    gpus = {str(line.get("gpu")) for line in greetings}
    ranks = f"{len(greetings)} rank{'s' * (len(greetings) > 1)}"
    return f"{ranks} on {len(gpus)} GPU{'s' * (len(gpus) > 1)} of one host"


def _fault(path: Path, ended: LauncherEnd, alone: bool) -> str:
    """Return the signal or timeout that ended a rank; empty if unknown."""
    text = path.read_text(errors="replace") if path.exists() else ""
    for sign, words in _FAULTS.items():
        if sign in text:
            return words
    if alone and ended.status is not None and ended.status < 0:
        return f"the process ended by signal {-ended.status}"
    return ""


def _answer(
    name: str, ranks: Mapping[int, list[dict[str, Any]]], faults: Mapping[int, str]
) -> Answer | None:
    """Return the answer for an operation; None if the ranks did not finish it."""
    begun: list[tuple[int, int]] = []
    for rank, lines in ranks.items():
        own = [line for line in lines if line.get("operation") == name]
        for line in own:
            if line.get("ok") is False:
                size = _size(int(line["bytes"]))
                reason = f"{line['reason']} on rank {rank} ({_CALLS[name]} of {size})"
                return Answer(False, reason)
        if own and "ok" not in own[-1]:
            begun.append((rank, int(own[-1]["bytes"])))
    if begun:
        # Prefer the rank whose fault is known: the launcher then ended the other ranks.
        rank, size_bytes = max(begun, key=lambda pair: bool(faults[pair[0]]))
        words = faults[rank] or "the process ended without a word"
        return Answer(False, f"{words} in {_CALLS[name]} of {_size(size_bytes)}")
    tried = [line for lines in ranks.values() for line in lines]
    sizes = sorted({int(x["bytes"]) for x in tried if x.get("operation") == name})
    if not sizes or not all(
        any(line.get("finished") == name for line in lines) for lines in ranks.values()
    ):
        return None
    return Answer(True, "contents compared, " + ", ".join(map(_size, sizes)))


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"
