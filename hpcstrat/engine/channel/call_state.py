"""The state of a channel's calls that the compiled kernel reads and writes itself.

The kernel makes a repeated call alone while nothing is out of the ordinary. Whatever
changes that, such as a failure, a signal, a started call or a timeline, raises
``attention``: calls then take the usual way, where all of it is looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

__all__ = ["CallState", "Watched"]

_Value = TypeVar("_Value")


class CallState:
    """The state where there is no kernel, which has the same attributes."""

    def __init__(self) -> None:
        # Whether calls take the usual way, see `Channel.may_repeat`.
        self.attention = True
        # Number of headers so far; the same on all ranks at the same point.
        self.num_calls = 0
        # The thread that is in a call, 0 for none, and the name of the outermost call,
        # see hpcstrat.engine.channel.entries.
        self.thread = 0
        self.what: str | None = None
        # The last call to which all ranks have come.
        self.last_call: Any = None
        # Stands in headers for the steps that the rank has made.
        self.run_fingerprint = 0
        # Number of looks that the kernel makes before it comes back.
        self.looks = 0
        # Where the next place in the rings begins.
        self.next = 0


class Watched(Generic[_Value]):
    """An attribute of an object with a ``state``: what is true raises ``attention``.

    The value is stored first. `Channel.may_repeat` lowers the flag first, and then
    looks at the values. So no order of the two, whichever thread or signal handler sets
    the attribute, leaves a value that has not been looked at behind a lowered flag.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        """Take note of the attribute's name."""
        self._name = name

    if TYPE_CHECKING:
        # Reading it costs no call: it lies among the attributes of the object.
        def __get__(self, owner: Any, kind: type | None = None) -> _Value: ...

    def __set__(self, owner: Any, value: _Value) -> None:
        """Store a value, then raise the flag."""
        vars(owner)[self._name] = value
        if value:
            owner.state.attention = True
