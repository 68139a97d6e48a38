"""The works that calls of the process group return to torch; postponed calls."""

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

from hpcstrat.engine.reduction.messages import Transfer
from hpcstrat.integrations.torch.host_tensors import HostTensors

__all__ = ["Postponed", "ReceivedWork", "TransferWork", "done"]


_ENGINE = getattr(torch.autograd.graph, "_engine_run_backward", None)
# Before torch 2.6, C++ drops the Python part of a work that Python has made.
_KEEPS_WORK = hasattr(torch._C._distributed_c10d, "_register_work")
# A function that waits for a started call and returns its work.
_End = Callable[[], Any]


def done(result: Any) -> Any:
    """Return the work of a call that has ended; C++ waits for it without Python."""
    future = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


class TransferWork(dist.Work):
    """A message under way."""

    def __init__(self, transfer: Transfer, host: HostTensors, tensors: Any) -> None:
        super().__init__()
        self._transfer, self._host, self._tensors = transfer, host, tensors

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the end of the message; the group's own timeout holds."""
        self._transfer.wait()
        with torch.no_grad():
            self._host.written()
        return True

    def is_completed(self) -> bool:
        """Whether the message has ended; raises the errors of `wait`."""
        ended = self._transfer.test()
        if ended:
            with torch.no_grad():
                self._host.written()
        return ended

    is_success = is_completed

    def get_future(self) -> Any:
        """Wait, and return a future that is done."""
        self.wait()
        future = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class ReceivedWork(dist.Work):
    """A message that has come from any rank."""

    def __init__(self, source: int) -> None:
        super().__init__()
        self._source = source

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def _source_rank(self) -> int:
        return self._source


class _PostponedWork(dist.Work):
    """The work of a postponed call."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end
        self.future = torch.futures.Future()

    def wait(self, timeout: Any = None) -> bool:
        """Make the calls that are left; the group's own timeout holds."""
        self._end()
        self.future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the call was made."""
        return bool(self.future.done())

    is_success = is_completed

    def get_future(self) -> Any:
        """Return the future, for which DDP waits after the backward pass."""
        return self.future


class Postponed:
    """The calls that DDP makes within a backward pass, which end when that does.

    It makes one whenever a bucket of gradients is complete. If each ended at once, all
    ranks would wait for the latest of them at every bucket, and compute nothing then.
    So between workers each is started at once, and goes on meanwhile; inside a worker,
    where nothing goes on by itself, all are made at the end, in their order.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[[], Any], _PostponedWork]] = deque()
        self._making = False
        # Whether all of the calls are started.
        self._all_started = True

    @staticmethod
    def possible() -> bool:
        """Whether C++ makes the call, in a hook within a backward pass.

        Python might wait for the call there, and DDP does in callbacks at the end. C++
        and Python call the same methods with the same arguments, also within a hook,
        and torch has no mark that tells them apart. Only the stack does: where Python
        calls, a frame of its own lies between the engine's and this one.
        """
        if not _KEEPS_WORK or torch._C._current_autograd_node() is None:
            return False
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller.f_globals["__name__"].startswith(_PASSED):
            caller = caller.f_back
        # If the engine runs the hook in its own thread, as it does for GPUs, no Python
        # frame called it.
        return caller is None or caller.f_code is getattr(_ENGINE, "__code__", None)

    def add(
        self, call: Callable[[], Any], start: Callable[[], _End | None] | None = None
    ) -> dist.Work:
        """Postpone a call, which returns its work; return a work that stands for it.

        ``start``, if given, starts the call, and returns a function that ends it; or
        None, where the call cannot be started.
        """
        # For each call: an engine that an error has ended drops its callbacks.
        torch.autograd.Variable._execution_engine.queue_callback(self.end)
        work = _PostponedWork(self.end)
        # Not while an earlier call is not started: that comes first on all ranks.
        begins = self._all_started or not self._calls
        end = start() if start is not None and begins else None
        self._calls.append((end or call, work))
        self._all_started = end is not None
        return work

    def end(self) -> None:
        """Make the calls that are left, one by one: some ranks may not postpone."""
        self._making = True
        try:
            while self._calls:
                call, work = self._calls.popleft()
                work.future.set_result(call().get_future().wait())
        except BaseException as error:
            # The next call then differs from the other ranks', which names it.
            self._calls.clear()
            work.future.set_exception(error)
            raise
        finally:
            self._making = False

    def give_way(self) -> None:
        """Make the calls that are left before another one, unless they make that."""
        if not self._making:
            self.end()


# Modules whose functions lie between the caller and this one.
_PASSED = (__name__.rpartition(".")[0], "torch._dynamo")
