"""A rank's page in the shared segment, on which it tells its worker about itself.

Each page has one writer, and checksums, so that a page that is read while it is
written, or that a killed process left half-written, is not taken for complete.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = [
    "BUSY",
    "EXCHANGES",
    "LEAVES",
    "LONG_AGO",
    "STALE_SECONDS",
    "STATUS_START",
    "WAITS",
    "Page",
    "RankState",
    "Status",
    "grouped",
]

BUSY, WAITS, EXCHANGES, LEAVES = range(4)
"""States: outside of all calls; waits in a call; moves data in a call, where MPI may
block; at the end of the program."""

STATUS_START = 512
"""Where the page begins in a rank's status, behind the statistics of arrivals."""

STALE_SECONDS = 2.5
"""A rank that has not written for this time cannot run its watchdog."""

LONG_AGO = -1e9
"""Stands for times that never were; JSON has no infinity."""

_HEADER = struct.Struct("=dqqdddddddII")
_CHECK = struct.Struct("=I")
_TEXT_START = 128
# A writer takes some microseconds.
_ATTEMPTS = 3


@dataclass(slots=True)
class Status:
    """A rank's status; times are of the machine's monotonic clock."""

    beat: float = 0.0
    sequence: int = 0
    # ``BUSY``, ``WAITS``, ``EXCHANGES`` or ``LEAVES``.
    state: int = BUSY
    since: float = 0.0
    # Until when the rank expected to be slow; minus infinity if it never did.
    slow_until: float = -math.inf
    # When it last asked late ranks for their stacks.
    asks_at: float = -math.inf
    # When it last began to find out who is late.
    inquires_at: float = -math.inf
    # When a rank last reported, as far as it knows.
    reported_at: float = -math.inf
    # When it last learned who is late.
    verdict_at: float = -math.inf
    # Until when the late ranks are excused, see `Watch.decide`.
    patient_until: float = -math.inf
    text: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RankState:
    """The known state of a rank; all times are seconds before now."""

    rank: int
    sequence: int = -1
    state: int = BUSY
    # For how long it has been in that state.
    waited: float = 0.0
    # Seconds for which the rank still expects to be slow; negative if that is over.
    slow_left: float = LONG_AGO
    # Seconds since it said so; infinity if it never did.
    age: float = math.inf

    @property
    def fresh(self) -> bool:
        """Whether its watchdog runs."""
        return self.age < STALE_SECONDS

    @property
    def in_call(self) -> bool:
        """Whether it was seen to wait for others just now."""
        return self.fresh and self.state != BUSY


_WORDS = ("in the program", "waits in a call", "exchanges data", "has ended")


def grouped(states: Iterable[RankState]) -> list[dict[str, Any]]:
    """Return states for people: each number of calls and state, with its ranks."""
    groups: dict[tuple[int, str], list[RankState]] = {}
    for state in states:
        words = _WORDS[state.state] if state.fresh else "does not answer"
        groups.setdefault((state.sequence, words), []).append(state)
    return [
        {
            "calls": calls,
            "state": words,
            "seconds": round(max(member.waited for member in members), 1),
            "ranks": sorted(member.rank for member in members),
        }
        for (calls, words), members in sorted(groups.items())
    ]


class Page:
    """The page of one rank."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._text = b""

    def write(self, status: Status) -> None:
        """Show a status, without its text where the page is too small."""
        text = b""
        if status.text:
            # Names of files may have bytes that are no characters.
            text = json.dumps(status.text, ensure_ascii=False).encode(errors="replace")
        if len(text) > len(self._memory) - _TEXT_START:
            text = b""
        if text != self._text:
            self._memory[_TEXT_START : _TEXT_START + len(text)] = text
            self._text = text
        *values, _ = (getattr(status, field.name) for field in fields(status))
        header = _HEADER.pack(*values, len(text), zlib.crc32(text))
        block = header + _CHECK.pack(zlib.crc32(header))
        self._memory[: len(block)] = block

    def read(self, with_text: bool = False) -> Status | None:
        """Return the status that the page shows; None where it shows no whole one."""
        status = None
        for _ in range(_ATTEMPTS):
            block = self._memory[: _HEADER.size + _CHECK.size].tobytes()
            header, check = block[: _HEADER.size], block[_HEADER.size :]
            if zlib.crc32(header) != _CHECK.unpack(check)[0]:
                continue
            *values, length, text_check = _HEADER.unpack(header)
            status = Status(*values)
            if not with_text or not length:
                return status
            text = self._memory[_TEXT_START : _TEXT_START + length].tobytes()
            if zlib.crc32(text) == text_check:
                status.text = json.loads(text)
                break
        return status

    def release(self) -> None:
        """Let go of the memory."""
        self._memory.release()
