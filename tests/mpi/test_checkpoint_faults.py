"""A job that is killed at any moment loses no acknowledged checkpoint."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.checkpoint.file.schema import step_of
from hpcstrat.testing.job import wait_until
from tests.folders import listed
from tests.mpi.programs import save_shared
from tests.mpi.programs.save_jobs import (
    LIMIT_SECONDS,
    Kill,
    Tally,
    acknowledged,
    attempt,
    restored,
    running,
    torn,
)
from tests.mpi.programs.save_step import NEW, OLD, PLACES
from tests.mpi.programs.started import start

AT_ONCE = 2
FULL = pytest.mark.full


def _kills(folder: Path, numbers: Iterable[int], seed: int) -> tuple[list[str], Tally]:
    """Kill jobs in the same folder one after the other; return problems and a tally."""
    folder.mkdir()
    found, tally = [], Tally()
    for number in numbers:
        if wrong := attempt(folder, Kill.draw(number, seed), tally):
            found.append(wrong)
    return found, tally


def _kill_many(folder: Path, count: int) -> Tally:
    """Kill jobs in two folders at the same time; half of the saves are synchronous."""
    seed = secrets.randbits(32)
    print("seed", seed)
    half = count // 2
    parts = [range(half), range(half, count)]
    total = Tally()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = [
            pool.submit(_kills, folder / f"part{part}", numbers, seed)
            for part, numbers in enumerate(parts)
        ]
        found = [text for part in done for text in part.result()[0]]
    assert not found, "\n\n".join(found)
    for part in done:
        total.add(part.result()[1])
    return total


def test_killed_jobs_lose_no_acknowledged_checkpoint(tmp_path: Path) -> None:
    print(_kill_many(tmp_path, 6))


# Run in parts, each of which ends well before pytest's own limit.
@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_killed_jobs_lose_no_acknowledged_checkpoint(
    part: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = _kill_many(tmp_path, 20)
    with capsys.disabled():
        print(f"\npart {part}: {tally}")
    # Torn files show that some kills interrupted a save, as intended.
    assert tally.torn > 0


def _end_at(folder: Path, place: str, rank: int, how: str) -> str:
    """Kill a rank at a place of its save; return the problem as text."""
    what = f"rank {rank}, {place}, {how}"
    folder.mkdir()
    env = {"SAVE_STEP_PLACE": place, "SAVE_STEP_RANK": str(rank)}
    with running(folder, "save_step.py", how, "kill", env=env) as job:
        code = job.job.wait(LIMIT_SECONDS)
        if code is None:
            job.job.show_stacks()
        if not code or not wait_until(job.ranks_are_gone, 5):
            return f"{what}: the job ended with {code}\n{job}"
        said = str(job)
    if not (folder / "reached").exists():
        return f"{what}: not reached\n{said}"
    step, text = restored(folder)
    if step not in PLACES[place].steps or text:
        return f"{what}: step {step} is restored {text}\n{said}"
    return ""


def _end_at_all(folder: Path, cases: list[tuple[str, int, str]]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = [
            pool.submit(_end_at, folder / f"case{number}", *case)
            for number, case in enumerate(cases)
        ]
    wrong = list(filter(None, (each.result() for each in done)))
    assert not wrong, "\n\n".join(wrong)


def _cases(name: str) -> list[tuple[str, int, str]]:
    """Return the ranks and kinds of saves that reach a place."""
    place = PLACES[name]
    return [(name, rank, how) for rank in place.ranks for how in place.hows]


# Places that follow the previous place without a write in between. By default the tests
# run every fourth one of the other places.
_REPEATED = [name for name in PLACES if name.startswith("before")][1:]
_WRITTEN = [name for name in PLACES if name not in _REPEATED]


@pytest.mark.parametrize(
    "names",
    [
        _WRITTEN[::4],
        pytest.param(_WRITTEN[2::4], marks=FULL),
        pytest.param(_WRITTEN[1::2], marks=FULL),
        pytest.param(_REPEATED, marks=FULL),
    ],
    ids=["written", "later", "between", "repeated"],
)
def test_kill_at_each_step_of_a_save(names: list[str], tmp_path: Path) -> None:
    """Kill one rank, in one kind of save, at each of the places."""
    cases = [_cases(name) for name in names]
    _end_at_all(tmp_path, [c[i % len(c)] for i, c in enumerate(cases)])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wait", "go"])
def test_kill_of_each_rank_at_each_step_of_a_save(how: str, tmp_path: Path) -> None:
    cases = [case for name in PLACES for case in _cases(name) if case[2] == how]
    _end_at_all(tmp_path, cases)


def _stop_at(folder: Path, n: int, rank: int, how: str) -> None:
    """Stop a rank that begins to write; the other ranks must not wait for ever."""
    folder.mkdir()
    # At a later place of a synchronous save, the comparison may block the other ranks
    # in MPI itself, where they cannot raise an error.
    place = {"wait": "before open 0", "go": "amid write block 0"}[how]
    env = {
        "SAVE_STEP_PLACE": place,
        "SAVE_STEP_RANK": str(rank),
        "HPCSTRAT_WARN_SECONDS": "1.5",
        "HPCSTRAT_LIMIT_SECONDS": "9",
    }
    ended = start(n, "save_step.py", folder, how, "stop", limit=LIMIT_SECONDS, **env)
    assert (folder / "reached").exists(), ended
    assert ended.returncode, ended
    assert not ended.survivors, ended
    reports = [line for line in ended.stderr.splitlines() if " waited " in line]
    assert len(reports) == 1, ended
    assert f"for rank {rank} on" in reports[0], ended
    assert "is stopped" in ended.stderr, ended
    # Each waiting rank raises the same error, and no other. The stopped rank does so,
    # too, if the launcher lets it continue before ending it.
    assert 1 <= len(ended.tracebacks) <= n, ended
    for traceback in ended.tracebacks:
        assert "save_step.py" in traceback, ended
        # The error may be that of another rank, which has notified this rank.
        assert "CollectiveError: expected " in traceback, ended
        assert f"found that ranks [{rank}] did not come" in traceback, ended
    if n == 2 and rank > 0:
        # Replica 0 removes the unfinished file, unless the job is ended before.
        assert not torn(folder), ended
    step, wrong = restored(folder)
    assert not wrong, ended
    # Launchers let a stopped process continue before they end it. The threads of
    # replica 0 may then find that all ranks have written.
    assert step == OLD or (step == NEW and rank == 0 and how == "go"), ended


@pytest.mark.parametrize("how", ["wait", "go"])
def test_rank_that_is_stopped_in_a_save_is_named_and_nothing_is_torn(
    how: str, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = [
            pool.submit(_stop_at, tmp_path / str(n), n, rank, how)
            for n, rank in ((3, 0), (2, 1))
        ]
    for each in done:
        each.result()


def _jobs_of_all(folder: Path) -> dict[int, int]:
    """Restore every checkpoint, bit for bit; return the job that wrote each step."""
    objects = save_shared.make_objects()
    manager = hs.CheckpointManager(folder / "checkpoints", **objects)
    found = {}
    for path in manager.checkpoints:
        step = manager.restore(path)
        assert step == step_of(path)
        found[step] = int(objects["job"].numpy())
        wanted = save_shared.large_value(found[step], step)
        assert objects["large"].numpy().tobytes() == wanted.tobytes(), path
    return found


def _check_refusals(folder: Path, job: int) -> int:
    """Check that each refusal has a clear text; return the number of refusals."""
    refused = (folder / f"refused-{job}").read_text().splitlines()
    for text in refused:
        assert "expected" in text, text
        assert "overwrite=True" in text, text
    return len(refused)


def _start_together(folder: Path) -> None:
    ready = [folder / f"ready-{job}" for job in range(2)]
    assert wait_until(lambda: all(map(Path.exists, ready)), LIMIT_SECONDS)
    for job in range(2):
        (folder / f"start-{job}").touch()


@pytest.mark.parametrize(
    "hows",
    [
        ("wait", "go"),
        pytest.param(("wait", "wait"), marks=FULL),
        pytest.param(("go", "go"), marks=FULL),
    ],
)
def test_two_jobs_that_save_the_same_steps_in_one_folder(
    hows: tuple[str, str], tmp_path: Path
) -> None:
    count = 20
    with (
        running(tmp_path, "save_shared.py", 0, hows[0], count, "same") as one,
        running(tmp_path, "save_shared.py", 1, hows[1], count, "same") as two,
    ):
        _start_together(tmp_path)
        for each in (one, two):
            assert each.job.wait(LIMIT_SECONDS) == 0, f"{one}\n{two}"
    told = [acknowledged(tmp_path, f"acknowledged-{job}") for job in range(2)]
    for job in range(2):
        assert len(told[job]) + _check_refusals(tmp_path, job) == count
    print("acknowledged to each:", *map(len, told))
    # Each file belongs to the job that acknowledged its step, and to no other job.
    wanted = {step: job for job in range(2) for step in told[job]}
    assert len(wanted) == len(told[0]) + len(told[1])
    assert _jobs_of_all(tmp_path) == wanted
    assert not torn(tmp_path)


@pytest.mark.parametrize("how", [pytest.param("wait", marks=FULL), "go"])
def test_new_job_beside_writers_that_outlived_their_launcher(
    how: str, tmp_path: Path
) -> None:
    words = "save_shared.py", 1, how, 10, "next"
    with (
        running(tmp_path, "save_shared.py", 0, how, 100_000, "next") as old,
        running(tmp_path, *words) as new,
    ):
        # Start the new job first, because the old ranks may not live for long.
        assert wait_until((tmp_path / "ready-1").exists, LIMIT_SECONDS), new
        (tmp_path / "start-0").touch()
        saved = tmp_path / "acknowledged-0"

        def in_a_save() -> bool:
            return saved.exists() and saved.stat().st_size > 0 and bool(torn(tmp_path))

        assert wait_until(in_a_save, LIMIT_SECONDS), old
        old.kill_launcher()
        before = len(acknowledged(tmp_path, "acknowledged-0"))
        (tmp_path / "start-1").touch()
        assert new.job.wait(LIMIT_SECONDS) == 0, new
    since = len(acknowledged(tmp_path, "acknowledged-0")) - before
    print(f"the old ranks have saved {since} times since, {how}")
    told = [set(acknowledged(tmp_path, f"acknowledged-{job}")) for job in range(2)]
    found = _jobs_of_all(tmp_path)
    of = [{step for step in found if found[step] == job} for job in range(2)]
    assert of[1] == told[1]
    assert len(told[1]) == 10
    assert of[0] >= told[0]
    # One save may have been published at the very end, without an acknowledgment.
    assert len(of[0] - told[0]) <= 1
    print(_check_refusals(tmp_path, 1), "saves of the new ones were refused")
    # The manager of this process has removed the unfinished files of the old ranks.
    assert not torn(tmp_path)


@pytest.mark.parametrize("n", [pytest.param(1, marks=FULL), 2])
@pytest.mark.parametrize("end", ["plain", "exit", "raise"])
def test_save_under_way_at_the_end_is_finished_or_dropped(
    end: str, n: int, tmp_path: Path
) -> None:
    ended = start(n, "save_and_leave.py", tmp_path, end, limit=90)
    assert ended.returncode == {"plain": 0, "exit": 3, "raise": 1}[end], ended
    assert not ended.survivors, ended
    names = sorted(listed(tmp_path))
    if end == "raise":
        # The job ends at once, with the older checkpoint and perhaps a torn file.
        assert "ckpt-0000000001.h5" in names, ended
    else:
        assert names == [f"ckpt-{step:010d}.h5" for step in (1, 2)], ended
    x = hs.Variable(np.zeros(1 << 20))
    step = hs.CheckpointManager(tmp_path, x=x).restore()
    assert (x.numpy() == step).all()
    assert not [name for name in listed(tmp_path) if name.startswith(".")]
