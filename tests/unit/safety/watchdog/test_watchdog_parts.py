"""Status pages, stacks and reports of the watchdog."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcstrat.engine.topology.topology import STATUS_BYTES
from hpcstrat.safety.watchdog.late_ranks import LateRank, LateReport, some_ranks
from hpcstrat.safety.watchdog.pages import STATUS_START, WAITS, Page, Status
from hpcstrat.safety.watchdog.stacks import Process, Stacks, look_at, own_stacks

REPOSITORY = Path(__file__).parents[4]
HELD = """
import ctypes, os, sys
from hpcstrat.safety.watchdog.stacks import prepare
def hold():
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
own = prepare(9)
print(own.pid, own.start, own.main, own.signal, own.handle, flush=True)
hold()
"""


def _page() -> tuple[Page, bytearray]:
    memory = bytearray(STATUS_BYTES - STATUS_START)
    return Page(memoryview(memory)), memory


def test_page_gives_what_was_written() -> None:
    page, _ = _page()
    assert page.read() is None
    status = Status(1.5, 812, WAITS, 1.0, 3.0, 0.5, 0.4, 0.3, 0.25, -math.inf)
    page.write(status)
    assert page.read() == status
    status.text = {"stacks": ["", "evaluate (train.py:52)", "x" * 4000], "at": 1.0}
    page.write(status)
    assert page.read(with_text=True) == status


def test_torn_page_is_not_taken_for_complete() -> None:
    page, memory = _page()
    page.write(Status(1.0, 7, text={"at": 1.0}))
    for place in range(0, 92, 5):
        memory[place] ^= 1
        assert page.read() is None
        memory[place] ^= 1
    memory[128] ^= 1
    torn = page.read(with_text=True)
    assert torn is not None
    assert torn.sequence == 7
    assert torn.text == {}


def test_text_beyond_the_page_is_left_out() -> None:
    page, _ = _page()
    page.write(Status(1.0, 7, text={"stacks": "x" * 9000}))
    found = page.read(with_text=True)
    assert found is not None
    assert found.text == {}


def test_own_stacks_show_other_threads_and_not_the_caller() -> None:
    found = []

    def look() -> None:
        found.append(own_stacks())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found[0].text.startswith("  main thread (most recent call first):\n")
    assert re.search(r"in test_own_stacks_show_other_threads_and", found[0].text)
    assert "in look\n" not in found[0].text
    assert found[0].where


@pytest.fixture
def held() -> Iterator[Process]:
    """Return a process in C code that holds the interpreter lock (GIL)."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    child = subprocess.Popen(
        [sys.executable, "-c", HELD],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert child.stdout is not None
        yield Process(*map(int, child.stdout.readline().split()))
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_process_in_c_code_shows_its_stack_again_and_again(held: Process) -> None:
    time.sleep(0.5)
    for _ in range(3):
        stacks = look_at(held)
        assert "holds the interpreter lock" in stacks.words
        assert stacks.where == "hold (<string>:5)"
        assert 'File "<string>", line 8 in <module>' in stacks.text


def test_stopped_process_is_told_from_one_that_has_ended(held: Process) -> None:
    os.kill(held.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while "is stopped" not in look_at(held).words:
        assert time.monotonic() < deadline
    os.kill(held.pid, signal.SIGKILL)
    while look_at(held).words != "whose process has ended":
        assert time.monotonic() < deadline


def test_another_process_of_the_same_number_gets_no_signal(held: Process) -> None:
    other = Process(held.pid, held.start + 1, held.main, held.signal, held.handle)
    assert look_at(other) == Stacks("whose process has ended")


def test_process_without_a_handler_gets_no_signal(held: Process) -> None:
    """The signal's default action would end that process."""
    unused = signal.SIGRTMIN + 11
    other = Process(held.pid, held.start, held.main, unused, held.handle)
    assert look_at(other).words == "which does not answer"
    os.kill(held.pid, 0)


def test_signal_that_is_in_use_is_refused() -> None:
    code = (
        "import signal\n"
        "from hpcstrat.safety.watchdog.stacks import prepare\n"
        "signal.signal(signal.SIGRTMIN + 9, lambda *_: print('own'))\n"
        "assert prepare(9).signal == 0\n"
        "signal.raise_signal(signal.SIGRTMIN + 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.stdout == "own\n"
    assert "HPCSTRAT_STACK_SIGNAL" in done.stderr


def test_report_groups_equal_stacks() -> None:
    same = Stacks("", "evaluate (train.py:52)", '  main thread:\n    File "train.py"')
    late = [
        LateRank(1, "node03", same, "call 811 barrier", 61.0),
        LateRank(2, "node03", Stacks("which is stopped"), is_slow=True, slow_left=-3.0),
        LateRank(3, "node04", same),
    ]
    place = "in all_reduce(SUM) of float32[3] (train.py:41, call 812)"
    text = str(LateReport([0], 60.2, place, late, 5))
    assert text == (
        "rank 0 has waited 60 s in all_reduce(SUM) of float32[3] (train.py:41, call "
        "812) for rank 1 on node03, in evaluate (train.py:52), whose last call was "
        "call 811 barrier, 61 s ago; rank 2 on node03, which is stopped, which "
        "expected to be slow until 3 s ago; rank 3 on node04, in evaluate "
        "(train.py:52); and 2 more ranks\n"
        'stack of ranks [1, 3]:\n  main thread:\n    File "train.py"'
    )


def test_many_ranks_are_shortened() -> None:
    assert some_ranks([4]) == "rank 4"
    assert some_ranks(list(range(1000))).endswith("14, 15] and 984 more")
