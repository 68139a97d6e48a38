"""The tests of a module: records of their calls, their selection, their command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.reach.__main__ import chosen
from tests.reach.selection import JOBS, TABLE, files_of, with_name_of

ROOT = Path(__file__).parents[2]


def test_the_table_names_what_is_there() -> None:
    table = json.loads(TABLE.read_text())
    assert len(table) > 300
    names = {*table, *(name for files in table.values() for name in files)}
    missing = sorted(name for name in names if not (ROOT / name).exists())
    assert not missing, f"make the table anew: python -m tests.reach --note; {missing}"


def test_files_that_call_most_in_little_time_are_first() -> None:
    module = "hpcstrat/layers/m.py"
    noted = {
        "slow": (30.0, {f"{module}:{name}" for name in "abc"}),
        "quick": (1.0, {f"{module}:a", "other:x"}),
        "long": (90.0, {f"{module}:d"}),
        "other": (1.0, {"other:x"}),
    }
    assert chosen(module, noted) == ["quick", "slow"]
    # A slower test file in the module's mirrored folder comes first.
    own = "tests/unit/layers/test_normalization.py"
    noted[own] = (4.0, {f"{module}:a"})
    assert chosen(module, noted)[0] == own


def test_every_module_has_tests() -> None:
    table = json.loads(TABLE.read_text())
    modules = [str(p.relative_to(ROOT)) for p in (ROOT / "hpcstrat").rglob("*.py")]
    assert [name for name in modules if not files_of(name, table)] == []


def test_folders_of_tests_are_those_of_the_library() -> None:
    mirrored = [ROOT / "tests" / "unit", ROOT / "tests" / "mpi" / "ranks"]
    assert [
        str(path.relative_to(ROOT))
        for top in mirrored
        for path in top.rglob("__init__.py")
        if not (ROOT / "hpcstrat" / path.relative_to(top)).exists()
    ] == []


def test_jobs_are_listed_for_what_is_there() -> None:
    paths = {*JOBS, *(name for names in JOBS.values() for name in names)}
    assert [name for name in paths if not (ROOT / name).exists()] == []


def test_files_with_the_name_of_a_module_are_its_tests() -> None:
    assert with_name_of("hpcstrat/engine/channel/waiting.py") == [
        "tests/unit/engine/channel/test_waiting.py"
    ]
    assert with_name_of("hpcstrat/metrics/log.py") == [
        "tests/unit/metrics/test_log.py",
        "tests/mpi/ranks/metrics/check_metrics_log.py",
    ]
    found = with_name_of("hpcstrat/integrations/torch/gradients.py")
    assert found == ["tests/integrations/ranks/check_torch_gradients.py"]
    # PyTorch's integration has a module of the same name.
    found = with_name_of("hpcstrat/integrations/keras/checkpoints.py")
    assert found == []


def test_modules_that_are_not_in_the_table_have_the_files_that_name_them() -> None:
    found = files_of("hpcstrat/engine/algorithms/work.py", {})
    assert "tests/unit/engine/algorithms/test_any_order.py" in found
    assert files_of("hpcstrat/testing/runner.py", {}) == [*JOBS["hpcstrat/testing/"]]


def test_new_modules_have_the_tests_of_their_folder() -> None:
    unnamed = "".join(("hpcstrat/elastic/preemption/new", "_one.py"))
    assert files_of(unnamed, {}) == ["tests/mpi/test_elastic.py"]
    unnamed = "".join(("hpcstrat/layers/new/new", "_one.py"))
    assert files_of(unnamed, {}) == [
        "tests/unit/layers/test_normalization.py",
        "tests/mpi/ranks/layers/check_layers.py",
    ]


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
