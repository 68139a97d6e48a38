"""Events in Chrome's trace event format, as Perfetto and chrome://tracing read them.

"Trace Event Format", Google, 2016: times and durations in microseconds; ``X`` is a
complete event, ``b`` and ``e`` are the ends of an asynchronous one, ``M`` is metadata.
The array's closing bracket may be missing.

One line of a file is one event.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CLOCK_EVENT",
    "Track",
    "asynchronous",
    "complete",
    "metadata",
    "shown_text",
]

# Name of the metadata that carry measurements of a clock.
CLOCK_EVENT = "hpcstrat_clock"


@dataclass(frozen=True, slots=True)
class Track:
    """The place of a rank's events in a trace."""

    # The trace's process, and its thread.
    worker: int = 0
    replica: int = 0
    num_replicas: int = 1
    host: str = ""

    def header(self) -> list[str]:
        """Return the metadata that name the track."""
        name = f"worker {self.worker} ({self.host})"
        return [
            metadata(self, "process_name", {"name": name}),
            metadata(self, "process_sort_index", {"sort_index": self.worker}),
            *self.thread(0, f"replica {self.replica}"),
        ]

    def thread(self, number: int, name: str) -> list[str]:
        """Return the metadata that name a thread of this rank; 0 is the main one."""
        index = {"sort_index": self.replica}
        return [
            metadata(self, "thread_name", {"name": name}, number),
            metadata(self, "thread_sort_index", index, number),
        ]

    def tid(self, number: int) -> int:
        """Return a number that no thread of another replica has."""
        return self.replica + number * self.num_replicas


def metadata(track: Track, name: str, args: dict[str, Any], thread: int = 0) -> str:
    """Return a metadata event: JSON in one line."""
    event = {"name": name, "ph": "M", "ts": 0, "pid": track.worker}
    return json.dumps({**event, "tid": track.tid(thread), "args": args})


@functools.lru_cache(maxsize=4096)
def _quoted(text: str) -> str:
    return json.dumps(text)


def complete(
    track: Track, base: int, event: tuple[str, str, int, int, Any, int]
) -> str:
    """Return an event that has begun and ended: JSON in one line.

    ``base`` is the nanosecond of this clock at which the trace begins. The event has
    name, category, nanoseconds of its beginning and end, arguments or None, number of
    the thread.
    """
    name, category, start, end, args, thread = event
    return (
        f'{{"name": {_quoted(name)}, "cat": "{category}", "ph": "X", '
        f'"ts": {_microseconds(start - base)}, "dur": {_microseconds(end - start)}, '
        f'"pid": {track.worker}, "tid": {track.tid(thread)}{_args(args)}}}'
    )


def asynchronous(track: Track, base: int, event: tuple[str, str, int, str, Any]) -> str:
    """Return an end of an event that may overlap with others: JSON in one line.

    The event has name, ``"b"`` or ``"e"``, nanoseconds, a mark that tells it from
    others, arguments.
    """
    name, phase, at, mark, args = event
    return (
        f'{{"name": {_quoted(name)}, "cat": "started", "ph": "{phase}", '
        f'"id": "{track.replica}.{mark}", "ts": {_microseconds(at - base)}, '
        f'"pid": {track.worker}, "tid": {track.tid(0)}{_args(args)}}}'
    )


def _microseconds(nanoseconds: int) -> str:
    # Exact, where a float would be rounded after some months of a host's life.
    sign = "-" if nanoseconds < 0 else ""
    whole, rest = divmod(abs(nanoseconds), 1000)
    return f"{sign}{whole}.{rest:03d}"


def _args(args: dict[str, Any] | None) -> str:
    """Return arguments as a part of an event; values that JSON lacks become text."""
    if args is None:
        return ""
    parts = []
    for key, value in args.items():
        # The library's own arguments, five times as fast as in the general way.
        if type(value) is int:
            parts.append(f"{_quoted(key)}: {value}")
        elif type(value) is str:
            parts.append(f"{_quoted(key)}: {_quoted(value)}")
        else:
            break
    else:
        return f', "args": {{{", ".join(parts)}}}'
    try:
        text = json.dumps(args, default=str, allow_nan=False)
    except Exception:
        # NaN, keys of other types, and objects whose text cannot be made.
        text = json.dumps({str(key): shown_text(value) for key, value in args.items()})
    return f', "args": {text}'


def shown_text(value: Any) -> str:
    """Return the text of an object, whose ``__str__`` may fail."""
    try:
        return str(value)
    except Exception as error:
        return f"cannot be shown: {type(error).__name__}"
