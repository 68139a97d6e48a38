"""Damaged lines of hang files are left out, and never end in a traceback."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcstrat.cli.main import main
from hpcstrat.safety.watchdog.late_ranks import LateRank, LateReport
from hpcstrat.safety.watchdog.stacks import Stacks

ABOUT = {"time": 1e9, "rank": 0, "size": 2, "place": "rank 0 of 2 on a"}
GROUPS = [{"calls": 3, "state": "in the program", "seconds": 1.0, "ranks": [0, 1]}]
LATE = LateRank(1, "b", Stacks("which is stopped", "f (a.py:3)", "text"), "call 2", 3.0)
EVENTS: list[dict[str, Any]] = [
    {
        **ABOUT,
        "event": "late",
        "report": asdict(LateReport([0], 3.0, "in barrier", [LATE], 1)),
        "ranks": GROUPS,
    },
    {**ABOUT, "event": "end", "reason": "it waited", "ranks": GROUPS},
    {
        **ABOUT,
        "event": "error",
        "kind": "ValueError",
        "text": "x",
        "site": "a.py:3",
        "caused": False,
        "traceback": "Traceback",
        "ranks": GROUPS,
    },
]
VALUES = st.sampled_from([None, "", "x", -1, 1e300, [], {}, [1], {"a": 1}, True])


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of all values inside of a value."""
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    return [
        p for key in keys for p in [(*path, key), *_paths(value[key], (*path, key))]
    ]


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@pytest.mark.parametrize("number", range(len(EVENTS)))
def test_damaged_events_are_left_out(
    number: int, tmp_path: Path, data: st.DataObject
) -> None:
    event = copy.deepcopy(EVENTS[number])
    *above, key = data.draw(st.sampled_from(_paths(event)))
    holder: Any = event
    for name in above:
        holder = holder[name]
    if data.draw(st.booleans()):
        holder[key] = data.draw(VALUES)
    else:
        del holder[key]
    text = json.dumps(event)
    line = text[: data.draw(st.sampled_from([len(text), len(text) // 2]))]
    file = tmp_path / "x.jsonl"
    file.write_text(f"{line}\n{json.dumps(EVENTS[1])}\n")
    done = CliRunner().invoke(main, ["hang", "--stacks", str(file)])
    assert done.exit_code == 0, (line, done.exception)
    whole = "2 ranks, 2 events" in done.output or "events, " in done.output
    assert whole, done.output


def test_damaged_lines_are_counted_and_no_events_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    lines = [json.dumps(EVENTS[0]), "{}", '{"time": 1e300}', "[" * 10**5]
    file.write_text("\n".join(lines))
    done = CliRunner().invoke(main, ["hang", str(file)])
    assert done.exit_code == 0, done.exception
    assert "3 damaged lines are left out" in done.output
    file.write_text("\n".join(lines[1:]))
    done = CliRunner().invoke(main, ["hang", str(file)])
    assert done.exit_code == 1
    assert "expected events of a job, found none" in done.output
