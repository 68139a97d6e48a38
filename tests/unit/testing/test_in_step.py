"""Reports of ranks are joined: equal ones are shown once, with all their ranks."""

from __future__ import annotations

from hpcstrat.testing.in_step import _joined


def test_equal_reports_are_shown_once_for_all_their_ranks() -> None:
    texts = [
        ("comm = <object at 0x7fa1>\nE wrong", ": wrong"),
        ("", ""),
        ("comm = <object at 0x55ee>\nE wrong", ": wrong"),
        ("comm = <object at 0x7fa1>\nE other", ": other"),
        ("comm = <object at 0x7fa1>\nE wrong", ": other"),
    ]
    assert _joined(texts) == [
        ("ranks [0, 2]", texts[0]),
        ("rank 3", texts[3]),
        ("rank 4", texts[4]),
    ]
