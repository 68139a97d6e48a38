"""Parts of a program that all ranks leave together, with or without an error.

A strategy with ``on_error="raise"`` makes a section of each ``run``, each merged
function, and other code of the program between two calls. At its end all ranks agree on
whether it went well on every one of them. Sections nest. A rank that fails tells how
many sections it is still in: the others leave theirs down to that number, whatever the
program catches on the way, and then all ranks are at the same point again.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.channel.disagreement import Failure
from hpcstrat.errors import CollectiveError

__all__ = ["Section"]


class Section:
    """A context manager that all ranks leave together.

    Leaving it is collective over ``topology.replica_comm``, and waits
    ``timeout_seconds`` for late ranks. An exception that is no ``Exception``, such as
    KeyboardInterrupt, is not told to the others: it is meant to end the program.
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
        """Go into the section; not collective."""
        self._channel.failures.depth += 1
        self._steps = self._channel.position.steps

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise the error of any rank on all of them."""
        channel, failures = self._channel, self._channel.failures
        if channel.elsewhere is not None:
            channel.elsewhere()
        tells = error is None or isinstance(error, Exception)
        try:
            if tells and channel.pending and not failures.broken:
                # Drain here, while a failure of other ranks still ends this section.
                channel.pending.drain()
        finally:
            failures.depth -= 1
        failure: Failure | None = failures.leaving
        if failure is not None and failure.level > failures.depth:
            failures.leaving = None
            # Steps made within count no longer: ranks leave from different points.
            channel.position.steps = self._steps
            # A call that was refused meanwhile may have taken a place.
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
