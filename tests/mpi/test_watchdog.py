"""A missing rank is named, with its current activity; then the job ends."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hpcstrat.testing import launch_command
from tests.mpi.programs.started import Ended, start

AT_ONCE = 3
WARN = 1.5
LIMIT = 5.0
# Limit for a whole program on a busy machine.
TIME = 60.0
FROZEN = "is stopped"
HELD = "C code holds the interpreter lock"


def _late(
    n: int, *words: object, warn: float = WARN, limit: float = LIMIT, **env: str
) -> Ended:
    """Run stalled.py with these limits."""
    limits = {"HPCSTRAT_WARN_SECONDS": str(warn), "HPCSTRAT_LIMIT_SECONDS": str(limit)}
    return start(n, "stalled.py", *words, limit=TIME, **limits, **env)


def _together(
    calls: Sequence[tuple[Any, ...]], warn: float = WARN, limit: float = LIMIT
) -> list[Ended]:
    """Run several cases at the same time, because they mostly wait."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(
            pool.map(lambda words: _late(*words, warn=warn, limit=limit), calls)
        )


def _check(ended: Ended, late: int, *words: str) -> str:
    """Check that one report names a rank, and that the job has ended by itself."""
    reports = ended.late_reports
    assert ended.returncode, f"it did not end as it must\n{ended}"
    assert not ended.survivors, str(ended)
    assert len(reports) == 1, f"{len(reports)} reports\n{ended}"
    assert f"for rank {late} on" in reports[0], str(ended)
    for word in words:
        assert word in reports[0], f"no {word!r}\n{ended}"
    return reports[0]


WAYS = {
    "sleep": ("in evaluate (stalled.py:", "in _sleep\n", "call 4 barrier"),
    "loop": ("in count_for_ever (stalled.py:", "in main\n"),
    "stop": (FROZEN,),
    "holds": (HELD, "in hold_the_interpreter (stalled.py:", "in main\n"),
    "sums": (HELD, "in sum_in_c (stalled.py:"),
    "lets_go": ("in _let_the_interpreter_go (stalled.py:", "call 4 barrier"),
}


@pytest.mark.parametrize(
    ("n", "late", "options"),
    [(3, 1, ()), (3, 2, (1,)), pytest.param(4, 3, (2,), marks=pytest.mark.full)],
)
def test_late_rank_is_named_with_what_it_does(
    n: int, late: int, options: tuple[int, ...]
) -> None:
    """Test one worker, one rank per worker, and two ranks per worker."""
    # Layouts change the report's text about waiting ranks, not about the late rank.
    ways = {"holds": WAYS["holds"], "stop": WAYS["stop"]} if options else WAYS
    calls = [(n, how, "reduce", late, *options) for how in ways]
    for ended, words in zip(_together(calls), ways.values(), strict=True):
        report = _check(ended, late, *words)
        waiting = [rank for rank in range(n) if rank != late]
        who = f"ranks {waiting}" if n > 2 else f"rank {waiting[0]}"
        assert f"{who} have waited" in report, str(ended)
        assert re.search(
            r"reduce\(SUM\) of float32\[3\] \(stalled.py:\d+, call 5\)", report
        )
        error = rf"CollectiveError: expected all ranks .* found that ranks \[{late}\]"
        assert re.search(error, ended.stderr), str(ended)


def test_rank_that_waits_at_its_end_names_the_late_one() -> None:
    calls = [
        (2, "sleep", "exit", 1),
        (3, "holds", "exit", 0),
        (2, "stop", "exit", 1, 1),
    ]
    for ended, (n, _, _, late, *_) in zip(_together(calls), calls, strict=True):
        _check(ended, late, "at the end of the program (call 5)")
        # Launchers let a stopped process continue before they end it.
        assert ended.stdout.count("done") >= n - 1, str(ended)
        assert f"leaving the program within {LIMIT:g} s" in ended.stderr, str(ended)


def test_rank_that_comes_after_a_warning_disturbs_nobody() -> None:
    calls = [(3, "comes", "reduce", 1), (3, "comes", "reduce", 0, 1)]
    for ended in _together(calls, limit=15.0):
        assert ended.returncode == 0, str(ended)
        assert len(ended.late_reports) == 1, str(ended)
        assert ended.stdout.count("done") == 3, str(ended)


@pytest.mark.parametrize(
    "calls",
    [
        [(3, "slow", "reduce", 1), (2, "slow_in_c", "exit", 1, 1)],
        pytest.param(
            [(3, "slow_in_c", "reduce", 0), (3, "slow_in_c", "reduce", 1, 1)],
            marks=pytest.mark.full,
        ),
    ],
)
def test_expected_slowness_is_respected(calls: list[tuple[Any, ...]]) -> None:
    """Slowness is also respected in a worker of one rank, and in C code."""
    for one in _together(calls, limit=4.0):
        assert one.returncode == 0, str(one)
        assert not one.late_reports, str(one)


