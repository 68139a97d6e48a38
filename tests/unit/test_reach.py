"""The tests of a module: what is noted of them, chosen for it, and run by a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.reach.__main__ import chosen
from tests.reach.selection import TABLE, files_of

ROOT = Path(__file__).parents[2]


def test_the_table_names_what_is_there() -> None:
    table = json.loads(TABLE.read_text())
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


def test_every_module_has_tests() -> None:
    table = json.loads(TABLE.read_text())
    modules = [str(p.relative_to(ROOT)) for p in (ROOT / "hpcstrat").rglob("*.py")]
    assert [name for name in modules if not files_of(name, table)] == []


def test_a_module_that_is_not_in_the_table_has_the_files_that_name_it() -> None:
    found = files_of("hpcstrat/engine/channel/wire_headers.py", {})
    assert "tests/unit/engine/channel/test_wire_headers.py" in found
    assert "tests/mpi/ranks/engine/channel/check_inlined.py" in found


def test_new_modules_have_the_files_of_others_in_their_folder() -> None:
    table = {"hpcstrat/data/order.py": ["tests/unit/data/test_order.py"]}
    unnamed = "".join(("hpcstrat/data/new", "_one.py"))
    assert files_of(unnamed, table) == ["tests/unit/data/test_order.py"]


def test_pytest_collects_the_files_of_a_module_with_their_ranks() -> None:
    words = ["--collect-only", "-q", "--for=hpcstrat/engine/channel/wire_headers.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "tests/mpi/test_ranks.py::" in done.stdout
    assert "[3-check_" in done.stdout
    assert "[4-check_" not in done.stdout
    files = {line.partition("[")[2] for line in done.stdout.splitlines()}
    assert "3-check_saving]" not in files
