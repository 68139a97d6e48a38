"""The files of a timeline, including those that a killed job has left behind."""

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


def file_name(run: str, replica: int) -> str:
    """Return the name of a rank's file: ``timeline-20261121T104500-000003.json``.

    ``run`` tells the runs in a folder apart: letters, digits and points.
    """
    return f"timeline-{run}-{replica:06d}.json"


def find_runs(directory: str) -> dict[str, list[str]]:
    """Return the files of a folder by the run that wrote them, oldest run first.

    They are in the order of the replicas.
    """
    runs: dict[str, list[str]] = {}
    for name in sorted(os.listdir(directory)):
        found = _NAME.fullmatch(name)
        if found:
            runs.setdefault(found["run"], []).append(os.path.join(directory, name))
    return runs


def read_events(path: str, mark: str = "") -> Iterator[dict[str, Any]]:
    """Give the events of a file; the last one may be cut off, no other (ValueError).

    Lines without the text ``mark`` are passed over.
    """
    bad = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            text = line.strip().removesuffix(",")
            if text in ("", "[", "]") or mark not in text:
                continue
            # A line follows the bad one, so that no kill has cut it off.
            if bad:
                break
            try:
                event = json.loads(text)
            except ValueError:
                bad = number
                continue
            yield event
        else:
            return
    raise ValueError(
        f"expected one event in each line of {path}, found line {bad}, which is none; "
        "leave the file out"
    )


@dataclass(frozen=True, slots=True)
class RankFile:
    """The facts of a file that are needed before its events are placed."""

    path: str
    # Numbers of the worker and of the replica, and their names.
    pid: int
    tid: int
    process: str
    thread: str
    base_ns: int
    samples: tuple[Sample, ...]
    # False where the rank was ended before its file.
    whole: bool

    @classmethod
    def read(cls, path: str) -> RankFile | None:
        """Look through a file; None where the rank ended before it noted its clock."""
        names: dict[str, str] = {}
        place, base_ns, samples = (0, 0), 0, []
        for event in read_events(path, '"ph": "M"'):
            args = event["args"]
            if event["name"] == CLOCK_EVENT:
                base_ns = args["base_ns"]
                times = args["local_ns"], args["offset_ns"], args["round_trip_ns"]
                samples.append(Sample(*times))
            elif "name" in args and event["name"] not in names:
                names[event["name"]] = args["name"]
                place = event["pid"], event["tid"]
        if not samples:
            return None

        return cls(
            path=path,
            pid=place[0],
            tid=place[1],
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
