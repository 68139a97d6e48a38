"""Check of every event in Chrome's trace event format, which Perfetto reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_NEEDED = {"name": str, "ph": str, "pid": int, "tid": int}


def check_trace(events: Iterable[dict[str, Any]]) -> dict[tuple[int, int], list[Any]]:
    """Check all events; return the complete events of each track, in order of time."""
    tracks: dict[tuple[int, int], list[Any]] = {}
    opened: dict[tuple[str, str], float] = {}
    named = set()
    for event in events:
        for key, kind in _NEEDED.items():
            assert type(event.get(key)) is kind, f"{key} of {event}"
        assert 0 <= event["pid"] < 1 << 32, event
        assert 0 <= event["tid"] < 1 << 32, event
        assert isinstance(event["ts"], (int, float)), event
        assert isinstance(event.get("args", {}), dict), event
        track = event["pid"], event["tid"]
        phase = event["ph"]
        assert phase in "MXbe", event
        if phase == "M":
            if event["name"] == "thread_name":
                named.add(track)
        elif phase == "X":
            assert event["dur"] >= 0, event
            tracks.setdefault(track, []).append(event)
        else:
            mark = event["cat"], event["id"]
            if phase == "b":
                assert mark not in opened, event
                opened[mark] = event["ts"]
            else:
                assert opened.pop(mark) <= event["ts"], event
    assert set(tracks) <= named, "a track has no name"
    for track, complete in tracks.items():
        complete.sort(key=lambda e: (e["ts"], -e["dur"]))
        _check_nesting(track, complete)
    return tracks


def _check_nesting(track: tuple[int, int], events: list[dict[str, Any]]) -> None:
    """Check that events of a track are nested or disjoint."""
    # Tolerance below one nanosecond, the resolution of the times.
    rounding = 5e-4
    outer: list[tuple[float, str]] = []
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        while outer and outer[-1][0] <= start + rounding:
            outer.pop()
        assert not outer or end <= outer[-1][0] + rounding, (
            f"on track {track}, {event} ends after {outer[-1][1]}, in which it began"
        )
        outer.append((end, event["name"]))
