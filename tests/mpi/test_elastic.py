"""Training continues after the loss of a rank, and has the right result.

Each case is a whole program, launched with a hard time limit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpcstrat.testing import launch_command
from hpcstrat.testing.job import wait_until
from tests.mpi.programs import killing
from tests.mpi.programs.killing import Trial, attempt, judge, local, undisturbed
from tests.mpi.programs.started import (
    IS_OPEN_MPI,
    PROGRAMS,
    Ended,
    run_command,
    start,
    ulfm,
)

# Two jobs at once, because jobs spend most of their time starting and waiting.
AT_ONCE = 2

Case = tuple[int, dict[str, Any]]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Return the result of the same training in one process."""
    return undisturbed({})


def _kill(rank: int, where: str, step: int = 0, **rest: int) -> dict[str, Any]:
    return {"rank": rank, "where": where, "step": step, **rest}


def _trials(cases: Iterable[Case]) -> list[Trial]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda case: attempt(local(case[0]), case[1]), cases))


def _fail_for(trials: Iterable[Trial]) -> None:
    wrong = [str(trial) for trial in trials if trial.problem]
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)


def _wrong_replicas(trial: Trial, replicas: int, ranks: int) -> None:
    found = [result["replicas"] for result in trial.results]
    if found != [replicas] * ranks and not trial.problem:
        trial.problem = f"replicas are {found}, not {[replicas] * ranks}"


@ulfm
@pytest.mark.parametrize(
    "places",
    [
        [(3, 1, "between", 1), (4, 2, "commit", 0)],
        pytest.param(
            [(2, 0, "reduce", 0), (4, 0, "restore", 1)], marks=pytest.mark.full
        ),
    ],
)
def test_a_lost_rank_leaves_no_trace_among_logical_replicas(
    places: list[tuple[int, int, str, int]],
) -> None:
    cases: list[Case] = []
    for n, rank, where, spare_ranks in places:
        run = {"logical_replicas": 5, "spare_ranks": spare_ranks}
        kills = [_kill(rank, where, AT_STEP.get(where, 0))]
        cases.append((n, {"run": run, "kills": kills}))
    expected = undisturbed(cases[0][1])
    trials = _trials(cases)
    for trial in trials:
        judge(trial, expected, traceless=True)
    _fail_for(trials)


PLACES = ("start", "setup", "restore", "dataset", "between", "reduce", "commit", "end")
FULL = pytest.mark.full
AT_STEP = {"dataset": 5, "between": 5, "reduce": 5, "commit": 5}


@ulfm
@pytest.mark.parametrize(
    ("each", "places"),
    [
        (None, PLACES),
        (2, ("restore", "reduce")),
        pytest.param(1, PLACES[1:6], marks=FULL),
        pytest.param(2, PLACES[1:6], marks=FULL),
    ],
)
def test_goes_on_with_fewer_wherever_a_rank_dies(
    each: int | None, places: tuple[str, ...], expected: dict[str, Any]
) -> None:
    # One worker uses shared memory, several workers use MPI between them.
    n = 3 if each is None else 4
    cases = [
        (
            n,
            {
                "kills": [_kill(index % n, place, AT_STEP.get(place, 0))],
                "run": {"replicas_per_worker": each},
            },
        )
        for index, place in enumerate(places)
    ]
    trials = _trials(cases)
    for trial in trials:
        judge(trial, expected)
        _wrong_replicas(trial, n - 1, n - 1)
    _fail_for(trials)


@ulfm
def test_spare_takes_the_place_of_any_rank_bit_for_bit() -> None:
    run = {"spare_ranks": 1, "partner_copies": True}
    whole = attempt(local(3), {})
    same = whole.results[0]
    judge(whole, same)
    cases = [
        (4, {"run": run, "kills": [_kill(0, "reduce", 5)]}),
        (4, {"run": run, "kills": [_kill(1, "commit", 7)], "every": 3}),
        (4, {"run": run, "kills": [_kill(2, "setup")]}),
    ]
    trials = _trials(cases)
    for trial in trials:
        judge(trial, same, exact=True)
        _wrong_replicas(trial, 3, 3)
        for result in trial.results:
            for key in ("bits", "draws", "first", "mean"):
                if result[key] != same[key] and not trial.problem:
                    trial.problem = f"{key} is {result[key]}, not {same[key]}"
    _fail_for([whole, *trials])


