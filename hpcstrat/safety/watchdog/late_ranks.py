"""The report about late ranks, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcstrat.safety.watchdog.stacks import Stacks

__all__ = ["SHOWN_RANKS", "LateRank", "LateReport", "some_ranks"]

SHOWN_RANKS = 8
"""Number of late ranks that a report describes one by one."""


@dataclass(frozen=True, slots=True)
class LateRank:
    """The description of a late rank in a report."""

    rank: int
    host: str
    stacks: Stacks
    # Number and text of the rank's last call; empty if unknown.
    last_call: str = ""
    # Seconds since the last call; None if unknown.
    seconds_ago: float | None = None
    # Seconds for which the rank still expects to be slow; negative after that time.
    slow_left: float = 0.0
    # True if the rank was in ``expect_slow`` at some time since the wait began.
    is_slow: bool = False

    def __str__(self) -> str:
        """Describe the rank as a part of a sentence."""
        words = [f"rank {self.rank} on {self.host}"]
        if self.stacks.where:
            words.append(f"in {self.stacks.where}")
        if self.stacks.words:
            words.append(self.stacks.words)
        if self.is_slow and self.slow_left > 0:
            words.append(f"which expects to be slow for {self.slow_left:.0f} s more")
        elif self.is_slow:
            words.append(f"which expected to be slow until {-self.slow_left:.0f} s ago")
        if self.last_call:
            ago = self.seconds_ago
            when = "" if ago is None else f", {ago:.0f} s ago"
            words.append(f"whose last call was {self.last_call}{when}")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class LateReport:
    """A report: the late ranks, and the ranks that wait for them."""

    waiting: Sequence[int]
    # Seconds that the reporting rank has waited.
    seconds: float
    # The call in which these ranks wait: ``in barrier (train.py:41, call 812)``.
    place: str
    # The first late ranks; there are ``num_late`` in total.
    late: Sequence[LateRank]
    num_late: int

    def __str__(self) -> str:
        """Return the text of the report, which may have several lines."""
        have = "has" if len(self.waiting) == 1 else "have"
        lines = [
            f"{some_ranks(self.waiting)} {have} waited {self.seconds:.0f} s "
            f"{self.place} for {'; '.join(map(str, self.late)) or 'other ranks'}"
        ]
        left = self.num_late - len(self.late)
        if left > 0:
            lines[0] += f"; and {left} more ranks"
        groups: dict[str, list[int]] = {}
        for one in self.late:
            if one.stacks.text:
                groups.setdefault(one.stacks.text, []).append(one.rank)
        for text, ranks in groups.items():
            lines += [f"stack of {some_ranks(ranks)}:", text]
        return "\n".join(lines)


def some_ranks(ranks: Sequence[int]) -> str:
    """Return a text that names ranks, at most 16 of them."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    left = len(ranks) - 2 * SHOWN_RANKS
    if left > 0:
        first = ", ".join(map(str, ranks[: 2 * SHOWN_RANKS]))
        return f"ranks [{first}] and {left} more"
    return f"ranks {list(ranks)}"