def test_what_comes_after_expected_slowness_is_not_excused() -> None:
    calls = [
        (2, "too_slow", "reduce", 1),
        (2, "slow_then_stuck", "reduce", 1),
        (3, "slow_then_stuck", "reduce", 0, 1),
    ]
    for ended, (_, how, _, late, *_) in zip(_together(calls), calls, strict=True):
        report = _check(ended, late, "which expected to be slow until")
        seconds = float(re.search(r"have waited (\d+) s", report)[1])  # type: ignore[index]
        assert seconds >= {"too_slow": 4, "slow_then_stuck": 3}[how], str(ended)


def test_rank_that_mpi_blocks_ends_the_job() -> None:
    calls = [(3, "sleep", "inside", 1), (2, "stop", "inside", 0, 1)]
    for ended, (_, _, _, late, *_) in zip(_together(calls), calls, strict=True):
        _check(ended, late)
        assert "because a call of MPI, or other C code, does not" in ended.stderr


@pytest.mark.parametrize(
    ("n", "each"), [(3, 1), pytest.param(4, 2, marks=pytest.mark.full)]
)
def test_rank_that_stops_in_the_midst_of_a_sum_is_named(n: int, each: int) -> None:
    """The other ranks have received parts of the rank's array, and wait for more."""
    ended = _late(n, "stop", "piece", n - 1, each)
    report = _check(ended, n - 1, FROZEN)
    assert "reduce(SUM) of float32[10485760]" in report, str(ended)
    assert f"found that ranks [{n - 1}] did not come" in ended.stderr, str(ended)


def test_exchange_that_goes_on_has_no_limit() -> None:
    calls = [(2, "at_once", "gather", 0), (2, "at_once", "gather", 0, 1)]
    for ended in _together(calls, warn=1.0, limit=2.5):
        assert ended.returncode == 0, str(ended)
        assert ended.stdout.count("done") == 2, str(ended)
        assert not ended.late_reports, str(ended)


def test_ranks_that_wait_for_each_other_in_two_ways_are_shown() -> None:
    _check(_late(2, "mpi", "reduce", 1), 1, "in _mpi (stalled.py:")


def test_limit_of_a_call_is_kept() -> None:
    ended = _late(2, "slow", "timeout", 1, limit=60.0)
    assert ended.returncode, str(ended)
    assert "within 2 s, found that ranks [1] did not come" in ended.stderr, str(ended)


def test_limit_before_the_warning_still_shows_the_stack() -> None:
    _check(
        _late(2, "sleep", "reduce", 0, warn=30, limit=4), 0, "in evaluate (stalled.py:"
    )


def test_without_watchdog_the_limit_is_kept() -> None:
    ended = _late(2, "sleep", "reduce", 1, limit=3, HPCSTRAT_WATCHDOG="0")
    assert ended.returncode, str(ended)
    assert not ended.late_reports, str(ended)
    assert "within 3 s, found that ranks [1] did not come" in ended.stderr, str(ended)


def test_rank_in_c_code_is_not_made_to_show_its_stack_where_that_is_off() -> None:
    report = _check(
        _late(3, "holds", "reduce", 1, HPCSTRAT_STACK_SIGNAL="0"), 1, "does not answer"
    )
    assert "hold_the_interpreter" not in report


@pytest.mark.slow
@pytest.mark.parametrize("hows", [("stop",), ("holds", "sums")])
def test_every_one_of_many_silent_ranks_is_named(hows: tuple[str, ...]) -> None:
    """Test 20 jobs with random numbers of ranks, places and layouts."""
    rng = random.Random(f"{hows}{launch_command(1)}")
    calls = []
    for number in range(20):
        n = rng.randint(2, 4)
        where = rng.choice(["reduce", "broadcast", "exit"])
        options = rng.choice([(), (1,), (2,)])
        calls.append((n, hows[number % len(hows)], where, rng.randrange(n), *options))
    named = 0
    seconds = []
    for ended, (_, _, _, late, *_) in zip(_together(calls), calls, strict=True):
        report = _check(ended, late)  # type: ignore[arg-type]
        named += FROZEN in report or HELD in report
        seconds.append(float(re.search(r"have waited (\d+) s", report)[1]))  # type: ignore[index]
    print(f"{named} of {len(calls)} named, after at most {max(seconds)} s")
    assert named == len(calls)
