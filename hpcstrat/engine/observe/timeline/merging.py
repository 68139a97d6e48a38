"""Merges the files of all ranks into one trace, with the times of one clock."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from hpcstrat.engine.observe.timeline.alignment import Alignment, Sample
from hpcstrat.engine.observe.timeline.rank_files import RankFile, find_runs, read_events

__all__ = ["Timeline", "open_timeline"]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The event files of one run."""

    run: str
    # ``files`` has the readable files, in replica order, and ``unread`` the paths of
    # files without a clock measurement.
    files: tuple[RankFile, ...]
    unread: tuple[str, ...]
    other_runs: tuple[str, ...]

    def alignments(self) -> dict[int, Alignment]:
        """Return the clock alignment of each worker, by the worker's ``pid``."""
        # The ranks of a worker share one clock, so their measurements are combined.
        samples: dict[int, list[Sample]] = {}
        for file in self.files:
            samples.setdefault(file.pid, []).extend(file.samples)
        return {pid: Alignment(found) for pid, found in samples.items()}

    def events(self) -> Iterator[tuple[RankFile, dict[str, Any]]]:
        """Yield all events, each with its rank file; times are of replica 0's clock."""
        alignments = self.alignments()
        zero = min(
            alignments[file.pid].reference_ns(file.base_ns) for file in self.files
        )
        for file in self.files:
            alignment = alignments[file.pid]
            for event in read_events(file.path):
                if event["ph"] != "M":
                    start = file.base_ns + round(event["ts"] * 1000)
                    placed = alignment.reference_ns(start)
                    event["ts"] = (placed - zero) / 1000
                    if "dur" in event:
                        # Convert the end, too: the clock drifts during a long range.
                        end = start + round(event["dur"] * 1000)
                        last = alignment.reference_ns(end)
                        event["dur"] = (last - placed) / 1000
                yield file, event

    def write(self, path: str) -> int:
        """Write one file for Perfetto or chrome://tracing; return the number of events.

        Compresses the file if the path ends in ``.gz``; replaces an existing file.
        """
        part, count = f"{path}.part", 0
        try:
            with _text_file(part, compressed=path.endswith(".gz")) as file:
                file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
                for _, event in self.events():
                    file.write(",\n" if count else "")
                    file.write(json.dumps(event))
                    count += 1
                about = json.dumps({"run": self.run, "clocks": self._clocks()})
                file.write(f'\n], "otherData": {about}}}\n')
            # Rename atomically, so that a reader never sees half a trace.
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        return count

    def _clocks(self) -> list[dict[str, Any]]:
        return [
            {
                "worker": pid,
                "drift": alignment.drift,
                "error_ns": max(s.round_trip_ns for s in alignment.samples) // 2,
                "samples": len(alignment.samples),
            }
            for pid, alignment in sorted(self.alignments().items())
        ]


def _text_file(path: str, *, compressed: bool) -> IO[str]:
    if compressed:
        return gzip.open(path, "wt", compresslevel=5, encoding="utf-8")
    return open(path, "w", encoding="utf-8")


def open_timeline(directory: str, run: str | None = None) -> Timeline:
    """Find the files of a run (default: the newest run) in a folder.

    Raises ValueError if there are no files with events, or a file is damaged.
    """
    runs = find_runs(directory)
    if not runs:
        raise ValueError(
            f"expected files timeline-*.json in {directory}, found none; give the "
            "folder of HPCSTRAT_TIMELINE, or of strategy.timeline()"
        )
    if run is not None and run not in runs:
        raise ValueError(
            f"expected one of the runs {', '.join(runs)} in {directory}, found {run}; "
            "choose one"
        )
    chosen = run or list(runs)[-1]
    read = {path: RankFile.read(path) for path in runs[chosen]}
    files = tuple(file for file in read.values() if file is not None)
    if not files:
        raise ValueError(
            f"expected events in the files of {chosen} in {directory}, found none; the "
            "job was ended before it wrote any"
        )
    return Timeline(
        run=chosen,
        files=files,
        unread=tuple(path for path, file in read.items() if file is None),
        other_runs=tuple(other for other in runs if other != chosen),
    )
