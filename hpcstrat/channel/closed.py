"""What stands for the channel of a strategy that is closed."""

from __future__ import annotations

import contextlib

from hpcstrat.channel.call import Call
from hpcstrat.channel.places import Slots
from hpcstrat.channel.started import Started
from hpcstrat.errors import CollectiveError
from hpcstrat.topology.topology import Topology

__all__ = ["ClosedChannel"]


class ClosedChannel:
    """Stands for the channel of a strategy that is closed."""

    run_index = num_calls = 0
    thread: int | None = None
    broken, closed = "", True
    device_group = None
    started: tuple[Started, ...] = ()

    @property
    def topology(self) -> Topology:
        """No topology."""
        raise self._error("a call")

    @property
    def slots(self) -> Slots:
        """No shared memory."""
        raise self._error("a call")

    def start(self, started: Started) -> None:
        """Refuse a call.

        Not collective.

        Parameters
        ----------
        started : Started
            What was to be done.

        Raises
        ------
        CollectiveError
            Always.
        """
        raise self._error(started.call.text)

    def agree(self, call: Call, timeout_seconds: float | None = None) -> None:
        """Refuse a call.

        Not collective.

        Parameters
        ----------
        call : Call
            What was to be done.
        timeout_seconds : float, optional
            Not used.

        Raises
        ------
        CollectiveError
            Always.
        """
        raise self._error(call.text)

    def forget_done(self) -> None:
        """Keep nothing.

        Not collective.
        """

    def enter_run(self) -> None:
        """Take note of nothing.

        Not collective.
        """

    def enter_next(self) -> None:
        """Take note of nothing.

        Not collective.
        """

    def moving(self, call: Call) -> contextlib.AbstractContextManager[None]:
        """Surround nothing: there is no call.

        Not collective.

        Parameters
        ----------
        call : Call
            Not used.

        Returns
        -------
        context manager
            Does nothing.
        """
        return contextlib.nullcontext()

    def fail(self, what: str, error: BaseException) -> None:
        """Tell nobody: there is nobody left.

        Not collective.

        Parameters
        ----------
        what : str
            Not used.
        error : BaseException
            Not used.
        """

    def _error(self, what: str) -> CollectiveError:
        return CollectiveError(
            f"expected an open strategy for {what}, found one that is closed; create a "
            "new one"
        )
