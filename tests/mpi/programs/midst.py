"""Traps that stop or kill a rank in the midst of a large reduction between workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcstrat.engine.channel.interruptible import InterruptibleComm

__all__ = ["large", "lay_trap"]

# Number of the exchange at which the trap acts. A sum of 40 MiB has more exchanges, and
# several of them run at once.
_MIDDLE = 20


def large() -> Any:
    """Return an array of 40 MiB, which is summed in many pieces."""
    return np.ones(10 << 20, np.float32)


def lay_trap(act: Callable[[], None]) -> None:
    """Call ``act`` on this rank when it has received some parts of a sum."""
    start, number = InterruptibleComm.start, itertools.count(1)

    def start_and_act(*args: Any) -> Any:
        exchange = start(*args)
        if next(number) == _MIDDLE:
            act()
        return exchange

    patched: Any = InterruptibleComm
    patched.start = start_and_act
