"""Sections: parts of a program that all ranks leave together, with or without an error.

A strategy with ``on_error="raise"`` makes a section of each ``run``, each merged
function, and other code of the program between two calls. At the end of a section, all
ranks learn whether any rank has failed in it. Sections can be nested. A rank that fails
sends the number of sections that it is still in. The other ranks then leave their inner
sections down to this number, even if the program catches the exception, so that all
ranks are at the same point again.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.channel.disagreement import Failure
from hpcstrat.engine.channel.entries import refuse_inner
from hpcstrat.errors import CollectiveError

__all__ = ["Section"]


class Section:
    """A context manager that all ranks leave together.

    The exit is collective over ``topology.replica_comm``, and waits for late ranks up
    to ``timeout_seconds``. An exception that is not an ``Exception``, such as
    KeyboardInterrupt, is not reported to the other ranks, because it is meant to end
    the program.
    """

    __slots__ = ("_channel", "_steps", "_timeout_seconds", "_what")

    def __init__(
        self, channel: Any, what: str, timeout_seconds: float | None = None
    ) -> None:
        self._channel = channel
        self._what = what
        self._timeout_seconds = timeout_seconds
        self._steps = (0, 0, 0)

    def __enter__(self) -> None:
        """Enter the section; not collective."""
        refuse_inner(self._what)
        self._channel.failures.depth += 1
        self._steps = self._channel.position.steps

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the section, and raise the error of any rank on all ranks."""
        channel, failures = self._channel, self._channel.failures
        if channel.elsewhere is not None:
            channel.elsewhere()
        tells = error is None or isinstance(error, Exception)
        try:
            if tells and channel.pending and not failures.broken:
                # Drain before reducing ``depth``: a failure still ends this section.
                channel.pending.drain()
        finally:
            failures.depth -= 1
        failure: Failure | None = failures.leaving
        if failure is not None and failure.level > failures.depth:
            failures.leaving = None
            # The ranks may have made different numbers of steps in the section.
            channel.position.steps = self._steps
            # A refused call may have taken a place in the ring of this rank only.
            channel.rings.restart()
        if not tells:
            return
        if failure is None and error is not None:
            channel.position.steps = self._steps
            failure = failures.fail(self._what, error, leaves=True)
        elif failure is None:
            call = describe_call(f"end of {self._what}")
            try:
                channel.agree(call, self._timeout_seconds)
            except CollectiveError:
                channel.position.steps = self._steps
                raise
        if failure is not None:
            raised = failure.instead_of(error)
            if raised is not error:
                raise raised
