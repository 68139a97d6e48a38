"""The state of a channel's calls that the compiled kernel reads and writes itself.

In the ordinary state, the kernel makes a repeated call without Python code. A failure,
a signal, a started call or a timeline sets the flag ``attention``. While the flag is
set, Python code makes the calls, because the kernel cannot handle these cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

__all__ = ["CallState", "Watched"]

_Value = TypeVar("_Value")


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
        # Number in headers that represents the steps that the rank has made.
        self.run_fingerprint = 0
        # How often the kernel looks for the other ranks' headers before it returns.
        self.looks = 0
        # Offset in bytes at which the next place in the rings begins.
        self.next = 0


class Watched(Generic[_Value]):
    """An attribute that sets ``state.attention`` when it is set to a true value.

    The value is stored before the flag is set, and `Channel.may_repeat` clears the flag
    before it reads the values. So if a thread or a signal handler sets the attribute
    meanwhile, either `may_repeat` reads the new value, or the flag stays set.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        """Store the attribute's name."""
        self._name = name

    if TYPE_CHECKING:
        # Only for type checkers: at run time, a read uses the object's ``__dict__``.
        def __get__(self, owner: Any, kind: type | None = None) -> _Value: ...

    def __set__(self, owner: Any, value: _Value) -> None:
        """Store a value, then set ``attention`` if the value is true."""
        vars(owner)[self._name] = value
        if value:
            owner.state.attention = True
