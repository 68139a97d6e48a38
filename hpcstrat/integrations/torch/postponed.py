"""Calls that DDP asks for within a backward pass, which end when that does.

It asks for one whenever a bucket of gradients is complete. If each were made at once,
all ranks would wait for the latest of them at every bucket, and compute nothing then.
So between workers each is started at once, and goes on meanwhile; inside a worker,
where nothing goes on by itself, all are made at the end.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.autograd.graph
import torch.distributed as dist

__all__ = ["Postponed"]

_ENGINE = getattr(torch.autograd.graph, "_engine_run_backward", None)
# Before torch 2.6, what C++ gets from Python forgets what Python has made of it.
_KEEPS_WORK = hasattr(torch._C._distributed_c10d, "_register_work")
# Waits for a call that was started, and returns its work.
_End = Callable[[], Any]


class _PostponedWork(dist.Work):
    """The work of such a call."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end
        self.future = torch.futures.Future()

    def wait(self, timeout: Any = None) -> bool:
        """Make what is left; the group's own timeout holds."""
        self._end()
        self.future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether it was made."""
        return bool(self.future.done())

    is_success = is_completed

    def get_future(self) -> Any:
        """Return the future, for which DDP waits after the backward pass."""
        return self.future


class Postponed:
    """The calls of a group that are postponed, in their order."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[[], Any], _PostponedWork]] = deque()
        self._making = False
        # Whether none of them is yet to be made.
        self._all_started = True

    @staticmethod
    def possible() -> bool:
        """Whether C++ asks, in a hook within a backward pass.

        Python might wait for the call there, and DDP does in callbacks at the end.
        torch has no mark for who asks: C++ and Python call the same methods with the
        same arguments, also within a hook. Only the stack tells them apart: where
        Python asks, a frame of its own lies between the engine's and this one.
        """
        if not _KEEPS_WORK or torch._C._current_autograd_node() is None:
            return False
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller.f_globals["__name__"].startswith(_PASSED):
            caller = caller.f_back
        # A thread of the engine's own, as for GPUs, has no frame below the hook.
        return caller is None or caller.f_code is getattr(_ENGINE, "__code__", None)

    def add(
        self, call: Callable[[], Any], start: Callable[[], _End | None] | None = None
    ) -> dist.Work:
        """Postpone a call, which returns its work; return a work that stands for it.

        ``start``, if given, starts it, where that can be, and returns what ends it.
        """
        # For each, as an engine that an error has ended forgets what it was to call.
        torch.autograd.Variable._execution_engine.queue_callback(self.end)
        work = _PostponedWork(self.end)
        # Not before calls that cannot be started: those come first on all ranks.
        begins = self._all_started or not self._calls
        end = start() if start is not None and begins else None
        self._calls.append((end or call, work))
        self._all_started = end is not None
        return work

    def end(self) -> None:
        """Make what is left, one call after the other: some ranks may not postpone."""
        self._making = True
        try:
            while self._calls:
                call, work = self._calls.popleft()
                work.future.set_result(call().get_future().wait())
        except BaseException as error:
            # A mismatch then names what comes instead of the others.
            self._calls.clear()
            work.future.set_exception(error)
            raise
        finally:
            self._making = False

    def give_way(self) -> None:
        """Make what is left before another call, unless that comes of one of these."""
        if not self._making:
            self.end()


# Modules whose functions stand between who asks and this one.
_PASSED = (__name__.rpartition(".")[0], "torch._dynamo")
