"""The problems and remarks that ``hpcstrat doctor`` reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Finding", "Findings", "names", "rank_words"]

_MOST_NAMES = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem or remark; its text has the expectation, the finding, and advice.

    ``name`` is the kind of the problem, such as ``slow-link``; scripts rely on it.
    ``hosts`` and ``ranks`` are the affected ones; both are empty if all are affected.
    For a measurement, ``expected`` and ``found`` are numbers in the unit ``unit``.
    """

    name: str
    text: str
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    expected: float | None = None
    found: float | None = None
    unit: str = ""

    def to_json(self, severity: str) -> dict[str, Any]:
        """Return the finding as a dict for the module json."""
        return {"severity": severity, **asdict(self)}


@dataclass(slots=True)
class Findings:
    """The problems and remarks found so far, and the versions of the software.

    A problem would stop a job, or shows a serious fault. A remark is about something
    that would slow a job down, or that may be intended. ``library_version`` is the
    version text of the MPI library; it is empty if the library cannot be loaded.
    """

    software: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    remarks: list[Finding] = field(default_factory=list)
    library_version: str = ""

    def problem(self, name: str, text: str, **about: Any) -> None:
        """Add a problem; ``about`` has other fields of a `Finding`."""
        self.problems.append(Finding(name, text, **about))

    def remark(self, name: str, text: str, **about: Any) -> None:
        """Add a remark; ``about`` has other fields of a `Finding`."""
        self.remarks.append(Finding(name, text, **about))

    def add(self, others: Findings) -> None:
        """Add the problems and remarks of other findings."""
        self.problems += others.problems
        self.remarks += others.remarks

    def to_json(self) -> list[dict[str, Any]]:
        """Return a list of dicts for the module json, problems first."""
        both: Iterable[tuple[str, list[Finding]]] = (
            ("problem", self.problems),
            ("remark", self.remarks),
        )
        return [one.to_json(severity) for severity, some in both for one in some]


def names(words: Sequence[str], what: str = "hosts") -> str:
    """Return names as text, such as ``a, b and c``, shortened if there are many."""
    if len(words) > _MOST_NAMES:
        shown = words[: _MOST_NAMES - 1]
        return f"{', '.join(shown)} and {len(words) - len(shown)} more {what}"
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def rank_words(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as ``ranks 0 and 3``."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {names([str(rank) for rank in ranks], noun)}"
