"""The state of a channel's calls, and a rank's counts of the program's steps.

In the ordinary state, the compiled kernel makes a repeated call without Python code. A
failure, a signal, a started call or a timeline sets the flag ``attention``. While the
flag is set, Python code makes the calls, because the kernel cannot handle these cases.

Headers contain the counts of steps: if a rank leaves out a call in one step, all ranks
notice this in the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hpcstrat.engine.typing import CopyCheck

__all__ = ["CallState", "Position", "Watched"]

_Value = TypeVar("_Value")

# Numbers that a next() and a backward pass add to the fingerprint in headers; no
# realistic number of runs adds as much.
_NEXT = 0x1E3779B97F4A7C15
_BACKWARD = 0x2545F4914F6CDD1D
_MASK = (1 << 63) - 1


class CallState:
    """Stands in for a kernel, with the attributes that store the state of calls."""

    def __init__(self) -> None:
        # True if calls are made by Python code, see `Channel.may_repeat`.
        self.attention = True
        # Number of headers so far; the same on all ranks at the same point.
        self.num_calls = 0
        # The ID of the thread that is in a call, or 0, and the name of the outermost
        # call, see hpcstrat.engine.channel.entries.
        self.thread = 0
        self.what: str | None = None
        # The last call for which the headers of all ranks have arrived.
        self.last_call: Any = None
        # The number in headers that represents the step counts and variables' copies.
        self.run_fingerprint = 0
        # How often the kernel looks for the other ranks' headers before it returns.
        self.looks = 0
        # True if the kernel offers its core to other processes between its looks.
        self.yields = False
        # Offset in bytes at which the next place in the rings begins.
        self.next = 0


class Watched(Generic[_Value]):
    """An attribute that sets ``state.attention`` when it is set to a true value.

    The value is stored before the flag is set, and `Channel.may_repeat` clears the flag
    before it reads the values. So if a thread or a signal handler sets the attribute
    meanwhile, either `may_repeat` reads the new value, or the flag stays set.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    if TYPE_CHECKING:
        # Only for type checkers: at run time, a read uses the object's ``__dict__``.
        def __get__(self, owner: Any, kind: type | None = None) -> _Value: ...

    def __set__(self, owner: Any, value: _Value) -> None:
        vars(owner)[self._name] = value
        if value:
            owner.state.attention = True


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
        # This rank counts its calls of ``run``, its requests of batches of a dataset
        # that all replicas share, and its backward passes of replicated modules.
        self.run_index = self.next_index = self.backward_index = 0
        # Number of times that the ranks agreed on these counts anew, after an error.
        self.num_meetings = 0
        # Compares the copies of variables between ranks in calls of ``run``.
        self.copy_check: CopyCheck | None = None

    def enter_run(self) -> None:
        """Count a call of ``run`` by this rank.

        Raises CollectiveError on every rank if copies of variables are found to differ.
        """
        self.run_index = index = self.run_index + 1
        check, state = self.copy_check, self._state
        mark = state.run_fingerprint
        state.run_fingerprint = (
            mark + 1 & _MASK if check is None else check.mark(index, mark)
        )

    def enter_next(self) -> None:
        """Count a request of this rank for a batch."""
        self.next_index += 1
        self._add(_NEXT)

    def enter_backward(self, number: int = 1) -> None:
        """Count backward passes of a replicated module that start on this rank.

        A backward pass that this rank has left out after the forward counts, too.
        """
        self.backward_index += number
        self._add(number * _BACKWARD)

    def _add(self, number: int) -> None:
        state = self._state
        state.run_fingerprint = state.run_fingerprint + number & _MASK

    @property
    def steps(self) -> tuple[int, int, int]:
        """The counts of this rank's runs, ``next()`` calls and backward passes."""
        return self.run_index, self.next_index, self.backward_index

    @steps.setter
    def steps(self, steps: tuple[int, int, int]) -> None:
        """Set the step counts of this rank, when all ranks are in the same call."""
        self.run_index, self.next_index, self.backward_index = steps
        self._state.run_fingerprint = self.step_fingerprint

    @property
    def step_fingerprint(self) -> int:
        """The number that represents this rank's step counts alone.

        Headers of pending calls contain it instead of ``run_fingerprint``, because the
        ranks may be at different points of the program when these are compared.
        """
        further = self.next_index * _NEXT + self.backward_index * _BACKWARD
        return self.run_index + further & _MASK
