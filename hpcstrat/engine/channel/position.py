"""A rank's position in the program: counts of its steps, which headers contain.

If a rank leaves out a call in one step, all ranks notice this in the next step.
"""

from __future__ import annotations

from typing import Any

from hpcstrat.engine.channel.call_state import CallState
from hpcstrat.engine.typing import CopyCheck

__all__ = ["Position"]

# Numbers that a next() and a backward pass add to the fingerprint in headers; no
# realistic number of runs adds as much.
_NEXT = 0x1E3779B97F4A7C15
_BACKWARD = 0x2545F4914F6CDD1D
_MASK = (1 << 63) - 1


class Position:
    """One rank's step counts of a channel; all methods are logically collective."""

    __slots__ = (
        "_state",
        "backward_index",
        "copy_check",
        "next_index",
        "num_meetings",
        "run_index",
    )

    def __init__(self, state: Any = None) -> None:
        self._state = state or CallState()
        # How often this rank has entered ``run``, has requested a batch of a dataset
        # that all replicas share, and has begun a backward pass of a replicated module.
        self.run_index = self.next_index = self.backward_index = 0
        # Number of times that the ranks agreed on these counts anew, after an error.
        self.num_meetings = 0
        # Compares the copies of variables between ranks in calls of ``run``.
        self.copy_check: CopyCheck | None = None

    @property
    def run_fingerprint(self) -> int:
        """The number in headers that represents the step counts and variables' copies.

        Headers of pending calls contain ``step_fingerprint`` instead, because the ranks
        may be at different points of the program when these headers are compared.
        """
        return int(self._state.run_fingerprint)

    @run_fingerprint.setter
    def run_fingerprint(self, mark: int) -> None:
        self._state.run_fingerprint = mark

    def enter_run(self) -> None:
        """Count a call of ``run`` by this rank.

        Raises CollectiveError on every rank if copies of variables are found to differ.
        """
        self.run_index = index = self.run_index + 1
        check, mark = self.copy_check, self.run_fingerprint
        self.run_fingerprint = (
            mark + 1 & _MASK if check is None else check.mark(index, mark)
        )

    def enter_next(self) -> None:
        """Count a request of this rank for a batch."""
        self.next_index += 1
        self.run_fingerprint = self.run_fingerprint + _NEXT & _MASK

    def enter_backward(self, number: int = 1) -> None:
        """Count backward passes of a replicated module that start on this rank.

        A backward pass that this rank has left out after the forward counts, too.
        """
        self.backward_index += number
        self.run_fingerprint = self.run_fingerprint + number * _BACKWARD & _MASK

    @property
    def steps(self) -> tuple[int, int, int]:
        """The counts of this rank's runs, ``next()`` calls and backward passes."""
        return self.run_index, self.next_index, self.backward_index

    @steps.setter
    def steps(self, steps: tuple[int, int, int]) -> None:
        """Set the step counts of this rank, when all ranks are in the same call."""
        self.run_index, self.next_index, self.backward_index = steps
        self.run_fingerprint = self.step_fingerprint

    @property
    def step_fingerprint(self) -> int:
        """The number that represents this rank's step counts alone."""
        further = self.next_index * _NEXT + self.backward_index * _BACKWARD
        return self.run_index + further & _MASK
