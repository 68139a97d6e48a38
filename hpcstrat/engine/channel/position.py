"""A rank's position in the program: counts of its steps, as headers carry them.

A call left out in one step is noticed in the next, since every header says how many
steps its rank has made.
"""

from __future__ import annotations

from typing import Any

from hpcstrat.engine.channel.call_state import CallState
from hpcstrat.engine.typing import CopyCheck

__all__ = ["Position"]

# next() and a backward move the mark in headers by these; no number of runs is a
# multiple of them.
_NEXT = 0x1E3779B97F4A7C15
_BACKWARD = 0x2545F4914F6CDD1D
_MASK = (1 << 63) - 1


class Position:
    """The steps of one channel's rank; all calls are logically collective."""

    __slots__ = (
        "_state",
        "backward_index",
        "copy_check",
        "next_index",
        "run_index",
    )

    def __init__(self, state: Any = None) -> None:
        self._state = state or CallState()
        # How often this rank has entered run, has asked for a batch of any data set
        # that all replicas share, and has begun a backward of a replicated module.
        self.run_index = self.next_index = self.backward_index = 0
        # Looks at the copies of variables at each entry into run.
        self.copy_check: CopyCheck | None = None

    @property
    def run_fingerprint(self) -> int:
        """The number that headers carry in place of the counts, with ``copy_check``.

        Pending calls carry step_fingerprint alone: when their headers are compared,
        ranks may be at different points of the program.
        """
        return int(self._state.run_fingerprint)

    @run_fingerprint.setter
    def run_fingerprint(self, mark: int) -> None:
        self._state.run_fingerprint = mark

    def enter_run(self) -> None:
        """Take note that this rank enters ``run``.

        Raises CollectiveError on every rank, where copies of variables are compared
        here, and differ.
        """
        self.run_index = index = self.run_index + 1
        check, mark = self.copy_check, self.run_fingerprint
        self.run_fingerprint = (
            mark + 1 & _MASK if check is None else check.mark(index, mark)
        )

    def enter_next(self) -> None:
        """Take note that this rank asks for a batch."""
        self.next_index += 1
        self.run_fingerprint = self.run_fingerprint + _NEXT & _MASK

    def enter_backward(self) -> None:
        """Take note that this rank begins a backward of a replicated module."""
        self.backward_index += 1
        self.run_fingerprint = self.run_fingerprint + _BACKWARD & _MASK

    @property
    def steps(self) -> tuple[int, int, int]:
        """The number of this rank's entries into ``run``, ``next()`` and backwards."""
        return self.run_index, self.next_index, self.backward_index

    @steps.setter
    def steps(self, steps: tuple[int, int, int]) -> None:
        """Set them, where all ranks are at the same call."""
        self.run_index, self.next_index, self.backward_index = steps
        self.run_fingerprint = self.step_fingerprint

    @property
    def step_fingerprint(self) -> int:
        """Stands for the steps that this rank has made."""
        further = self.next_index * _NEXT + self.backward_index * _BACKWARD
        return self.run_index + further & _MASK
