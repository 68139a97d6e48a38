"""A rank on another host that does not arrive is named, with its activity."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpcstrat import testing
from hpcstrat.testing.job import wait_until
from tests.cluster.hosts import Hosts
from tests.mpi.programs.started import PROGRAMS, Ended, run_command

LIMITS = {"HPCSTRAT_WARN_SECONDS": "2", "HPCSTRAT_LIMIT_SECONDS": "12"}


def _run(launch: Sequence[str], how: str, where: str, late: int) -> Ended:
    program = [sys.executable, str(PROGRAMS / "stalled.py"), how, where, str(late)]
    return run_command([*launch, *program], f"{how} {where} {late}", 60, LIMITS)


def _report(ended: Ended) -> str:
    assert ended.returncode, str(ended)
    assert not ended.survivors, str(ended)
    assert len(ended.late_reports) == 1, str(ended)
    return ended.late_reports[0]


def test_silent_rank_of_another_host_is_named(hosts: Hosts) -> None:
    """Rank 3 is on the second host with rank 2, which reports about rank 3."""
    launch = testing.launch_command(4, hosts.launcher((2, 2)))
    words = {
        "sleep": "in evaluate (stalled.py:",
        "stop": "which is stopped",
        "holds": "C code holds the interpreter lock",
    }
    # Run the jobs at the same time, because they mostly wait.
    with ThreadPoolExecutor(len(words)) as pool:
        runs = [pool.submit(_run, launch, how, "reduce", 3) for how in words]
    for run, text in zip(runs, words.values(), strict=True):
        ended = run.result()
        report = _report(ended)
        assert "WARNING: ranks [0, 1, 2] have waited" in report, str(ended)
        assert "for rank 3 on node2, " in report, str(ended)
        assert text in report, str(ended)
        assert "ranks [3] did not come" in ended.stderr, str(ended)


def test_silent_rank_that_is_alone_on_its_host(hosts: Hosts) -> None:
    """No other rank can inspect it, but the report has its rank and last call."""
    launch = testing.launch_command(3, hosts.launcher((2, 1)))
    with ThreadPoolExecutor(2) as pool:
        stopped = pool.submit(_run, launch, "stop", "reduce", 2)
        slow = pool.submit(_run, launch, "slow_in_c", "reduce", 2)
    report = _report(stopped.result())
    assert "for rank 2 on node2, which " in report, str(stopped.result())
    assert slow.result().returncode == 0, str(slow.result())
    assert "waited" not in slow.result().stderr, str(slow.result())


def test_rank_that_does_not_come_to_the_start_is_named_by_its_neighbor(
    hosts: Hosts,
) -> None:
    """A host whose ranks are all there reports nothing, or that others are unknown."""
    launch = testing.launch_command(4, hosts.launcher((2, 2)))
    program = [sys.executable, str(PROGRAMS / "starting.py"), "sleeps"]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda when: run_command([*launch, *program, when, "3"], when, 60, LIMITS),
            ("first", "mpi"),
        )
    for ended in (first, second):
        assert ended.returncode, str(ended)
        assert not ended.survivors, str(ended)
        words = (
            r"rank 2 has waited \d+ s in creation .* for rank 3 on node2, in evaluate"
        )
        assert re.search(words, ended.stderr), str(ended)
        assert (
            "rank 2 on another host, about which this host has no information"
            in ended.stderr
        )
        assert "rank 1 has waited" not in ended.stderr, str(ended)


@pytest.mark.full
@pytest.mark.parametrize("how", ["stop", "cut"])
def test_host_that_is_silent_in_the_midst_of_a_sum_is_named(
    make_hosts: Callable[..., Hosts], how: str
) -> None:
    """The silent host is frozen or disconnected; neither host can inspect the other."""
    own = make_hosts(2)
    launch = testing.launch_command(2, own.launcher((1, 1)))

    def ranks() -> list[str]:
        words = own.processes().values()
        return [w for w in words if w.startswith(sys.executable)]

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(_run, launch, how, "piece", 1)
        assert wait_until(lambda: len(ranks()) == 2, 30)
        # Each rank exits by itself. The launcher may wait for an unreachable host.
        assert wait_until(lambda: not ranks(), 50), ranks()
        ended = run.result()
    assert ended.returncode or how == "cut", str(ended)
    assert "rank 0 has waited" in ended.stderr, str(ended)
    assert "for rank 1 on node2, " in ended.stderr, str(ended)
    assert "ranks [1] did not come" in ended.stderr, str(ended)
    assert wait_until(lambda: not own.processes(), 30), own.processes()
