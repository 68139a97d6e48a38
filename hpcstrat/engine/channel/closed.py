"""A stand-in for the channel of a strategy that is closed."""

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
    """Refuses the calls of a channel by CollectiveError; nothing is collective."""

    num_calls = told_at = 0
    broken, closed = "", True
    device_group = elsewhere = None

    def __init__(self) -> None:
        self.state = CallState()
        # ``run`` counts its steps also where nobody compares them.
        self.position = Position(self.state)
        self.pending = PendingCalls(self)
        # This object refuses the calls of the channel's failures, too.
        self.failures = self

    @property
    def topology(self) -> Any:
        """Refuse: the communicators are gone."""
        self.refuse(describe_call("a call"))

    rings = topology

    def refuse(self, call: Call) -> NoReturn:
        """Refuse a call."""
        raise CollectiveError(
            f"expected an open strategy for {call.text}, found one that is closed; "
            "create a new one"
        )

    def agree(self, call: Call, timeout_seconds: float | None = None) -> NoReturn:
        """Refuse a call."""
        self.refuse(call)

    def forget_done(self) -> None:
        """Keep nothing."""

    def moving(self, call: Call) -> contextlib.AbstractContextManager[None]:
        """Surround nothing: there is no call."""
        return contextlib.nullcontext()

    def fail(self, what: str, error: BaseException) -> None:
        """Tell nobody: there is nobody left."""

    def leave(self, what: str, error: BaseException, entered: int) -> None:
        """Tell nobody: there is nobody left."""
