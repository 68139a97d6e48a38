"""Errors before and at the first strategy: missing ranks are named, without a hang.

Each case is a whole program, launched with a hard time limit; the cases of a test run
at the same time.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hpcstrat import testing
from hpcstrat.testing.job import wait_until
from tests.docs.said import assert_said
from tests.mpi.programs.started import IS_OPEN_MPI, Ended, start

WARN = 1.5
# The smallest limit that is allowed at the start.
LIMIT = 10.0
AT_ONCE = 3
# Limit for a whole program on a busy machine.
TIME = 60.0


def _together(calls: Sequence[tuple[Any, ...]], limit: float = LIMIT) -> list[Ended]:
    """Run several cases at the same time, because they mostly wait."""
    limits = {"HPCSTRAT_WARN_SECONDS": str(WARN), "HPCSTRAT_LIMIT_SECONDS": str(limit)}

    def run(words: tuple[Any, ...]) -> Ended:
        return start(words[0], "starting.py", *words[1:], limit=TIME, **limits)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(run, calls))


def _check_ended(ended: Ended) -> None:
    assert ended.returncode, f"it did not end as it must\n{ended}"
    assert not ended.survivors, str(ended)
    assert "made" not in ended.stdout, str(ended)


def _check_named(ended: Ended, late: int, *words: str) -> None:
    """Check that the other ranks report the rank that they wait for, with its place."""
    _check_ended(ended)
    report = rf"waited \d+ s in (the )?creation of Multi.* for rank {late} on \S+"
    assert re.search(report, ended.stderr), str(ended)
    assert_said("late-rank", ended.stderr)
    for word in words:
        assert word in ended.stderr, f"no {word!r}\n{ended}"


def _check_sleeper(ended: Ended, when: str, late: int) -> None:
    if when == "second":
        assert ended.stdout.count("made") == 1, str(ended)
        ended.stdout = ""
    _check_named(ended, late, "in evaluate (starting.py:", "in main\n")
    cause = "a call of MPI, or other C code" if when == "first" else "within 10 s"
    assert cause in ended.stderr, str(ended)


def _check_orders(ended: Ended) -> None:
    _check_named(ended, 1, "which waits in creation of Multi", "on ranks [1, 2]")
    assert "the same strategies in the same order" in ended.stderr, str(ended)


def test_rank_that_does_not_come_is_named_with_what_it_does() -> None:
    """The missing rank is named before and after MPI starts, with its activity."""
    calls = [
        (2, "sleeps", "first", 1),
        (2, "sleeps", "mpi", 0),
        (3, "orders", "mpi", 0),
    ]
    first, second, orders = _together(calls)
    _check_sleeper(first, "first", 1)
    _check_sleeper(second, "mpi", 0)
    _check_orders(orders)


@pytest.mark.slow
def test_rank_that_does_not_come_is_named_in_other_layouts() -> None:
    calls = [
        (3, "sleeps", "first", 0),
        (3, "sleeps", "mpi", 2),
        (3, "sleeps", "second", 0),
    ]
    for ended, (_, _, when, late) in zip(_together(calls), calls, strict=True):
        _check_sleeper(ended, when, late)


@pytest.mark.slow
def test_rank_that_comes_late_disturbs_nobody() -> None:
    calls = [(2, "comes", "first", 1), (3, "comes", "mpi", 0)]
    for ended, (n, _, _, late) in zip(_together(calls, limit=30), calls, strict=True):
        assert ended.returncode == 0, str(ended)
        assert ended.stdout.count(f"made {n}.0") == n, str(ended)
        assert f" for rank {late} on " in ended.stderr, str(ended)


def _check_ends(calls: Sequence[tuple[Any, ...]]) -> None:
    """Check that each job has ended long before the limit."""
    for ended, (_, how, when, late) in zip(
        _together(calls, limit=300), calls, strict=True
    ):
        assert ended.returncode is not None, str(ended)
        assert not ended.survivors, str(ended)
        assert "made" not in ended.stdout, str(ended)
        if how == "raises":
            assert len(ended.tracebacks) == 1, str(ended)
            assert "ValueError: the cause" in ended.tracebacks[0], str(ended)
        if how != "os_exit" or IS_OPEN_MPI:
            assert ended.returncode, str(ended)
        if how == "returns" and (when == "mpi" or not IS_OPEN_MPI):
            words = rf"rank {late} on \S+, which has left the program"
            assert re.search(words, ended.stderr), str(ended)


def test_rank_that_ends_is_not_awaited() -> None:
    _check_ends([(2, "returns", "mpi", 1), (2, "raises", "mpi", 0)])


@pytest.mark.slow
def test_rank_that_ends_in_any_way_is_not_awaited() -> None:
    calls = [(2, how, "first", 1) for how in ("returns", "exits", "os_exit", "raises")]
    calls += [(3, how, "mpi", 1) for how in ("exits", "os_exit", "raises")]
    calls += [(3, "returns", "second", 1)]
    _check_ends(calls[:-1])
    (ended,) = _together(calls[-1:], limit=300)
    assert ended.returncode, str(ended)
    assert "rank 1 on " in ended.stderr, str(ended)


def _check_wrong(calls: Sequence[tuple[Any, ...]]) -> None:
    for ended, (n, how, *_) in zip(_together(calls, limit=30), calls, strict=True):
        assert ended.returncode == 0, str(ended)
        assert ended.stdout.count("made") == n, str(ended)
        said = re.findall(r"^(own|replica|all): (.*)", ended.stdout, re.MULTILINE)
        kinds = sorted(kind for kind, _ in said)
        if how == "other":
            assert kinds == ["all"] * n, str(ended)
        else:
            assert kinds == ["own"] + ["replica"] * (n - 1), str(ended)
            own = next(text for kind, text in said if kind == "own")
            assert all(own in text for kind, text in said), str(ended)


def test_wrong_argument_of_one_rank_is_an_error_of_all() -> None:
    _check_wrong([(2, "on_error", "first", 1), (3, "other", "mpi", 0)])


@pytest.mark.slow
@pytest.mark.parametrize("when", ["first", "mpi"])
def test_any_wrong_argument_of_one_rank_is_an_error_of_all(when: str) -> None:
    ways = ["on_error", "settings", "resolver", "per_worker", "options", "other"]
    calls = [(2 + i % 2, how, when, i % 2) for i, how in enumerate(ways)]
    _check_wrong([*calls, (2, "comm", "first", 1), (2, "devices", when, 0)])


@pytest.mark.slow
def test_wrong_communicator_does_not_keep_its_rank_waiting() -> None:
    """The other ranks may use another communicator, where no rank can notify them."""
    (ended,) = _together([(2, "comm", "mpi", 0)], limit=30)
    assert "own: expected an intracommunicator" in ended.stdout, str(ended)


def test_nothing_is_left_in_memory() -> None:
    def left() -> set[str]:
        return set(glob.glob(f"/dev/shm/hpcstrat-start-{os.getuid()}-*"))

    before = left()
    (ended,) = _together([(2, "os_exit", "mpi", 1)], limit=30)
    assert ended.returncode is not None
    # Ignore files of jobs of other tests, which are removed when these jobs have
    # started.
    more = left() - before
    assert wait_until(lambda: not more & left(), 20), more


@pytest.mark.parametrize(
    ("how", "when"),
    [
        *[("fork", "now"), ("raw", "now"), ("spawn", "later")],
        pytest.param("spawn", "now", marks=pytest.mark.full),
        *[("spawn", "import"), ("forkserver", "import")],
    ],
)
def test_children_of_ranks_make_no_strategy(how: str, when: str) -> None:
    """The children do not disturb the ranks that have made them, either."""
    ended = start(2, "children.py", how, when, limit=TIME)
    assert ended.returncode == 0, str(ended)
    assert not ended.survivors, str(ended)
    words = "child: TopologyError: expected a strategy in a process that the launcher"
    assert ended.stdout.count(words) == 2, str(ended)
    assert ended.stdout.count("if __name__ == '__main__':") == 2, str(ended)
    assert ended.stdout.count("total 2") == 2, str(ended)


def _loaded() -> set[str]:
    """Return the modules that a step on CPUs has loaded."""
    import numpy as np

    import hpcstrat as hs

    with hs.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            variable = hs.Variable(np.zeros(1), aggregation="sum")
        dataset = hs.Dataset(np.arange(8.0), 4)
        for batch in strategy.experimental_distribute_dataset(dataset):
            strategy.run(lambda x: variable.assign_add(x[:1]), args=(batch,))
            strategy.reduce("mean", batch, axis=0)
        strategy.gather(variable.value(), axis=0)
    return set(sys.modules)


def test_programs_on_cpus_load_nothing_of_gpus() -> None:
    """Loaded modules matter: ten thousand ranks read them from the same file system."""
    for loaded in testing.run(2, _loaded):
        of_gpus = {name for name in loaded if name.startswith("hpcstrat.engine.gpu")}
        # These modules only check whether there are GPUs.
        assert of_gpus <= {
            "hpcstrat.engine.gpu",
            "hpcstrat.engine.gpu.library",
            "hpcstrat.engine.gpu.binding",
        }
        others = {"click", "cupy", "h5py", "hpcstrat.checkpoint", "rich"}
        assert not loaded & others
