"""JAX's integration: its rank tests in jobs of 1 to 3 ranks, and separate programs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcstrat import testing
from hpcstrat.testing import launch_command
from tests.integrations.going_on import assert_goes_on
from tests.mpi.programs.started import run_command, ulfm
from tests.mpi.rank_files import RankFiles, names_in, rank_files

__all__ = ["rank_files"]

HERE = Path(__file__).parent
pytestmark = pytest.mark.framework("jax")


# Tests that can fail on one replica, and tests that can fail only on three.
CHOSEN = {1: "process or order or refused", 3: "numpy or process or saved or losses"}
FILES = names_in(HERE / "ranks", "check_jax_*.py")
# Replicas of 2 ranks need 4 ranks, if there are to be several.
SIZES = {"check_jax_divided": 4}


@pytest.mark.parametrize(
    ("n", "file"),
    [
        *[pytest.param(n, f, marks=pytest.mark.full) for n in (1, 2) for f in FILES],
        *[(SIZES.get(file, 3), file) for file in FILES],
        # Three replicas of three ranks.
        *[pytest.param(9, file, marks=pytest.mark.full) for file in SIZES],
    ],
)
def test_rank_tests_pass(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    chosen = ["-k", CHOSEN[n]] if n in CHOSEN else []
    layout = ["--layout=two_replicas_per_worker"] if n == 3 else []
    rank_files.num_passed(request, HERE / "ranks", *chosen, *layout)


@pytest.mark.full
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("n", [3])
def test_rank_tests_pass_in_all_layouts(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    rank_files.num_passed(request, HERE / "ranks", "-k", CHOSEN[n])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are not bound")
def test_one_core_for_all_ranks_does_not_hang() -> None:
    """On one core, JAX's io_callback deadlocks (github.com/jax-ml/jax/issues/25861)."""
    core = min(os.sched_getaffinity(0))
    program = [sys.executable, os.fspath(HERE / "programs" / "jax_one_core.py")]
    command = ["taskset", "-c", str(core), *launch_command(2), *program]
    ended = run_command(command, "one core", 120, {"XLA_FLAGS": ""})
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("done") == 2


CLI = "from hpcstrat.cli import main; main()"
SHARDED = os.fspath(HERE / "programs" / "sharded_jax.py")


@pytest.mark.parametrize(
    ("n", "how"),
    [
        (2, "again"),
        *[pytest.param(*case, marks=pytest.mark.full) for case in ((1, ""), (3, ""))],
    ],
)
def test_the_command_makes_ranks_processes_of_jax(n: int, how: str) -> None:
    command = [sys.executable, "-c", CLI, "jax", SHARDED, how]
    finished = testing.launch(n, command, timeout=120)
    assert finished.returncode == 0, finished.stderr
    total = 3.0 * n * (n + 1) / 2
    for rank in range(n):
        assert f"process {rank} of {n}: {total}" in finished.stdout


@pytest.mark.parametrize(
    ("n", "ranks"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.full)]
)
def test_jax_divides_arrays_inside_of_replicas(n: int, ranks: int) -> None:
    program = os.fspath(HERE / "programs" / "replicas_jax.py")
    options = ["--ranks-per-replica", str(ranks), program, str(ranks)]
    command = [sys.executable, "-c", CLI, "jax", *options]
    finished = testing.launch(n, command, timeout=120)
    assert finished.returncode == 0, finished.stderr
    for rank in range(n):
        replica, position = divmod(rank, ranks)
        assert f"replica {replica}, position {position}: equal" in finished.stdout


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("fail", "ValueError: a broken rank"),
        ("wrong", "num_processes=2, as hpcstrat jax has set it up, found 3"),
    ],
)
def test_an_error_in_a_program_of_jax_ends_all_ranks(how: str, words: str) -> None:
    command = [sys.executable, "-c", CLI, "jax", SHARDED, how]
    finished = testing.launch(2, command, timeout=120)
    assert finished.returncode != 0
    assert words in finished.stderr


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, [3]),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, [3]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, [0]),
        ({"ROCR_VISIBLE_DEVICES": "7"}, [0]),
    ],
)
def test_a_rank_has_a_gpu_of_those_that_it_sees(
    environment: dict[str, str], gpus: list[int]
) -> None:
    from hpcstrat.integrations.jax.jax_launcher import _own_gpu

    assert _own_gpu(3, environment) == gpus


@ulfm
def test_training_goes_on_when_a_rank_is_killed() -> None:
    """The other ranks wait inside of jit, where the loss is raised by JAX."""
    assert_goes_on("jax_elastic.py")


def test_the_library_loads_jax_only_when_asked() -> None:
    program = (
        "import sys, hpcstrat as hs; hs.ReduceOp; assert 'jax' not in sys.modules; "
        "import hpcstrat.integrations.jax; assert 'mpi4py.MPI' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_another_version_of_the_interface_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls outside of jit need no handler, so they still work."""
    import jax
    import jax.numpy as jnp

    import hpcstrat as hs
    import hpcstrat.integrations.jax as hsj
    from hpcstrat.integrations.jax import xla_handler

    monkeypatch.setattr(xla_handler, "_found_version", lambda: (1, 0))
    xla_handler.register.cache_clear()
    strategy = hs.get_strategy()
    advice = r"interface of version 0, found 1 .*; call all_reduce outside of jit"
    with pytest.raises(NotImplementedError, match=advice):
        jax.jit(lambda x: hsj.all_reduce(x, "sum", strategy))(jnp.ones(2))
    assert hsj.all_reduce(jnp.float32(2), "sum", strategy) == 2
    monkeypatch.undo()
    xla_handler.register.cache_clear()
    total = jax.jit(lambda x: hsj.all_reduce(x + 1, "sum", strategy))(jnp.float32(2))
    assert total == 3


def test_structures_that_are_smaller_are_refused() -> None:
    """A version of XLA may have smaller structures without a new version number."""
    from hpcstrat.integrations.jax import xla_handler as known

    said: list[bytes] = []

    def create(arguments: Any) -> int:
        said.append(arguments.contents.message)
        return 1

    kind = dict(known._Api._fields_)["error_create"]
    api = known._Api(size=ctypes.sizeof(known._Api), error_create=kind(create))
    frame = known._Frame(size=8, api=ctypes.pointer(api), stage=3)
    assert known._handle(ctypes.byref(frame)) == 1
    assert b"with structures of [8, " in said[0]
    assert b"call it outside of jit" in said[0]
    # The stages before the execution do nothing.
    frame.stage = 0
    assert known._handle(ctypes.byref(frame)) is None
