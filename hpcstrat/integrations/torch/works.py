"""The works that calls of the process group return to torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from hpcstrat.engine.reduction.messages import Transfer
from hpcstrat.integrations.torch.host_tensors import HostTensors

__all__ = ["ReceivedWork", "TransferWork", "done"]


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
        """Wait for its end; the group's own timeout holds."""
        self._transfer.wait()
        with torch.no_grad():
            self._host.written()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended; raises what `wait` raises."""
        ended = self._transfer.test()
        if ended:
            with torch.no_grad():
                self._host.written()
        return ended

    def is_success(self) -> bool:
        """Whether it has ended: errors are raised."""
        return self.is_completed()

    def get_future(self) -> Any:
        """Wait, and return a future that is done."""
        self.wait()
        future = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class ReceivedWork(dist.Work):
    """A message that has come from a rank that was not named before."""

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
