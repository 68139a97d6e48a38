"""Tells all ranks of one rank's problem, so that all raise or none."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from hpcstrat.engine.channel.waitable import Message, Waitable

__all__ = ["error_on_any_rank"]

_TEXT_BYTES = 512


def error_on_any_rank(
    mpi: Any, comm: Any, problem: str
) -> Generator[Waitable, None, str]:
    """Find out whether any rank has a problem, and which.

    Collective over ``comm``. ``problem`` is this rank's, empty where there is none;
    returned is that of the last rank that has one, the same on all.
    """
    last = np.array([comm.rank if problem else -1], np.int64)
    yield Message(comm.Iallreduce(mpi.IN_PLACE, last, op=mpi.MAX))
    if last[0] < 0:
        return ""
    text = np.zeros(_TEXT_BYTES, np.uint8)
    own = problem.encode(errors="replace")[:_TEXT_BYTES]
    if last[0] == comm.rank:
        text[: len(own)] = np.frombuffer(own, np.uint8)
    yield Message(comm.Ibcast(text, int(last[0])))
    return text.tobytes().rstrip(b"\0").decode(errors="replace")