@ulfm
@pytest.mark.parametrize("spare_ranks", [pytest.param(0, marks=FULL), 1])
def test_lost_part_of_a_sum_is_named_unless_a_partner_has_it(
    spare_ranks: int, expected: dict[str, Any]
) -> None:
    kills = [_kill(1, "reduce", 5)]
    run = {"spare_ranks": spare_ranks}
    copies = {**run, "partner_copies": True}
    lost, kept = _trials(
        (3 + spare_ranks, {"kills": kills, "run": r}) for r in (run, copies)
    )
    judge(kept, expected, exact=True)
    _fail_for([judge(lost, expected), kept])
    # Replica 1 loses its rows of five steps; a step has 12 rows.
    assert lost.results[0]["seen"] == expected["seen"] - 5 * 4
    # The mean is equal on all replicas; a new replica starts with the mean of the
    # others.
    assert lost.results[0]["mean"] == expected["mean"]
    said = "the parts of replicas [1] in the sums variables/sums/seen"
    assert said in lost.stderr
    assert "are lost" not in kept.stderr


@ulfm
def test_no_gradient_that_was_accumulated_is_lost() -> None:
    rest = {"accumulate_steps": 3}
    whole = undisturbed(rest)
    cases = [
        (3, {"kills": [_kill(1, "reduce", 4)]}),
        (3, {"kills": [_kill(0, "commit", 5), _kill(2, "between", 7)]}),
        (4, {"kills": [_kill(2, "between", 5)], "run": {"spare_ranks": 1}}),
    ]
    for _, options in cases:
        options["run"] = {**options.get("run", {}), "partner_copies": True}
        options.update(rest)
    trials = _trials(cases)
    for trial in trials:
        judge(trial, whole)
    _fail_for(trials)


@ulfm
def test_several_losses(expected: dict[str, Any]) -> None:
    first = _kill(1, "reduce", 5)
    spares = {"spare_ranks": 2, "partner_copies": True}
    cases = {
        # Two losses in a row, the second one of rank 0.
        3: (5, {"kills": [first, _kill(0, "reduce", 8)], "run": spares}),
        # Two losses at the same moment.
        2: (4, {"kills": [first, _kill(0, "reduce", 5)]}),
        # Losses while the survivors start again, until one rank is left.
        1: (
            4,
            {
                "kills": [
                    first,
                    _kill(2, "restore", 0, call=2),
                    _kill(0, "setup", 0, call=3),
                ]
            },
        ),
    }
    trials = _trials(cases.values())
    for replicas, trial in zip(cases, trials, strict=True):
        judge(trial, expected, exact=replicas == 3)
        _wrong_replicas(trial, replicas, replicas)
    _fail_for(trials)


def _kill_spare(folder: Path) -> float:
    """Kill the last rank, a spare rank that waits."""
    assert wait_until((folder / "started").exists, 60)
    time.sleep(0.2)
    os.kill(int((folder / "3.process").read_text()), signal.SIGKILL)
    return time.time()


@ulfm
def test_loss_of_a_spare_disturbs_nobody(expected: dict[str, Any]) -> None:
    options: dict[str, Any] = {"run": {"spare_ranks": 1}, "pause": 0.1}
    alone = attempt(local(4), options, disturb=_kill_spare)
    judge(alone, expected, exact=True)
    _wrong_replicas(alone, 3, 3)
    # The spare rank no longer exists when its place is needed.
    options["kills"] = [_kill(0, "reduce", 8)]
    wanted = judge(attempt(local(4), options, disturb=_kill_spare), expected)
    _wrong_replicas(wanted, 2, 2)
    _fail_for([alone, wanted])


@ulfm
@pytest.mark.parametrize(
    ("run", "text"),
    [
        ({"min_replicas": 3}, "expected at least 3 replicas to continue, found 2"),
        ({"max_losses": 0}, "expected at most 0 lost ranks, found 1"),
    ],
)
def test_too_few_left_end_the_job_and_say_to_restore(
    run: dict[str, Any], text: str
) -> None:
    trial = attempt(local(3), {"kills": [_kill(1, "reduce", 5)], "run": run})
    assert not trial.problem, str(trial)
    assert not trial.marked, str(trial)
    assert not trial.results, str(trial)
    assert text in trial.stderr, str(trial)
    assert "restore from the checkpoint" in trial.stderr, str(trial)


def test_refused_where_no_loss_can_be_survived() -> None:
    advice = "launch with `mpirun --with-ft ulfm` of Open MPI 5"
    trial = attempt(launch_command(2), {})
    ended = start(2, "lost_rank.py", "go_on", 0)
    for code, said in (
        (trial.returncode, trial.stderr),
        (ended.returncode, ended.stderr),
    ):
        assert code, said
        # Both ranks raise the error; the first one may end the job before the second.
        assert "TopologyError" in said
        assert advice in said
        assert IS_OPEN_MPI or "found MPICH" in said


