"""Sets the GPU and the stream of a rank in the threads of its logical replicas.

Each thread must set both, because CUDA has a current device per thread, and CuPy has a
current stream per thread.
"""

from __future__ import annotations

from typing import Any

from hpcstrat.engine.gpu import library

__all__ = ["ReplicaDevice"]


class ReplicaDevice:
    """Implements `hpcstrat.engine.logical.meetings.Listener` to set GPU and stream."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._stream: Any = None

    def start(self) -> None:
        """Remember the current stream of the program's thread."""
        import cupy

        self._stream = cupy.cuda.get_current_stream()

    def begin(self, index: int) -> None:
        """Make the GPU and the program's stream current in a replica's thread."""
        del index
        library.use(self._device)
        self._stream.use()

    def pause(self, index: int) -> None:
        """Do nothing: no other replica uses this thread."""

    def resume(self, index: int) -> None:
        """Do nothing: GPU and stream of the thread are unchanged."""

    def end(self) -> None:
        """Do nothing: GPU and stream of the program's thread are unchanged."""
