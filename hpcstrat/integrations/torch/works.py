"""Torch's ``Work`` objects of the process group's calls, and DDP's postponed calls."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.autograd.graph
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

__all__ = ["Postponed", "done"]


_ENGINE = getattr(torch.autograd.graph, "_engine_run_backward", None)
# Before torch 2.6, C++ drops the Python part of a ``Work`` that was made in Python.
_KEEPS_WORK = hasattr(torch._C._distributed_c10d, "_register_work")
# A function that waits for a started call and returns the call's ``Work`` object.
_End = Callable[[], Any]


def done(result: Any) -> Any:
    """Return the ``Work`` object of a completed call; C++ can use it without Python."""
    future = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


class _PostponedWork(dist.Work):
    """The ``Work`` object of a call that is postponed to the end of a backward pass."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end
        self.future = torch.futures.Future()

    def wait(self, timeout: Any = None) -> bool:
        """Make all postponed calls, also this one; the group's own timeout applies."""
        self._end()
        self.future.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether the call was made."""
        return bool(self.future.done())

    is_success = is_completed

    def get_future(self) -> Any:
        """Return the future for which DDP waits after the backward pass."""
        return self.future


class Postponed:
    """DDP's calls within a backward pass, which are completed when that pass ends.

    DDP makes a call whenever a bucket of gradients is complete. If each call waited for
    its result, all ranks would wait for the latest rank at every bucket, without
    computing. So between workers, and with NCCL, each call is started immediately, and
    continues during the backward pass. Other calls cannot continue in the background:
    they are made at the end, in order.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[[], Any], _PostponedWork]] = deque()
        self._making = False
        # True if all postponed calls are started.
        self._all_started = True

    @staticmethod
    def possible() -> bool:
        """Return whether C++ code makes the current call, in a hook of a backward pass.

        Only calls from C++ can be postponed: Python may wait for its call inside the
        hook, but DDP's C++ waits in callbacks at the end. C++ and Python call the same
        methods with the same arguments, and torch has no flag that distinguishes them.
        The stack does: if Python makes the call, a Python frame lies between the frame
        of autograd's engine and this frame.
        """
        if not _KEEPS_WORK or torch._C._current_autograd_node() is None:
            return False
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller.f_globals["__name__"].startswith(_PASSED):
            caller = caller.f_back
        # If the engine runs the hook in a C++ thread of its own, as it does for GPUs,
        # no Python frame called the hook.
        return caller is None or caller.f_code is getattr(_ENGINE, "__code__", None)

    def add(
        self, call: Callable[[], Any], start: Callable[[], _End | None] | None = None
    ) -> dist.Work:
        """Postpone a call, and return a ``Work`` object that represents it.

        ``start``, if given, starts the call, and returns a function that completes it,
        or None if the call cannot be started.
        """
        # Queue a callback for each call, because after an error the engine drops the
        # callbacks that were queued before.
        torch.autograd.Variable._execution_engine.queue_callback(self.end)
        work = _PostponedWork(self.end)
        # Do not start this call before an earlier one: all ranks need the same order.
        begins = self._all_started or not self._calls
        end = start() if start is not None and begins else None
        self._calls.append((end or call, work))
        self._all_started = end is not None
        return work

    def end(self) -> None:
        """Make the postponed calls one by one, in the same order on all ranks."""
        self._making = True
        try:
            while self._calls:
                call, work = self._calls.popleft()
                work.future.set_result(call().get_future().wait())
        except BaseException as error:
            # Drop the other postponed calls. The header of this rank's next call then
            # differs from the other ranks', and all ranks raise an error.
            self._calls.clear()
            work.future.set_exception(error)
            raise
        finally:
            self._making = False

    def give_way(self) -> None:
        """Make the postponed calls before another call; do nothing inside of `end`."""
        if not self._making:
            self.end()


# Modules whose frames `possible` skips when it looks for the caller.
_PASSED = (__name__.rpartition(".")[0], "torch._dynamo")
