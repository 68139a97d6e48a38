"""Parts of a program that all ranks leave together, with or without an error.

A strategy with ``on_error="raise"`` makes a section of each ``run``, of each merged
function, and of other code of the program between two calls. At its end all ranks
agree on whether it went well on every one of them. Sections nest. A rank that fails
tells how many sections it is still in: the others leave as many more as they are in,
whatever the program catches on the way, and then all ranks are at the same point again.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.channel.disagreement import (
    Announcement,
    class_names,
    common_class,
    origin,
)
from hpcstrat.errors import CollectiveError

__all__ = ["Failure", "Section", "Sections"]


class Failure:
    """A failure, or calls that differ, as all ranks know them.

    ``error`` is raised on ranks that have no error of their own; ``announcements`` are
    of every rank, in order.
    """

    def __init__(
        self, error: CollectiveError, announcements: Sequence[Announcement]
    ) -> None:
        self.error = error
        cause = origin(announcements)
        self._names = () if cause is None else cause.classes
        self._kind = common_class(self._names)
        innermost = min(a.depth for a in announcements)
        # Started calls of which nobody knows whether the others have started them end
        # with the section that they belong to.
        several = any(a.pending > 1 for a in announcements)
        # All ranks leave their sections from this depth on. Where only the call failed,
        # it is greater than any depth: the program may go on inside.
        self.level = innermost + (0 if several and innermost else 1)
        self.loses_calls = any(
            a.pending > 1 and a.depth < self.level for a in announcements
        )

    def instead_of(self, error: BaseException | None) -> BaseException:
        """Return what a rank raises, so that one ``except`` decides alike on all.

        The rank's own error, if it is of the class of the first rank's that failed.
        """
        if error is None:
            return self.error
        if not self._names:
            keeps = isinstance(error, CollectiveError)
        elif self._kind is not None and isinstance(error, self._kind):
            keeps = True
        else:
            keeps = class_names(error)[:1] == self._names[:1]
        if keeps or error is self.error:
            return error
        self.error.__cause__ = error
        return self.error


class Sections:
    """The sections that this rank is in."""

    def __init__(self) -> None:
        # Number of sections that this rank is in.
        self.depth = 0
        # Why this rank is leaving them; no call can be made meanwhile.
        self.failure: Failure | None = None

    def unwind(self, failure: Failure) -> bool:
        """Leave the sections that a failure ends; say whether this rank is in any.

        Logically collective over ``topology.replica_comm``.
        """
        leaves = failure.level <= self.depth
        self.failure = failure if leaves else None
        return leaves


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
        channel = self._channel
        channel.sections.depth += 1
        self._steps = channel.position.steps

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise the error of any rank on all of them."""
        channel, sections = self._channel, self._channel.sections
        if channel.elsewhere is not None:
            channel.elsewhere()
        tells = error is None or isinstance(error, Exception)
        try:
            if tells and channel.pending and not channel.broken:
                # Here, where a failure of other ranks still ends this section.
                channel.pending.drain()
        finally:
            sections.depth -= 1
        failure: Failure | None = sections.failure
        if failure is not None and failure.level > sections.depth:
            sections.failure = None
            # Steps made within count no longer: ranks leave from different points.
            channel.position.steps = self._steps
            # A call that was refused meanwhile may have taken a place.
            channel.rings.restart()
        if not tells:
            return
        if failure is None and error is None:
            call = describe_call(f"end of {self._what}")
            try:
                channel.agree(call, self._timeout_seconds)
            except CollectiveError:
                channel.position.steps = self._steps
                raise
            return
        if failure is None:
            assert error is not None
            channel.position.steps = self._steps
            failure = channel.fail(self._what, error, leaves=True)
        if failure is None:
            return
        raised = failure.instead_of(error)
        if raised is not error:
            raise raised
