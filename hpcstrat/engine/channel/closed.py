"""A stand-in for the channel of a closed strategy, which refuses all calls."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.call_state import CallState
from hpcstrat.engine.channel.pending_calls import PendingCalls
from hpcstrat.engine.channel.position import Position
from hpcstrat.errors import CollectiveError

__all__ = ["ClosedChannel"]


class ClosedChannel:
    """A channel whose calls all raise CollectiveError; no method is collective."""

    num_calls = told_at = 0
    broken, closed = "", True
    device_group = elsewhere = None

    def __init__(self) -> None:
        self.state = CallState()
        # ``run`` counts its steps even after the strategy is closed.
        self.position = Position(self.state)
        self.pending = PendingCalls(self)
        # This object also stands in for the channel's `Failures`.
        self.failures = self

    @property
    def topology(self) -> Any:
        """Raise CollectiveError: the communicators have been freed."""
        self.refuse(describe_call("a call"))

    rings = topology

    def refuse(self, call: Call) -> NoReturn:
        """Raise CollectiveError, because the strategy is closed."""
        raise CollectiveError(
            f"expected an open strategy for {call.text}, found one that is closed; "
            "create a new one"
        )

    def agree(self, call: Call, timeout_seconds: float | None = None) -> NoReturn:
        """Raise CollectiveError, because the strategy is closed."""
        self.refuse(call)

    def forget_done(self) -> None:
        """Do nothing, because a closed channel holds no arrays."""

    def moving(self, call: Call) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return contextlib.nullcontext()

    def fail(self, what: str, error: BaseException) -> None:
        """Do nothing, because there are no other ranks to notify."""

    def leave(self, what: str, error: BaseException, entered: int) -> None:
        """Do nothing, because there are no other ranks to notify."""
