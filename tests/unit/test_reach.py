"""The table of what calls a module, and how files are chosen for it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.reach.__main__ import chosen

ROOT = Path(__file__).parents[2]


def test_the_table_names_what_is_there() -> None:
    table = json.loads((ROOT / "tests" / "reach" / "table.json").read_text())
    assert len(table) > 300
    names = {*table, *(name for files in table.values() for name in files)}
    missing = sorted(name for name in names if not (ROOT / name).exists())
    assert not missing, f"make the table anew: python -m tests.reach --note; {missing}"


def test_files_that_call_most_in_little_time_are_first() -> None:
    noted = {
        "slow": (30.0, {"m:a", "m:b", "m:c"}),
        "quick": (1.0, {"m:a", "other:x"}),
        "long": (90.0, {"m:d"}),
        "other": (1.0, {"other:x"}),
    }
    assert chosen("m", noted) == ["quick", "slow"]