def _run(n: int, name: str, *words: object) -> Ended:
    command = [*local(n), *killing.program(Path("/"), {})[:1], str(PROGRAMS / name)]
    text = list(map(str, words))
    return run_command([*command, *text], f"{name} {text}", 60, {})


@ulfm
@pytest.mark.parametrize(
    ("way", "each"),
    [
        pytest.param("go_on", 0, marks=FULL),
        pytest.param("go_on", 1, marks=FULL),
        ("go_on", 2),
        pytest.param("piece", 1, marks=FULL),
        pytest.param("piece", 2, marks=FULL),
    ],
)
def test_error_names_the_lost_rank_and_the_others_can_go_on(
    way: str, each: int
) -> None:
    ended = _run(4, "lost_rank.py", way, each)
    assert ended.returncode == 0, str(ended)
    assert not ended.survivors, str(ended)
    # The ranks exit without MPI_Finalize, which may wait for dead ranks for ever.
    for text in ("noticed (3,)", "again (3,)", "done", "left"):
        assert ended.stdout.count(text) == 3, str(ended)


@ulfm
@FULL
@pytest.mark.parametrize(("each", "seconds"), [(0, 0.1), (2, 0.13)])
def test_central_storage_goes_on_from_a_checkpoint(
    tmp_path: Path, each: int, seconds: float
) -> None:
    ended = _run(4, "central_lost.py", tmp_path, each, seconds)
    assert ended.returncode == 0, str(ended)
    assert not ended.survivors, str(ended)
    for text in ("noticed (3,)", "done"):
        assert ended.stdout.count(text) == 3, str(ended)


@ulfm
@pytest.mark.parametrize("way", ["nothing", "leave"])
def test_loss_that_is_not_handled_ends_the_job(way: str) -> None:
    ended = _run(3, "lost_rank.py", way, 0)
    assert ended.returncode is not None, str(ended)
    assert not ended.survivors, str(ended)
    assert "ends the job" in ended.stderr, str(ended)


@ulfm
@pytest.mark.parametrize(
    "places", [("exit", "worker_each"), pytest.param(("reduce", "run"), marks=FULL)]
)
def test_loss_ends_the_job_by_default_also_where_the_launcher_lets_it_live(
    places: tuple[str, ...],
) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        all_ended = pool.map(lambda p: _run(3, "leave.py", "kill", p, 1), places)
    for ended in all_ended:
        assert ended.returncode is not None, str(ended)
        assert not ended.survivors, str(ended)
        assert "ends the job" in ended.stderr, str(ended)


@ulfm
def test_ends_of_a_run_with_a_spare_rank() -> None:
    said = {
        "return": ("the result", 2, "None", 1),
        "caught": ("caught", 2, "None", 1),
        "exit": ("", 0, "None", 1),
        "swallows_after_loss": ("the result", 2, "", 0),
        "after_loss": ("the result", 2, "", 0),
    }
    with ThreadPoolExecutor(AT_ONCE) as pool:
        all_ended = list(
            pool.map(lambda way: _run(3, "elastic_ends.py", way), [*said, "error"])
        )
    for ended, (text, count, other, others) in zip(
        all_ended, said.values(), strict=False
    ):
        assert ended.returncode is not None, str(ended)
        assert not ended.survivors, str(ended)
        lines = ended.stdout.splitlines()
        assert lines.count(f"result: {text}") == count, str(ended)
        assert lines.count(f"result: {other}") == others, str(ended)
        survivors = 2 if "after_loss" in ended.command else 3
        assert lines.count("an exit function ran") == survivors, str(ended)
        assert not ended.tracebacks, str(ended)
    assert "ValueError: the cause" in all_ended[-1].stderr, str(all_ended[-1])
    assert all_ended[-1].returncode is not None
    assert not all_ended[-1].survivors


@ulfm
def test_a_loss_ends_a_job_in_groups() -> None:
    ended = _run(3, "elastic_ends.py", "groups_after_loss")
    assert ended.returncode, str(ended)
    assert not ended.survivors, str(ended)
    assert "RankLostError" in ended.stderr, str(ended)
    assert "restore a checkpoint" in ended.stderr, str(ended)


def test_one_process_needs_no_launcher(expected: dict[str, Any]) -> None:
    assert expected["step"] == 16
    assert expected["ledger"] == [2]
    assert expected["seen"] == 16 * killing.BATCH


@ulfm
@FULL
def test_random_kills() -> None:
    _fail_for(killing.campaign(3, int(time.time()), local))


@ulfm
@pytest.mark.slow
def test_hundred_random_kills(capsys: pytest.CaptureFixture[str]) -> None:
    trials = killing.campaign(100, 100, local)
    with capsys.disabled():
        print(f"\none machine: {killing.figures(trials)}")
    _fail_for(trials)
