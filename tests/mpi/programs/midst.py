"""A rank that dies, stops or fails amid a large reduction between workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcstrat.engine.channel.interruptible import InterruptibleComm

__all__ = ["large", "lay_trap"]

# Exchanges of parts: of 40 MiB there are more, and several are under way at once.
_MIDDLE = 20


def large() -> Any:
    """Return an array whose sum takes many pieces: of 40 MiB."""
    return np.ones(10 << 20, np.float32)


def lay_trap(act: Callable[[], None]) -> None:
    """Let this rank act once parts of a sum have come, and others are on their way."""
    start, number = InterruptibleComm.start, itertools.count(1)

    def start_and_act(*args: Any) -> Any:
        exchange = start(*args)
        if next(number) == _MIDDLE:
            act()
        return exchange

    patched: Any = InterruptibleComm
    patched.start = start_and_act
