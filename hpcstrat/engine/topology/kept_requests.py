"""MPI requests for which nothing waits any longer, kept alive with their buffers.

MPI reads and writes the buffer of a request until the request is complete. If an error
ends the wait, or a program drops its handle, the request is still active. If its buffer
were freed, MPI would write into objects that are allocated there later.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from typing import Any

__all__ = ["keep", "let_go_of_complete"]

_kept: deque[tuple[Any, Any]] = deque()


def keep(requests: Iterable[Any], memory: Any = None) -> None:
    """Keep incomplete requests, and ``memory`` that they use but do not refer to.

    An mpi4py request refers to the buffers that were passed to its MPI call. This
    function does not call MPI, because it is used by ``__del__`` methods, which any
    thread may run.
    """
    _kept.extend((request, memory) for request in requests if request)


def let_go_of_complete() -> None:
    """Free the buffers of kept requests that are complete now, without waiting."""
    for _ in range(len(_kept)):
        request, _memory = _kept[0]
        complete = True
        # A failed request is complete, too.
        with contextlib.suppress(Exception):
            complete = request.Test()
        if complete:
            _kept.popleft()
        else:
            _kept.rotate(-1)
