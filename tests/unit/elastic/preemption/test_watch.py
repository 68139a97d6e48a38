"""Notices of preemption, and the ranks that receive them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

import hpcstrat as hs
from hpcstrat.elastic.preemption.preemption_watch import PreemptionWatch
from hpcstrat.engine.logs import get_logger

FAR = 10**10


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"signals": "SIGKILL"}, "can be caught.*SIGKILL"),
        ({"signals": ["SIGNONE"]}, "SIGNONE"),
        ({"grace_period": -1.0}, "grace_period of 0 or more seconds, found -1.0"),
        ({"job_end": "noon"}, "'scheduler' or None, found 'noon'"),
        ({"exit_fn": 7}, "a function as exit_fn, found 7"),
    ],
)
def test_what_cannot_be_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hs.TerminationConfig(**given)


def test_signals_are_told_and_given_back() -> None:
    told: list[str] = []
    before = signal.getsignal(signal.SIGUSR1)
    config = hs.TerminationConfig(signals=("SIGUSR1",), job_end=None)
    watch = PreemptionWatch(config, told.append, lambda: 0.0)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told == ["SIGUSR1"]
    watch.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_signals_are_those_by_which_the_scheduler_warns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert hs.TerminationConfig().signals == (signal.SIGTERM, signal.SIGUSR1)
    monkeypatch.setenv("LSB_JOBID", "7")
    assert signal.SIGUSR2 in (hs.TerminationConfig().signals or ())
    assert hs.TerminationConfig(signals="SIGUSR1").signals == (signal.SIGUSR1,)


def _wait_for(told: list[str]) -> bool:
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(told)


def test_the_end_that_the_scheduler_tells_is_heeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "hpcstrat.elastic.preemption.preemption_watch._POLL_SECONDS", 0.05
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    config = hs.TerminationConfig(signals=())
    for end, expected in ((int(time.time()) + 100, True), (FAR, False)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(end))
        told: list[str] = []
        watch = PreemptionWatch(config, told.append, lambda: 200.0, asks=True)
        if expected:
            assert _wait_for(told)
        else:
            time.sleep(0.3)
            assert not told
        watch.close()


def test_one_rank_asks_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for job_end in ("scheduler", "slurm", None):
        config = hs.TerminationConfig(signals=(), job_end=job_end)
        for asks in (True, False):
            watch = PreemptionWatch(config, print, lambda: 0.0, asks=asks)
            assert (watch._thread is not None) == (asks and job_end is not None)
            watch.close()


def test_a_function_that_fails_is_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    said: list[str] = []
    monkeypatch.setattr(
        get_logger("preemption"),
        "warning",
        lambda text, *words: said.append(text % words),
    )
    calls: list[int] = []

    def fail() -> bool:
        calls.append(0)
        if len(calls) == 1:
            raise OSError("no answer")
        return True

    watch = PreemptionWatch(
        hs.TerminationConfig(fail, job_end=None), told.append, lambda: 0.0
    )
    limit = time.monotonic() + 30
    while not told and time.monotonic() < limit:
        time.sleep(0.05)
    watch.close()
    assert told == ["termination_watcher_fn"]
    assert "raised OSError: no answer" in said[0]


def test_a_forked_child_dies_of_the_signal() -> None:
    """Workers of data loaders must die of SIGTERM, by which their parent ends them."""
    program = (
        "import os, signal, time\n"
        "import hpcstrat as hs\n"
        "from hpcstrat.elastic.preemption.preemption_watch import PreemptionWatch\n"
        "PreemptionWatch(hs.TerminationConfig(job_end=None), print, lambda: 0.0)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    time.sleep(30)\n"
        "    os._exit(0)\n"
        "time.sleep(0.2)\n"
        "os.kill(child, signal.SIGTERM)\n"
        "print(os.WTERMSIG(os.waitpid(child, 0)[1]))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == str(int(signal.SIGTERM)), done.stderr
