"""Waits for NCCL, which itself may never return: see `nccl_group`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from hpcstrat.engine.gpu import library

__all__ = ["Joining", "NcclEnding", "abort_quietly", "described"]

# Many times what it takes thousands of ranks.
_JOIN_SECONDS = 300.0


class Joining:
    """The making of a communicator in a thread; can be awaited as a step of a call.

    It is made on the device that is current here.
    """

    def __init__(self, join: Callable[[], Any]) -> None:
        self._join = join
        self._device = 0
        self._made: Any = None
        self._problem = ""
        self._given_up = False
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + _JOIN_SECONDS
        self._thread = threading.Thread(
            target=self._run, name="hpcstrat-nccl", daemon=True
        )
        try:
            self._device = library.current_gpu()
            self._thread.start()
        except Exception as error:
            # The others, which may be waiting in NCCL, are told by `take`.
            self._problem = described(error)

    def _run(self) -> None:
        made: Any = None
        try:
            library.use(self._device)
            made = self._join()
        except Exception as error:
            self._problem = described(error)
        with self._lock:
            if not self._given_up:
                # Whoever gave up has gone, and a communicator that comes late is
                # aborted here.
                self._made, made = made, None
        abort_quietly(made)

    def agreed(self) -> bool:
        """Whether it has ended, or it is in vain to wait longer."""
        return not self._thread.is_alive() or time.monotonic() > self._deadline

    def missing(self) -> list[int]:
        """Return what is waited for, as steps do: it is not known which ranks."""
        return [] if self.agreed() else [-1]

    def take(self) -> tuple[Any, str]:
        """Return the communicator, or None and what was wrong, once `agreed`."""
        if self._thread.is_alive():
            self.give_up()
            return None, (
                f"NCCL has not joined the ranks within {_JOIN_SECONDS:g} s (see "
                "NCCL_SOCKET_IFNAME, by which it is told the network interface)"
            )
        return self._made, self._problem

    def give_up(self) -> None:
        """Free the communicator, if it still comes; a second call does nothing."""
        with self._lock:
            made, self._made, self._given_up = self._made, None, True
        abort_quietly(made)


class NcclEnding:
    """The end of calls, or their failure; can be awaited as a step of a call.

    ``check`` raises what has failed: then they do not end.
    """

    def __init__(self, done: Any, check: Callable[[], None]) -> None:
        self.agreed: Callable[[], bool] = done.agreed
        self._check = check

    def missing(self) -> list[int]:
        """Return what is waited for, as steps do; raise where NCCL has failed."""
        if self.agreed():
            return []
        self._check()
        return [-1]


def abort_quietly(comm: Any) -> None:
    """Give up a communicator and what it is doing; does not raise."""
    if comm is not None:
        with contextlib.suppress(Exception):
            comm.abort()


def described(error: Exception) -> str:
    """Return an error of NCCL as text."""
    # The type says something where the text does not: CuPy has none for some of NCCL's
    # errors, and raises KeyError then.
    return f"{type(error).__name__}: {error}"
