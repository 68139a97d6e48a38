"""Orders GPU work between the library's own streams and the program's stream.

Work that is added to a lane after `Lane.enter` waits for the earlier work of the
program's current stream. Work that is added to the program's stream after `Lane.leave`
waits for the earlier work of the lane. CUDA events enforce this order on the GPU, so
that the host does not wait.

A stream that waits for an event waits for the last record of the event at the time of
the call. Therefore, the event can be recorded again afterwards (CUDA C++ Programming
Guide, section "Events"; CUDA Runtime API, cudaStreamWaitEvent).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpcstrat.engine.channel.waitable import Waitable

__all__ = ["Done", "Lane", "Mark", "borrowed_stream"]

# The value of cudaErrorNotReady, for which CuPy has no constant.
_NOT_READY = 600


@contextmanager
def borrowed_stream(pointer: int, device: int) -> Iterator[None]:
    """Make another library's stream, and the stream's device, current in CuPy."""
    import cupy

    # Set the device first, because CuPy has a current stream for each device.
    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(pointer):
        yield


class Mark:
    """A CUDA event: a point in a stream's work for which other streams can wait."""

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda
        self.event = cupy.cuda.Event(disable_timing=True)

    def record(self, stream: Any = None) -> Mark:
        """Record the mark after a stream's work so far; default: the current stream."""
        self.event.record(stream or self._cuda.get_current_stream())
        return self

    def join(self, stream: Any = None) -> None:
        """Make later work of a stream (default: the current) wait for the mark."""
        (stream or self._cuda.get_current_stream()).wait_event(self.event)

    def passed(self) -> bool:
        """Return whether the GPU has done the work before the mark; never blocks.

        Returns True if the mark was never recorded; raises if the GPU has failed.
        """
        # CuPy's `Event.done` is not used, because it stays False after a GPU failure.
        status = self._cuda.runtime.eventQuery(self.event.ptr)
        if status not in (0, _NOT_READY):
            raise self._cuda.runtime.CUDARuntimeError(status)
        return bool(status == 0)


class Done(Waitable):
    """A step of a collective call, which waits for the end of a lane's work so far."""

    def __init__(self, lane: Lane, mark: Mark) -> None:
        self._lane = lane
        self._mark: Mark | None = mark

    def agreed(self) -> bool:
        """Return whether the GPU has done the work; once True, always True."""
        if self._mark is not None and self._mark.passed():
            self._lane.give_back(self._mark)
            self._mark = None
        return self._mark is None


class Lane:
    """A CUDA stream of the library on the current device, next to the program's stream.

    Work of an ``urgent`` lane starts before waiting work of the program if both could
    start, because other ranks wait for the lane's work.
    """

    def __init__(self, *, urgent: bool = False) -> None:
        import cupy

        # A non-blocking stream and the null stream do not wait for each other, so that
        # only marks order their work. Lower numbers have higher priority (CUDA Runtime
        # API, cudaStreamCreateWithPriority).
        self.stream = cupy.cuda.Stream(non_blocking=True, priority=-int(urgent))
        self._entered = Mark()
        self._left = Mark()
        # Marks for reuse, because creating an event takes a driver call.
        self._marks: list[Mark] = []
        self._kept: deque[tuple[Mark, Any]] = deque()

    def enter(self, mark: Mark | None = None) -> None:
        """Make later work of the lane wait for earlier work of the program.

        Earlier work is the work up to ``mark``; by default, all work so far of this
        thread's current stream.
        """
        if mark is None:
            mark = self._entered.record()
        mark.join(self.stream)

    def leave(self, mark: Mark | None = None) -> None:
        """Make later work of the program wait for earlier work of the lane.

        If ``mark`` is given, it is recorded in the lane, and the program must join it
        later. If not, this thread's current stream waits for the lane's work so far.
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
        # CuPy's pool may reuse freed memory on a stream that does not wait for a lane.
        self._kept.append((self._end(), things))

    def forget_done(self) -> None:
        """Drop the arrays that were kept for work that is done now, without waiting."""
        while self._kept and self._kept[0][0].passed():
            self._marks.append(self._kept.popleft()[0])

    def give_back(self, mark: Mark) -> None:
        """Accept a mark from `Done` for reuse; no stream may wait for the mark."""
        self._marks.append(mark)

    def synchronize(self) -> None:
        """Block the host until the lane's work is done; other streams continue."""
        self.stream.synchronize()
        self.forget_done()
