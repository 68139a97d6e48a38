"""Totals of a rank's time, from the events of a recorder."""

from __future__ import annotations

import threading

import pytest

from hpcstrat.engine.observe.timeline import active
from hpcstrat.engine.observe.timeline.recorder import DATA, WAIT
from hpcstrat.engine.observe.timeline.totals import totals


def test_parts_of_calls_and_of_input_are_added_up() -> None:
    numbered = {"call": "reduce", "bytes": 40, "sequence": 7, "channel": 0}
    events = [
        # Waiting and data transfer of one call, whose own event includes both.
        (WAIT, "wait", 100, 130, numbered, 0),
        (DATA, "data", 130, 150, None, 0),
        ("reduce", "collective", 99, 150, numbered, 0),
        # Waiting for the end of a call that was started before.
        (WAIT, "wait", 200, 205, {"call": "reduce"}, 0),
        # Input that makes a collective call.
        (WAIT, "wait", 310, 320, {**numbered, "bytes": 2}, 0),
        (DATA, "data", 320, 321, None, 0),
        ("next", "data", 300, 340, None, 0),
        ("run", "step", 0, 400, None, 0),
        ("reduce", "b", 3, "1", None),
        '{"name": "thread_name"}',
    ]
    with totals() as found:
        for event in events:
            found.put(event)
        other = threading.Thread(target=found.put, args=(events[0],))
        other.start()
        other.join()
        # The totals are: waiting, communication, input; calls and bytes.
        assert found.take() == (30 + 10, 20 + 5 + 1, 40 - 11, 2, 42)
        found.put(("next", "data", 400, 410, None, 0))
        assert found.take() == (0, 0, 10, 0, 0)
    assert active.recorder is None


def test_only_one_record_is_kept_at_a_time() -> None:
    with totals(), pytest.raises(RuntimeError, match="unset HPCSTRAT_TIMELINE"):
        totals().__enter__()
    assert active.recorder is None
