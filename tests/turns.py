"""Turns of long tests: each run has all short tests, and a part of the long tests.

``HPCSTRAT_TEST_TURN=1/3 pytest`` runs the first third of the long tests, and so on.
Without the variable all tests run. CI takes turns, so that it ends soon enough to wait
for it.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable

from tests.durations import KEPT
from tests.lanes import job_of

__all__ = ["VARIABLE", "turn_of_environment", "unwanted"]

VARIABLE = "HPCSTRAT_TEST_TURN"
# Tests and jobs that take longer on a processor take turns, except these: the programs
# of tf.distribute, the job of 3 ranks, which finds most mistakes, and programs of
# others, which CI installs in one turn only.
LEAST_SECONDS = 1.0
IN_EACH_TURN = (
    "tests/conformance/",
    "tests/mpi/test_ranks.py::test_rank_tests_pass_where_they_can_fail[3-",
    "tests/docs/test_gallery.py::test_programs_of_others_compute_the_same",
)


def turn_of_environment() -> tuple[int, int] | None:
    """Return the number of the turn, from 1 on, and the number of turns.

    Returns None if the variable is not set. Raises ValueError if it is not "K/N".
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    turn, _, count = text.partition("/")
    if not (turn.isdecimal() and count.isdecimal() and 1 <= int(turn) <= int(count)):
        raise ValueError(
            f"expected K/N with 1 <= K <= N in {VARIABLE}, such as 1/3, found "
            f"{text!r}; change or unset it"
        )
    return int(turn), int(count)


def unwanted(nodeids: Iterable[str], turn: int, count: int) -> set[str]:
    """Return the ids of the long tests that have another turn.

    The tests are divided so that all turns take about the same time by
    ``durations.json``. A job of several files is divided by files.
    """
    kept: dict[str, float] = json.loads(KEPT.read_text())
    jobs = defaultdict[str, list[str]](list)
    for nodeid in nodeids:
        if not nodeid.startswith(IN_EACH_TURN):
            jobs[job_of(nodeid)].append(nodeid)
    long = list[tuple[float, str]]()
    for names in jobs.values():
        # The duration of a job is that of its first test, which waits for its start.
        seconds = sum(kept.get(name, 0.0) for name in names)
        if seconds >= LEAST_SECONDS:
            long += [(seconds / len(names), name) for name in names]
    totals, found = [0.0] * count, set[str]()
    for seconds, name in sorted(long, reverse=True):
        taken = totals.index(min(totals))
        totals[taken] += seconds
        if taken != turn - 1:
            found.add(name)
    return found
