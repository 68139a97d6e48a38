"""Programs of Horovod in separate jobs, and Horovod's own tests."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path

import pytest

from hpcstrat import testing
from hpcstrat.testing import launch_command
from tests.mpi.programs.started import run_command

pytestmark = pytest.mark.framework("torch")

HERE = Path(__file__).parent
RANK_TESTS = HERE / "ranks" / "check_horovod.py"
GUIDE = HERE.parents[1] / "docs" / "coming-from" / "horovod.md"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("sleeps", ["for rank 1 on ", "in main "]),
        ("ends", ["rank 1 had left the program"]),
    ],
)
def test_a_call_that_a_rank_never_makes_is_named(how: str, words: list[str]) -> None:
    limits = {"HPCSTRAT_WARN_SECONDS": "2", "HPCSTRAT_LIMIT_SECONDS": "8"}
    program = [sys.executable, str(HERE / "programs" / "horovod_missing.py"), how]
    ended = run_command([*launch_command(2), *program], how, 120, limits)
    assert ended.returncode, str(ended)
    assert not ended.survivors, str(ended)
    for word in ["hvd.synchronize of 'allreduce.lost'", *words]:
        assert word in ended.stderr, str(ended)


def test_the_table_is_of_what_is_there_and_tested() -> None:
    import hpcstrat.integrations.horovod.torch as hvd

    rows = re.findall(r"^\|([^|]*hvd\.[^|]*)\|", GUIDE.read_text(), re.MULTILINE)
    shown = {name for row in rows for name in re.findall(r"hvd\.(\w+)", row)}
    assert shown == set(hvd.__all__)
    tested = set(re.findall(r"hvd\.(\w+)", RANK_TESTS.read_text()))
    # A loop tests all ``*_built`` functions, one for each library of Horovod.
    tested |= {name for name in shown if name.endswith("_built")}
    assert shown <= tested, shown - tested


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tests_of_horovod_itself(n: int) -> None:
    checkout = os.environ.get("HOROVOD_CHECKOUT")
    if not checkout:
        pytest.skip("no checkout of Horovod in HOROVOD_CHECKOUT")
    program = "tests.integrations.programs.horovod_suite"
    finished = testing.launch(
        n, [sys.executable, "-m", program, checkout, "--color=no"], timeout=300
    )
    print(finished.stdout)
    assert finished.returncode == 0


@pytest.mark.parametrize("name", ["tensorflow", "tensorflow.keras"])
def test_other_modules_of_horovod_are_refused_with_the_way_by_keras(name: str) -> None:
    words = "found horovod.tensorflow; train with model.fit of Keras 3"
    with pytest.raises(ImportError, match=words):
        importlib.import_module(f"hpcstrat.integrations.horovod.{name}")
