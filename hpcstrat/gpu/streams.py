"""The order of work on a GPU: a stream of our own beside the program's.

What the program has given to its current stream runs before what a lane is given after
`Lane.enter`, and what it gives to it after `Lane.leave` runs after the lane's work. All
this is said to the device, by events: the host waits for nothing.

An event stands for the last point at which it was recorded before it was asked about,
so that one event serves any number of waits, one after the other (CUDA C++ Programming
Guide, section "Events"; CUDA Runtime API, cudaStreamWaitEvent).
"""

from __future__ import annotations

from collections import deque
from typing import Any

__all__ = ["Done", "ForeignMark", "Lane", "Mark"]

# cudaErrorNotReady, for which CuPy has no name.
_NOT_READY = 600


class Mark:
    """A point in the work of a stream, for which other streams can wait.

    Not collective. Belongs to the current device.

    Parameters
    ----------
    shared : bool
        Whether other processes can open it, by its `handle`.

    Attributes
    ----------
    event : cupy.cuda.Event
        Recorded by `record`.

    Raises
    ------
    cupy.cuda.runtime.CUDARuntimeError
        If the device has no such events.
    """

    def __init__(self, *, shared: bool = False) -> None:
        import cupy

        self._cuda = cupy.cuda
        self.event = cupy.cuda.Event(disable_timing=True, interprocess=shared)

    def handle(self) -> bytes:
        """Return what opens a shared mark in another process, see `ForeignMark`.

        Not collective.

        Returns
        -------
        bytes
            64 of them.

        Raises
        ------
        cupy.cuda.runtime.CUDARuntimeError
            If the system cannot share events.
        """
        return bytes(self._cuda.runtime.ipcGetEventHandle(self.event.ptr))

    def record(self, stream: Any = None) -> Mark:
        """Mark the end of what a stream has been given so far.

        Not collective.

        Parameters
        ----------
        stream : cupy.cuda.Stream, optional
            Default: the current stream of this thread.

        Returns
        -------
        Mark
            This one.
        """
        self.event.record(stream or self._cuda.get_current_stream())
        return self

    def join(self, stream: Any = None) -> None:
        """Let what a stream is given from here on run after the mark.

        Not collective; the host does not wait.

        Parameters
        ----------
        stream : cupy.cuda.Stream, optional
            Default: the current stream of this thread.
        """
        (stream or self._cuda.get_current_stream()).wait_event(self.event)

    def passed(self) -> bool:
        """Whether the device has come past the mark.

        Not collective; never blocks.

        Returns
        -------
        bool
            True also where nothing was recorded.

        Raises
        ------
        cupy.cuda.runtime.CUDARuntimeError
            If the device has failed.
        """
        # An event of CuPy takes any failure of the device for work that goes on.
        status = self._cuda.runtime.eventQuery(self.event.ptr)
        if status not in (0, _NOT_READY):
            raise self._cuda.runtime.CUDARuntimeError(status)
        return bool(status == 0)


class ForeignMark:
    """A mark that another process records.

    Not collective.

    Parameters
    ----------
    handle : bytes
        From `Mark.handle`, of another process of this node.

    Raises
    ------
    cupy.cuda.runtime.CUDARuntimeError
        If it cannot be opened.
    """

    def __init__(self, handle: bytes) -> None:
        from cupy.cuda import runtime

        self._runtime = runtime
        self._event = runtime.ipcOpenEventHandle(handle)

    def join(self, stream: Any) -> None:
        """Let what a stream is given from here on run after the mark.

        Not collective; the host does not wait. A mark that its process has not recorded
        yet is not waited for.

        Parameters
        ----------
        stream : cupy.cuda.Stream
            Of this process.
        """
        self._runtime.streamWaitEvent(stream.ptr, self._event)

    def close(self) -> None:
        """Let go of it; a second call does nothing.

        Not collective.
        """
        if self._event:
            self._runtime.eventDestroy(self._event)
            self._event = 0


class Done:
    """The end of what a lane had been given; can be awaited as a step of a call.

    Parameters
    ----------
    lane : Lane
        Which lane.
    mark : Mark
        Recorded on it; goes back to the lane when it has been passed.
    """

    def __init__(self, lane: Lane, mark: Mark) -> None:
        self._lane = lane
        self._mark: Mark | None = mark

    def agreed(self) -> bool:
        """Whether the device has done the work.

        Not collective; never blocks.

        Returns
        -------
        bool
            Once true, always true.

        Raises
        ------
        cupy.cuda.runtime.CUDARuntimeError
            If the device has failed.
        """
        mark = self._mark
        if mark is None:
            return True
        if not mark.passed():
            return False
        self._mark = None
        self._lane.give_back(mark)
        return True

    def missing(self) -> list[int]:
        """Return what is waited for, as the steps of a call do.

        Not collective.

        Returns
        -------
        list of int
            Empty, or ``[-1]``: no other rank is waited for.
        """
        return [] if self.agreed() else [-1]


class Lane:
    """A stream beside the program's, on the current device.

    Not collective.

    Attributes
    ----------
    stream : cupy.cuda.Stream
        Does not wait for the null stream, nor that for it.
    """

    def __init__(self) -> None:
        import cupy

        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._entered = Mark()
        self._left = Mark()
        self._marks: list[Mark] = []
        self._kept: deque[tuple[Mark, Any]] = deque()

    def enter(self, mark: Mark | None = None) -> None:
        """Let the lane's work from here on run after the program's so far.

        Not collective; the host does not wait.

        Parameters
        ----------
        mark : Mark, optional
            Up to where; default: the end of the current stream of this thread.
        """
        if mark is None:
            mark = self._entered.record()
        mark.join(self.stream)

    def leave(self, mark: Mark | None = None) -> None:
        """Let the program's work from here on run after the lane's so far.

        Not collective; the host does not wait.

        Parameters
        ----------
        mark : Mark, optional
            Recorded at the end of the lane, for the program to join; default: the
            current stream of this thread joins at once.
        """
        if mark is not None:
            mark.record(self.stream)
            return
        self._left.record(self.stream).join()

    def done(self) -> Done:
        """Return what says whether the lane's work so far has been done.

        Not collective; does not wait.

        Returns
        -------
        Done
            To be yielded by an algorithm, see `hpcstrat.collectives.work`.
        """
        mark = self._marks.pop() if self._marks else Mark()
        return Done(self, mark.record(self.stream))

    def keep(self, things: Any) -> None:
        """Keep arrays alive until the lane's work so far has been done.

        Not collective; does not wait. Memory of CuPy's pool may be handed out again as
        soon as its array is gone, to a stream that knows nothing of this one.

        Parameters
        ----------
        things : object
            What holds the arrays.
        """
        self.forget_done()
        mark = self._marks.pop() if self._marks else Mark()
        self._kept.append((mark.record(self.stream), things))

    def forget_done(self) -> None:
        """Let go of what was kept for work that has been done.

        Not collective; does not wait.
        """
        while self._kept and self._kept[0][0].passed():
            self._marks.append(self._kept.popleft()[0])

    def give_back(self, mark: Mark) -> None:
        """Take back a mark for which nothing waits; for `Done`.

        Not collective.

        Parameters
        ----------
        mark : Mark
            From `done`.
        """
        self._marks.append(mark)

    def synchronize(self) -> None:
        """Wait until the lane's work so far has been done.

        Not collective; blocks, the device's other streams go on.
        """
        self.stream.synchronize()
        self.forget_done()
