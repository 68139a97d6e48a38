"""Events in Chrome's trace event format, for Perfetto and chrome://tracing.

"Trace Event Format", Google, 2016: times and durations are in microseconds. ``X`` is a
complete event, ``b`` and ``e`` are the begin and the end of an asynchronous event, and
``M`` is metadata. The closing bracket of the JSON array may be missing.

A file has one event per line.
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

# Name of the metadata events that contain clock measurements.
CLOCK_EVENT = "hpcstrat_clock"


@dataclass(frozen=True, slots=True)
class Track:
    """The identity of a rank in a trace."""

    # ``worker`` is the process number in the trace, and ``replica`` the thread number.
    worker: int = 0
    replica: int = 0
    num_replicas: int = 1
    host: str = ""

    def header(self) -> list[str]:
        """Return the metadata events with the names of the worker and the replica."""
        name = f"worker {self.worker} ({self.host})"
        return [
            metadata(self, "process_name", {"name": name}),
            metadata(self, "process_sort_index", {"sort_index": self.worker}),
            *self.thread(0, f"replica {self.replica}"),
        ]

    def thread(self, number: int, name: str) -> list[str]:
        """Return the metadata events that name a thread; 0 is the main thread."""
        index = {"sort_index": self.replica}
        return [
            metadata(self, "thread_name", {"name": name}, number),
            metadata(self, "thread_sort_index", index, number),
        ]

    def tid(self, number: int) -> int:
        """Return the number of a thread in the trace, unique over all replicas."""
        return self.replica + number * self.num_replicas


def metadata(track: Track, name: str, args: dict[str, Any], thread: int = 0) -> str:
    """Return a metadata event as one line of JSON."""
    event = {"name": name, "ph": "M", "ts": 0, "pid": track.worker}
    return json.dumps({**event, "tid": track.tid(thread), "args": args})


@functools.lru_cache(maxsize=4096)
def _quoted(text: str) -> str:
    return json.dumps(text)


def complete(
    track: Track, base: int, event: tuple[str, str, int, int, Any, int]
) -> str:
    """Return a complete event (``X``) as one line of JSON.

    ``base`` is the time of this clock, in nanoseconds, at which the trace begins. The
    event has name, category, start and end in nanoseconds, arguments or None, and the
    number of the thread.
    """
    name, category, start, end, args, thread = event
    return (
        f'{{"name": {_quoted(name)}, "cat": "{category}", "ph": "X", '
        f'"ts": {_microseconds(start - base)}, "dur": {_microseconds(end - start)}, '
        f'"pid": {track.worker}, "tid": {track.tid(thread)}{_args(args)}}}'
    )


def asynchronous(track: Track, base: int, event: tuple[str, str, int, str, Any]) -> str:
    """Return the begin or end of an asynchronous event as one line of JSON.

    The event has name, ``"b"`` or ``"e"``, nanoseconds, a mark that pairs begin and
    end, and arguments. Asynchronous events may overlap.
    """
    name, phase, at, mark, args = event
    return (
        f'{{"name": {_quoted(name)}, "cat": "started", "ph": "{phase}", '
        f'"id": "{track.replica}.{mark}", "ts": {_microseconds(at - base)}, '
        f'"pid": {track.worker}, "tid": {track.tid(0)}{_args(args)}}}'
    )


def _microseconds(nanoseconds: int) -> str:
    # Exact integer arithmetic: a float would be rounded after some months of uptime.
    sign = "-" if nanoseconds < 0 else ""
    whole, rest = divmod(abs(nanoseconds), 1000)
    return f"{sign}{whole}.{rest:03d}"


def _args(args: dict[str, Any] | None) -> str:
    """Return the ``args`` part of an event; values unknown to JSON become text."""
    if args is None:
        return ""
    parts = []
    for key, value in args.items():
        # Fast path for the library's own arguments, five times as fast as json.dumps.
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
        # json.dumps fails for NaN, for keys of other types, and if ``__str__`` raises.
        text = json.dumps({str(key): shown_text(value) for key, value in args.items()})
    return f', "args": {text}'


def shown_text(value: Any) -> str:
    """Return the text of an object, or a substitute if its ``__str__`` raises."""
    try:
        return str(value)
    except Exception as error:
        return f"cannot be shown: {type(error).__name__}"
