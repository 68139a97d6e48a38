"""A rank's page in shared memory, which shows its state to the ranks of its worker.

Only the rank itself writes its page. By checksums, a reader detects a page that is not
complete, because its rank is writing it, or was killed during a write.
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
"""States of a rank: outside of all calls; waiting in a call; moving data in a call, in
which MPI may block; at the end of the program."""

STATUS_START = 512
"""Offset of the page in a rank's status, after the statistics of arrivals."""

STALE_SECONDS = 2.5
"""If a rank has not written its page for this time, its watchdog is blocked."""

LONG_AGO = -1e9
"""Time that means "never"; minus infinity is not possible in JSON."""

_HEADER = struct.Struct("=dqqdddddddII")
_CHECK = struct.Struct("=I")
_TEXT_START = 128
# Attempts to read a page, which is incomplete during a write of some microseconds.
_ATTEMPTS = 3


@dataclass(slots=True)
class Status:
    """The content of a rank's page; times are seconds of the monotonic clock."""

    beat: float = 0.0
    sequence: int = 0
    # ``BUSY``, ``WAITS``, ``EXCHANGES`` or ``LEAVES``.
    state: int = BUSY
    since: float = 0.0
    # Time until which the rank expects to be slow; minus infinity if it never did.
    slow_until: float = -math.inf
    # Time at which this rank last asked late ranks for their stacks.
    asks_at: float = -math.inf
    # Time at which this rank last began an inquiry.
    inquires_at: float = -math.inf
    # Time of the last report of late ranks, by any rank, that this rank has noticed.
    reported_at: float = -math.inf
    # Time at which this rank last learned which ranks are late.
    verdict_at: float = -math.inf
    # Time until which the late ranks have announced to be slow: see `Watch.decide`.
    patient_until: float = -math.inf
    text: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RankState:
    """A rank's state, as far as it is known; times are relative to now."""

    rank: int
    sequence: int = -1
    state: int = BUSY
    # Seconds for which the rank has been in that state.
    waited: float = 0.0
    # Seconds for which the rank still expects to be slow; negative if that is over.
    slow_left: float = LONG_AGO
    # Age of this information; infinity if the rank has not published any.
    age: float = math.inf

    @property
    def fresh(self) -> bool:
        """True if the page is recent, which shows that the rank's watchdog runs."""
        return self.age < STALE_SECONDS

    @property
    def in_call(self) -> bool:
        """True if the rank is in a call, or at its end, according to a recent page."""
        return self.fresh and self.state != BUSY


_WORDS = ("in the program", "waits in a call", "exchanges data", "has ended")


def grouped(states: Iterable[RankState]) -> list[dict[str, Any]]:
    """Return ranks grouped by number of calls and by state, for people to read."""
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
    """The page of a rank in shared memory, ``memory``."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._text = b""

    def write(self, status: Status) -> None:
        """Write a status to the page; leave out its text if the text is too long."""
        text = b""
        if status.text:
            # File names may contain bytes that are not valid UTF-8.
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
        """Return the status on the page, or None if the page is incomplete."""
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
        """Release the memory view."""
        self._memory.release()
