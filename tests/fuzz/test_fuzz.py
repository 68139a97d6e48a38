"""Random programs give the results of the oracle on every rank."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from hpcstrat.errors import HpcstratError
from hpcstrat.testing.launcher import find_launcher
from tests.fuzz.driver import Outcome, run_programs
from tests.fuzz.features import GATES, features
from tests.fuzz.generate import KINDS, generate
from tests.fuzz.judge import judge
from tests.fuzz.losing import attempt
from tests.fuzz.program import Program, parse
from tests.fuzz.shrink import parts
from tests.mpi.programs.started import ulfm

NUM_SEEDS = {1: 40, 2: 25, 3: 15}


@pytest.fixture(autouse=True)
def launcher() -> str:
    """Return the path of mpirun; skip the test if there is none."""
    try:
        return find_launcher()
    except HpcstratError as exc:
        pytest.skip(str(exc))


def _programs(first: int, count: int, kind: str = "mirrored") -> list[Program]:
    """Return programs without combinations that are known to fail."""
    made, seed = [], first
    while len(made) < count:
        program = generate(seed, kind)
        if not features(program) & set(GATES):
            made.append(program)
        seed += 1
    return made


def _fail_for(programs: list[Program], n: int, outcomes: list[Outcome]) -> None:
    problems = []
    for program, outcome in zip(programs, outcomes, strict=True):
        if problem := judge(program, n, outcome):
            problems.append(f"{program}\n# on {n} ranks: {problem}")
    if problems:
        pytest.fail("\n\n".join(problems), pytrace=False)


@pytest.mark.parametrize("n", NUM_SEEDS)
def test_programs_do_what_the_oracle_says(n: int) -> None:
    # Use different programs for each number of ranks.
    programs = _programs(1000 * n, NUM_SEEDS[n])
    _fail_for(programs, n, run_programs(programs, n))


@pytest.mark.parametrize(("kind", "n"), [("groups", 3), ("served", 3), ("inside", 4)])
def test_programs_of_other_kinds_do_what_the_oracle_says(kind: str, n: int) -> None:
    programs = _programs(5000, 15, kind)
    _fail_for(programs, n, run_programs(programs, n))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_many_programs_do_what_the_oracle_says(n: int, kind: str) -> None:
    programs = _programs(100_000 * n, 1000, kind)
    _fail_for(programs, n, run_programs(programs, n))


@ulfm
@pytest.mark.parametrize("seed", [4, 5])
def test_program_that_loses_a_rank_comes_to_the_same(seed: int) -> None:
    problem = attempt(seed)
    assert not problem, problem


@ulfm
@pytest.mark.slow
def test_many_programs_that_lose_a_rank_come_to_the_same() -> None:
    problems = [problem for seed in range(100, 160) if (problem := attempt(seed))]
    assert not problems, "\n\n".join(problems)


@pytest.mark.parametrize("seed", range(1, 200, 7))
def test_listing_is_the_program(seed: int) -> None:
    program = generate(seed)
    read = parse(str(program))
    assert str(read) == str(program)
    assert [op.args for op in read.of("reduce")] == [
        {k: v for k, v in op.args.items() if v is not None}
        for op in program.of("reduce")
    ]


def _changed(seen: Any) -> bool:
    """Change the first number in a rank's results; return whether there is one."""
    if isinstance(seen, np.ndarray) and seen.size and seen.dtype.kind in "if":
        seen.reshape(-1)[0] += 1
        return bool(np.isfinite(seen.reshape(-1)[0]))
    if isinstance(seen, dict):
        return any(_changed(part) for part in seen.values())
    return isinstance(seen, list) and any(_changed(part) for part in seen)


def test_judge_sees_one_number_of_one_rank() -> None:
    programs = _programs(7, 8)
    outcomes = run_programs(programs, 2)
    _fail_for(programs, 2, outcomes)
    num_changed = 0
    for program, outcome in zip(programs, outcomes, strict=True):
        for place, seen in enumerate(outcome.seen[1]):
            wrong = copy.deepcopy(outcome)
            if seen[0] == "ok" and _changed(wrong.seen[1][place][1]):
                num_changed += 1
                assert f"operation {place}," in judge(program, 2, wrong)
    assert num_changed > 20


def test_judge_sees_an_error_of_one_rank_only() -> None:
    (program,) = _programs(3, 1)
    (outcome,) = run_programs([program], 2)
    assert judge(program, 2, outcome) == ""
    outcome.seen[0][-1] = ("raise", ("ValueError", "Exception"), "planted")
    assert "rank 0 raised ValueError: planted" in judge(program, 2, outcome)


def test_job_that_stands_still_is_ended_with_stacks() -> None:
    program = parse("strategy()\nbarrier()\nreduce(how='sum', values=[])\nhang()")
    outcomes = run_programs([program, parse("strategy()")], 2, limit_seconds=8)
    assert "no end within 8 s" in outcomes[0].failure
    assert "in _hang" in outcomes[0].failure
    assert not outcomes[1].failure


def test_shorter_programs_are_parts() -> None:
    program = generate(10)
    whole = str(program)
    shorter = list(parts(program, 1))
    assert len(shorter) >= len(program.ops) - 1
    assert all(len(str(part)) < len(whole) for part in shorter)
    assert str(program) == whole
