"""The event files of a timeline, including incomplete files of a killed job."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcstrat.engine.observe.timeline.alignment import Sample
from hpcstrat.engine.observe.timeline.events import CLOCK_EVENT

__all__ = ["RankFile", "file_name", "find_runs", "read_events"]

_NAME = re.compile(r"timeline-(?P<run>[0-9A-Za-z.]+)-(?P<replica>\d{6,})\.json")


_CLOCK = ("base_ns", "local_ns", "offset_ns", "round_trip_ns")
# Times of 64 bits, in nanoseconds, are below this number.
_MOST = 1 << 64


def file_name(run: str, replica: int) -> str:
    """Return the name of a rank's file: ``timeline-20261121T104500-000003.json``.

    ``run`` identifies the run in the folder; it has letters, digits and periods.
    """
    return f"timeline-{run}-{replica:06d}.json"


def find_runs(directory: str) -> dict[str, list[str]]:
    """Return the event files of a folder by run, oldest run first, in replica order."""
    runs: dict[str, list[str]] = {}
    for name in sorted(os.listdir(directory)):
        found = _NAME.fullmatch(name)
        if found:
            runs.setdefault(found["run"], []).append(os.path.join(directory, name))
    return runs


def read_events(path: str, mark: str = "") -> Iterator[dict[str, Any]]:
    """Yield the events of a file; a truncated last line is ignored.

    Raises ValueError if another line is invalid. Lines without the text ``mark`` are
    skipped.
    """
    bad = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            text = line.strip().removesuffix(",")
            if text in ("", "[", "]") or mark not in text:
                continue
            # Another line follows: the invalid line was not truncated by a kill.
            if bad:
                break
            try:
                event = json.loads(text)
            except (ValueError, RecursionError):
                event = None
            if _is_event(event):
                yield event
            else:
                bad = number
        else:
            return
    raise ValueError(
        f"expected one event in each line of {path}, found line {bad}, which is none; "
        "leave the file out"
    )


def _is_event(event: Any) -> bool:
    """Return whether a line has the fields of an event that the commands read."""
    if not isinstance(event, dict) or not isinstance(event.get("args", {}), dict):
        return False
    args = event.get("args", {})
    texts, numbers = [event.get("ph")], [event.get("pid"), event.get("tid")]
    if event.get("ph") == "M":
        texts.append(event.get("name"))
        if event.get("name") == CLOCK_EVENT:
            numbers += [args.get(name) for name in _CLOCK]
        elif "name" in args:
            texts.append(args["name"])
        return all(map(_is_text, texts)) and all(map(_is_whole_number, numbers))
    times = [event.get("ts"), event.get("dur", 0)]
    if event.get("ph") == "X":
        times.append(event.get("dur"))
        texts.append(event.get("name"))
        if "sequence" in args:
            numbers.append(args["sequence"])
            texts.append(str(args["channel"]) if "channel" in args else None)
    return (
        all(map(_is_text, texts))
        and all(map(_is_whole_number, numbers))
        and all(type(time) in (int, float) and abs(time) < _MOST for time in times)
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole_number(value: Any) -> bool:
    return type(value) is int and abs(value) < _MOST


@dataclass(frozen=True, slots=True)
class RankFile:
    """Metadata of a rank's file, which is read before the events."""

    path: str
    # Process (worker) and thread (replica) number in the trace, and their names.
    pid: int
    tid: int
    process: str
    thread: str
    base_ns: int
    samples: tuple[Sample, ...]
    # False if the rank ended before it closed the JSON array.
    whole: bool

    @classmethod
    def read(cls, path: str) -> RankFile | None:
        """Read a file's metadata; return None if it has no clock measurement."""
        names: dict[str, str] = {}
        process, base_ns, samples = (0, 0), 0, []
        for event in read_events(path, '"ph": "M"'):
            args = event["args"]
            if event["name"] == CLOCK_EVENT:
                base_ns = args["base_ns"]
                times = args["local_ns"], args["offset_ns"], args["round_trip_ns"]
                samples.append(Sample(*times))
            elif "name" in args and event["name"] not in names:
                names[event["name"]] = args["name"]
                process = event["pid"], event["tid"]
        if not samples:
            return None

        return cls(
            path=path,
            pid=process[0],
            tid=process[1],
            process=names.get("process_name", ""),
            thread=names.get("thread_name", ""),
            base_ns=base_ns,
            samples=tuple(samples),
            whole=_ends(path),
        )


def _ends(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 8))
        return file.read().rstrip().endswith(b"]")
