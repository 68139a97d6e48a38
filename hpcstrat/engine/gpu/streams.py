"""Orders GPU work between the library's own stream and the program's.

The work of the program's current stream so far runs before the work of a lane after
`Lane.enter`, and its work after `Lane.leave` runs after the lane's. The device keeps
this order, by events: the host waits for nothing.

An event stands for the last point at which it was recorded before another stream was
made to wait for it, so that one event serves any number of waits, one after the other
(CUDA C++ Programming Guide, section "Events"; CUDA Runtime API, cudaStreamWaitEvent).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Done", "Lane", "Mark", "borrowed_stream"]

# cudaErrorNotReady, for which CuPy has no name.
_NOT_READY = 600


@contextmanager
def borrowed_stream(pointer: int, device: int) -> Iterator[None]:
    """Make another library's stream, and the device it belongs to, CuPy's current."""
    import cupy

    # In this order: CuPy keeps a current stream for each device.
    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(pointer):
        yield


class Mark:
    """A point in the work of a stream of the current device, for which others wait."""

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda
        self.event = cupy.cuda.Event(disable_timing=True)

    def record(self, stream: Any = None) -> Mark:
        """Mark the end of the work so far of a stream, by default the current one."""
        self.event.record(stream or self._cuda.get_current_stream())
        return self

    def join(self, stream: Any = None) -> None:
        """Make all later work of a stream wait for the mark."""
        (stream or self._cuda.get_current_stream()).wait_event(self.event)

    def passed(self) -> bool:
        """Whether the device has come past the mark; never blocks.

        True also where nothing was recorded. Raises where the device has failed.
        """
        # `Event.done` of CuPy is False after any failure of the device.
        status = self._cuda.runtime.eventQuery(self.event.ptr)
        if status not in (0, _NOT_READY):
            raise self._cuda.runtime.CUDARuntimeError(status)
        return bool(status == 0)


class Done:
    """The end of a lane's work so far; can be awaited as a step of a call."""

    def __init__(self, lane: Lane, mark: Mark) -> None:
        self._lane = lane
        self._mark: Mark | None = mark

    def agreed(self) -> bool:
        """Whether the device has done the work; once true, always true."""
        if self._mark is not None and self._mark.passed():
            self._lane.give_back(self._mark)
            self._mark = None
        return self._mark is None

    def missing(self) -> list[int]:
        """Return ``[-1]``, which is no other rank, until the work is done."""
        return [] if self.agreed() else [-1]


class Lane:
    """A stream beside the program's, on the current device.

    An ``urgent`` one begins before waiting work of the program where both could: other
    ranks wait for its work.
    """

    def __init__(self, *, urgent: bool = False) -> None:
        import cupy

        # Non-blocking: it does not wait for the null stream, nor that for it, so that
        # only the marks order the two. Lower numbers come first (CUDA Runtime API,
        # cudaStreamCreateWithPriority).
        self.stream = cupy.cuda.Stream(non_blocking=True, priority=-int(urgent))
        self._entered = Mark()
        self._left = Mark()
        # Events that were passed serve again: to make one takes a call of the driver.
        self._marks: list[Mark] = []
        self._kept: deque[tuple[Mark, Any]] = deque()

    def enter(self, mark: Mark | None = None) -> None:
        """Make later work of the lane wait for earlier work of the program.

        That is work up to ``mark``; by default, all in this thread's current stream.
        """
        if mark is None:
            mark = self._entered.record()
        mark.join(self.stream)

    def leave(self, mark: Mark | None = None) -> None:
        """Make later work of the program wait for earlier work of the lane.

        A ``mark`` is recorded at the end of the lane, for the program to join; by
        default this thread's current stream joins at once.
        """
        if mark is None:
            self._left.record(self.stream).join()
        else:
            mark.record(self.stream)

    def done(self) -> Done:
        """Return a step that waits for the lane's work so far."""
        return Done(self, self._end())

    def _end(self) -> Mark:
        return (self._marks.pop() if self._marks else Mark()).record(self.stream)

    def keep(self, things: Any) -> None:
        """Keep arrays alive until the lane's work so far has been done."""
        self.forget_done()
        # CuPy's pool hands memory out again as soon as its array is gone, to a stream
        # that does not wait for this one.
        self._kept.append((self._end(), things))

    def forget_done(self) -> None:
        """Drop the arrays that were kept for work that is done; does not wait."""
        while self._kept and self._kept[0][0].passed():
            self._marks.append(self._kept.popleft()[0])

    def give_back(self, mark: Mark) -> None:
        """Take back a mark for which nothing waits; for `Done`."""
        self._marks.append(mark)

    def synchronize(self) -> None:
        """Block until the lane's work so far has been done; other streams go on."""
        self.stream.synchronize()
        self.forget_done()
