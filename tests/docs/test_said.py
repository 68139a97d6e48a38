"""Every message that a page shows was printed by a program in some test."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from hpcstrat.testing import launch_command
from hpcstrat.testing.launcher import clean_environment
from tests.docs.said import assert_said, messages

TESTS = Path(__file__).parents[1]


def test_each_message_is_made_by_a_test() -> None:
    sources = [path.read_text() for path in TESTS.rglob("*.py")]
    called = {
        name
        for source in sources
        for name in re.findall(r'assert_said\(\s*"([\w-]+)"', source)
    }
    assert called == set(messages())
    assert len(called) > 15


def test_other_words_are_noticed() -> None:
    said = "expected 8 ranks, as srun started, found 8 separate programs of one rank"
    more = " each, because mpi4py uses MPICH 5; launch with the mpirun of that library"
    assert_said("wrong-mpi", f"{said}{more}, or with srun --mpi=pmix (Open MPI)")
    with pytest.raises(AssertionError, match="not in"):
        assert_said("wrong-mpi", said.replace("separate ", "") + more)


def _mpirun(*options: str) -> str:
    """Return mpirun's error message if it does not start."""
    words = launch_command(1)
    if "--oversubscribe" not in words:
        pytest.skip("these are messages of Open MPI")
    env = clean_environment()
    env = {name: env[name] for name in env if "ALLOW_RUN_AS_ROOT" not in name}
    done = subprocess.run(
        [words[0], *options, "true"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
    )
    assert done.returncode
    return done.stderr + done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="of root only")
def test_open_mpi_refuses_root() -> None:
    assert_said("root", _mpirun())


def test_open_mpi_refuses_more_ranks_than_slots() -> None:
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    assert_said("no-slots", _mpirun(*as_root, "-n", "999"))
