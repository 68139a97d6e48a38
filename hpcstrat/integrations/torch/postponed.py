"""Calls that a backward pass asks for, made together at its end.

DDP asks for one whenever a bucket of gradients is complete. To make each at once would
let all ranks wait for the latest of them at every bucket, where nothing goes on meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Postponed"]

# Before torch 2.6, what C++ gets from Python forgets what Python has made of it.
_KEEPS_WORK = hasattr(torch._C._distributed_c10d, "_register_work")


class _Future(torch.futures.Future):
    """The future of such a call, which is made when somebody waits for it."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end

    def wait(self) -> Any:
        """Make what is left, and return the tensors."""
        self._end()
        return super().wait()


class _Work(dist.Work):
    """The work of such a call."""

    def __init__(self, future: _Future) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        """Make what is left; the group's own timeout holds."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether it was made."""
        return bool(self._future.done())

    is_success = is_completed

    def get_future(self) -> Any:
        """Return the future, for which C++ waits after the backward pass only."""
        return self._future


class Postponed:
    """The calls of a group that are postponed, in their order."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[[], Any], _Future]] = deque()
        self._making = False

    @staticmethod
    def possible() -> bool:
        """Whether a hook within a backward pass asks.

        A callback at the end of a pass does not: DDP waits there at once.
        """
        return _KEEPS_WORK and torch._C._current_autograd_node() is not None

    def add(self, call: Callable[[], Any]) -> dist.Work:
        """Postpone a call, which returns its work; return a work that stands for it."""
        if not self._calls:
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
        future = _Future(self.end)
        self._calls.append((call, future))
        return _Work(future)

    def end(self) -> None:
        """Make what is left, one call after the other: some ranks may not postpone."""
        self._making = True
        try:
            while self._calls:
                call, future = self._calls.popleft()
                future.set_result(call().get_future().wait())
        finally:
            self._making = False

    def give_way(self) -> None:
        """Make what is left before another call, unless that comes of one of these."""
        if not self._making:
            self.end()
