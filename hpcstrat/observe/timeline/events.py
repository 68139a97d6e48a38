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

CLOCK_EVENT = "hpcstrat_clock"
"""Name of the metadata that carry measurements of a clock."""


@dataclass(frozen=True, slots=True)
class Track:
    """Where a rank's events stand in a trace.

    Parameters
    ----------
    worker : int
        Number of its worker, the trace's process.
    replica : int
        Number of the replica, the trace's thread.
    num_replicas : int
        How many there are.
    host : str
        Name of the host.
    """

    worker: int = 0
    replica: int = 0
    num_replicas: int = 1
    host: str = ""

    def header(self) -> list[str]:
        """Return the events that name the track.

        Not collective.

        Returns
        -------
        list of str
            Metadata.
        """
        name = f"worker {self.worker} ({self.host})"
        return [
            metadata(self, "process_name", {"name": name}),
            metadata(self, "process_sort_index", {"sort_index": self.worker}),
            *self.thread(0, f"replica {self.replica}"),
        ]

    def thread(self, number: int, name: str) -> list[str]:
        """Return the events that name a thread of this rank.

        Not collective.

        Parameters
        ----------
        number : int
            0 for the main thread.
        name : str
            Its name.

        Returns
        -------
        list of str
            Metadata.
        """
        index = {"sort_index": self.replica}
        return [
            metadata(self, "thread_name", {"name": name}, number),
            metadata(self, "thread_sort_index", index, number),
        ]

    def tid(self, number: int) -> int:
        """Return a number that no thread of another replica has.

        Not collective.

        Parameters
        ----------
        number : int
            Of a thread of this rank; 0 for the main thread.

        Returns
        -------
        int
            The replica's own for the main thread.
        """
        return self.replica + number * self.num_replicas


def metadata(track: Track, name: str, args: dict[str, Any], thread: int = 0) -> str:
    """Return a metadata event.

    Not collective.

    Parameters
    ----------
    track : Track
        Whose.
    name : str
        Which kind.
    args : dict
        What it says.
    thread : int
        Of which thread.

    Returns
    -------
    str
        JSON in one line.
    """
    event = {"name": name, "ph": "M", "ts": 0, "pid": track.worker}
    return json.dumps({**event, "tid": track.tid(thread), "args": args})


@functools.lru_cache(maxsize=4096)
def _quoted(text: str) -> str:
    return json.dumps(text)


def complete(
    track: Track, base: int, event: tuple[str, str, int, int, Any, int]
) -> str:
    """Return an event that has begun and ended.

    Not collective.

    Parameters
    ----------
    track : Track
        Whose.
    base : int
        Nanoseconds of this clock at which the trace begins.
    event : tuple
        Name, category, nanoseconds of its beginning and end, arguments as a dict or
        None, number of the thread.

    Returns
    -------
    str
        JSON in one line.
    """
    name, category, start, end, args, thread = event
    return (
        f'{{"name": {_quoted(name)}, "cat": "{category}", "ph": "X", '
        f'"ts": {_microseconds(start - base)}, "dur": {_microseconds(end - start)}, '
        f'"pid": {track.worker}, "tid": {track.tid(thread)}{_args(args)}}}'
    )


def asynchronous(track: Track, base: int, event: tuple[str, str, int, str, Any]) -> str:
    """Return an end of an event that may overlap with others.

    Not collective.

    Parameters
    ----------
    track : Track
        Whose.
    base : int
        Nanoseconds of this clock at which the trace begins.
    event : tuple
        Name, ``"b"`` or ``"e"``, nanoseconds, what tells it from others, arguments.

    Returns
    -------
    str
        JSON in one line.
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
    """Return arguments as a part of an event; what JSON has no form for as text."""
    if args is None:
        return ""
    parts = []
    for key, value in args.items():
        # The library's own, five times as fast as by the general way.
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
        # Not a number, keys of other types, or an object that cannot be shown.
        text = json.dumps({str(key): shown_text(value) for key, value in args.items()})
    return f', "args": {text}'


def shown_text(value: Any) -> str:
    """Return what to show of an object.

    Not collective.

    Parameters
    ----------
    value : object
        Whose ``__str__`` may fail.

    Returns
    -------
    str
        Its text.
    """
    try:
        return str(value)
    except Exception as error:
        return f"cannot be shown: {type(error).__name__}"
