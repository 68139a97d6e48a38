"""``hpcstrat.testing`` reports the end of each rank, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hpcstrat import testing
from hpcstrat.testing.job import wait_until


def _five() -> int:
    return 5


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content


def _marked_processes(name: str) -> list[str]:
    """Return the processes whose environment sets a variable; empty without /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{name}=".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("n", [1, 3])
def test_run_returns_results_in_the_order_of_ranks(n: int) -> None:
    def scan(offset: int) -> tuple[int, int]:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        return comm.rank, comm.allreduce(offset) + _five()

    assert testing.run(n, scan, 10) == [(rank, 10 * n + 5) for rank in range(n)]


def test_classes_of_a_test_module_survive_the_way() -> None:
    boxes = testing.run(2, lambda box: Box(box.content + 1), Box(1))
    assert [type(box) for box in boxes] == [Box, Box]
    assert [box.content for box in boxes] == [2, 2]


def test_what_ranks_print_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    testing.run(2, lambda: print("a word"))
    assert capsys.readouterr().out.count("a word") == 2


def test_env_reaches_every_rank() -> None:
    env = {"HPCSTRAT_TEST_WORD": "word"}
    found = testing.run(2, lambda: os.environ["HPCSTRAT_TEST_WORD"], env=env)
    assert found == ["word", "word"]


def test_failure_of_one_rank_ends_the_others_and_carries_its_traceback() -> None:
    def fail_on_one() -> None:
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 1:
            raise ValueError("a broken rank")
        MPI.COMM_WORLD.Barrier()

    with pytest.raises(testing.RankFailure, match="rank 1 raised") as caught:
        testing.run(3, fail_on_one)
    assert list(caught.value.failures) == [1]
    assert "ValueError: a broken rank" in caught.value.failures[1]
    assert "in fail_on_one" in caught.value.failures[1]
    assert caught.value.returncode != 0
    assert "a broken rank" in str(caught.value)


def test_failures_of_all_ranks_are_all_carried() -> None:
    def fail() -> NoReturn:
        from mpi4py import MPI

        raise ValueError(f"rank {MPI.COMM_WORLD.rank} is broken")

    with pytest.raises(testing.RankFailure) as caught:
        testing.run(3, fail)
    for rank in range(3):
        assert f"rank {rank} is broken" in caught.value.failures[rank]


def test_sys_exit_on_one_rank_is_a_failure() -> None:
    def leave() -> None:
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 0:
            sys.exit(0)
        MPI.COMM_WORLD.Barrier()

    with pytest.raises(testing.RankFailure, match="SystemExit"):
        testing.run(2, leave)


def test_killed_rank_is_a_failure() -> None:
    def end() -> None:
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        MPI.COMM_WORLD.Barrier()

    with pytest.raises(testing.RankFailure, match="rank 1 ended without a result"):
        testing.run(2, end)


def test_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(testing.RankFailure, match="cannot pickle"):
        testing.run(1, lambda: sys.stdout.buffer)


def test_timeout_shows_where_each_rank_is_and_ends_it() -> None:
    def meet() -> None:
        from mpi4py import MPI

        def stay_away() -> None:
            time.sleep(600)

        if MPI.COMM_WORLD.rank == 1:
            # mpirun sends SIGTERM to its ranks before it is killed itself.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            stay_away()
        MPI.COMM_WORLD.Barrier()

    mark = f"HPCSTRAT_TEST_MARK_{os.getpid()}"
    with pytest.raises(testing.RankTimeout, match="stay_away") as caught:
        testing.run(2, meet, timeout=10, env={mark: "1"})
    assert "in meet" in caught.value.stacks[0]
    assert "in stay_away" in caught.value.stacks[1]
    assert wait_until(lambda: not _marked_processes(mark), 10)


def test_launch_timeout_shows_stacks_and_leaves_nothing(tmp_path: Path) -> None:
    program = tmp_path / "stay.py"
    program.write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from mpi4py import MPI\n"
        "time.sleep(600)\n"
    )
    mark = f"HPCSTRAT_TEST_MARK_{os.getpid()}"
    with pytest.raises(testing.RankTimeout) as caught:
        testing.launch(2, [sys.executable, program], timeout=8, env={mark: "1"})
    if Path("/proc").exists():
        assert f'{program}", line 4' in str(caught.value)
    assert wait_until(lambda: not _marked_processes(mark), 10)


def test_launch_returns_exit_code_and_output(tmp_path: Path) -> None:
    program = tmp_path / "leave.py"
    program.write_text(
        "import sys\n"
        "from mpi4py import MPI\n"
        "print('out', flush=True)\n"
        "print('of a rank', file=sys.stderr, flush=True)\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "MPI.COMM_WORLD.Abort(3)\n"
    )
    finished = testing.launch(2, [sys.executable, program])
    assert finished.returncode == 3
    assert finished.stdout.count("out") == 2
    # The launcher may write between the words and the end of their line.
    assert finished.stderr.count("of a rank") == 2


def test_killed_launcher_leaves_nothing_that_stops_a_later_one(tmp_path: Path) -> None:
    program = tmp_path / "kill.py"
    program.write_text(
        "import os, pathlib, signal, sys\n"
        "from mpi4py import MPI\n"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getppid()))\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"
    )
    number = tmp_path / "launcher"
    temporary = Path(tempfile.gettempdir())
    before = set(temporary.iterdir())
    finished = testing.launch(1, [sys.executable, program, number])
    assert finished.returncode != 0  # With MPICH, only the rank's parent is killed.
    left = set(temporary.glob(f"*.{number.read_text()}"))
    assert left <= before


def test_run_works_inside_an_mpi_job() -> None:
    def outer() -> list[int] | None:
        from mpi4py import MPI

        def inner() -> int:
            return int(MPI.COMM_WORLD.size)

        return testing.run(3, inner) if MPI.COMM_WORLD.rank == 0 else None

    assert testing.run(2, outer) == [[3, 3, 3], None]
