"""Servers and workers end when the coordinator ends, and name lost ranks."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from hpcstrat import testing
from tests.mpi.programs import served_kills
from tests.mpi.programs.killing import Trial, local
from tests.mpi.programs.started import (
    IS_OPEN_MPI,
    PROGRAMS,
    run_command,
    start,
    ulfm,
)

ENDS = ("busy", "exit", "raise", "interrupt", "worker", "workers")
CODES = {"busy": 0, "exit": 3, "workers": 0}
SAID = {"busy": ["late 1.0"], "workers": ["that it has ended", "at last 3.0"]}


@pytest.mark.parametrize("way", ENDS)
def test_all_ranks_end_with_the_coordinator(way: str) -> None:
    ended = start(3, "serving.py", way)
    for said in ("value 2.0", *SAID.get(way, ())):
        assert said in ended.stdout, str(ended)
    assert not ended.survivors, str(ended)
    assert ended.returncode is not None, str(ended)
    if way in CODES:
        assert ended.returncode == CODES[way], str(ended)
        assert not ended.tracebacks, str(ended)
    else:
        assert ended.returncode, str(ended)
    if way == "raise":
        assert "ValueError: the cause" in ended.tracebacks[0], str(ended)
    if way == "worker" and IS_OPEN_MPI:
        # The launcher names the lost rank, or a rank that noticed the loss before.
        assert re.search(r"rank 2|ranks \[2\]", ended.stderr), str(ended)


def test_a_worker_that_makes_fewer_variables_is_told_at_its_end() -> None:
    ended = start(3, "serving.py", "fewer")
    assert ended.returncode == 0, str(ended)
    told = "rank 0 has made 'second', and rank 2 has not"
    assert ended.stderr.count(told) == 1, str(ended)


@ulfm
def test_ranks_end_where_mpi_has_not_told_them_of_a_loss() -> None:
    path = str(PROGRAMS / "serving.py")
    command = [*local(4), sys.executable, path, "lost"]
    ended = run_command(command, "serving.py lost", 30, {})
    assert ended.returncode == 0, str(ended)
    assert "closed" in ended.stdout, str(ended)
    # A rank that does not know of the loss could wait in MPI_Finalize for ever.
    assert "asked" not in ended.stdout, str(ended)
    assert not ended.survivors, str(ended)


_CLUSTER, _CONNECTION = (
    "hpcstrat.parameter_server.coordinator.cluster",
    "hpcstrat.strategies.connection",
)


@ulfm
@pytest.mark.parametrize(
    ("place", "rank"),
    [
        # Any remaining rank may become the coordinator if nothing has begun.
        ("start", 0),
        pytest.param("start", 3, marks=pytest.mark.full),
        # One rank waits for this rank; the others continue to an agreement.
        (f"{_CONNECTION}._agree_on_settings", 1),
        pytest.param(f"{_CLUSTER}._roles", 2, marks=pytest.mark.full),
        *[
            pytest.param(f"{_CLUSTER}.{name}", rank, marks=pytest.mark.full)
            for name in ("WakeupPipes", "Mailbox", "Client")
            for rank in (1, 3)
        ],
    ],
)
def test_a_cluster_is_formed_without_a_rank_that_is_lost_meanwhile(
    place: str, rank: int
) -> None:
    words = [str(PROGRAMS / "serving.py"), "creation", place, str(rank)]
    ended = run_command([*local(4), sys.executable, *words], place, 30, {})
    assert ended.returncode == 0, str(ended)
    assert "10.0 with 1 and 0 spare" in ended.stdout, str(ended)
    assert "lost 1 of 4 ranks while ParameterServerStrategy was" in ended.stderr
    assert not ended.survivors, str(ended)


def test_the_program_of_the_guide_trains() -> None:
    path = Path(__file__).parents[2] / "docs" / "examples" / "embeddings_served.py"
    command = [sys.executable, str(path), "--servers", "2"]
    finished = testing.launch(4, command, timeout=100)
    assert finished.returncode == 0, finished.stderr
    assert "8 shards" in finished.stdout


def _fail_for(trials: list[Trial]) -> None:
    wrong = [str(trial) for trial in trials if trial.problem]
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)


@ulfm
@pytest.mark.parametrize(
    ("servers", "rank"), [(1, 3), (2, 2), pytest.param(2, 1, marks=pytest.mark.full)]
)
def test_goes_on_without_a_worker_and_without_a_server(servers: int, rank: int) -> None:
    trial = served_kills.one_trial(servers, 2, [(rank, 0.05)], losses=1)
    _fail_for([trial])
    assert trial.results[0]["losses"] == 1, str(trial)


@ulfm
@pytest.mark.parametrize(
    ("kills", "spares"),
    [
        # The losses: the worker, the server, both, and a spare rank that is not needed.
        ((2,), 1),
        pytest.param((1,), 1, marks=pytest.mark.full),
        pytest.param((2, 1), 2, marks=pytest.mark.full),
        pytest.param((3,), 1, marks=pytest.mark.full),
    ],
)
def test_a_spare_rank_takes_the_place_of_a_lost_one(
    kills: tuple[int, ...], spares: int
) -> None:
    pairs = [(rank, 0.05) for rank in kills]
    trial = served_kills.one_trial(1, 1, pairs, losses=len(kills), spares=spares)
    _fail_for([trial])
    assert trial.results[0]["vacant"] == 0, str(trial)


@ulfm
@pytest.mark.full
def test_loss_of_the_coordinator_ends_the_job() -> None:
    trial = served_kills.one_trial(1, 2, [(0, 0.05)], losses=1)
    assert trial.returncode, str(trial)
    assert not trial.results, str(trial)
    assert "coordinator to go on, found that it was lost" in trial.stderr, str(trial)


@ulfm
@pytest.mark.full
def test_random_kills() -> None:
    _fail_for(served_kills.campaign(6, int(time.time())))


@ulfm
@pytest.mark.slow
def test_hundred_random_kills(capsys: pytest.CaptureFixture[str]) -> None:
    trials = served_kills.campaign(100, 100)
    with capsys.disabled():
        print(f"\n{served_kills.figures(trials)}")
    _fail_for(trials)
