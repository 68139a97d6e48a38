"""Requests of MPI that no part of the program waits for, kept with their memory.

MPI reads and writes the memory of a request until the request is complete. An error, or
a program that drops a handle, ends the wait and not the request: if its memory were
freed, MPI would write into the objects that come to lie there.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from typing import Any

__all__ = ["keep", "let_go_of_complete"]

_kept: deque[tuple[Any, Any]] = deque()


def keep(requests: Iterable[Any], memory: Any = None) -> None:
    """Keep the requests that are not complete, and memory that they do not hold.

    Requests of mpi4py hold the buffers that they were given. This makes no call of MPI,
    so that a ``__del__``, which any thread may run, may call it.
    """
    _kept.extend((request, memory) for request in requests if request)


def let_go_of_complete() -> None:
    """Free the memory of the requests that have become complete; does not wait."""
    for _ in range(len(_kept)):
        request, _memory = _kept[0]
        complete = True
        # A request that fails is complete, too.
        with contextlib.suppress(Exception):
            complete = request.Test()
        if complete:
            _kept.popleft()
        else:
            _kept.rotate(-1)
