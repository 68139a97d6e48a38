"""The GPU and the stream of a rank, for the threads in which its replicas run.

CUDA keeps the device, and CuPy the stream, for each thread.
"""

from __future__ import annotations

from typing import Any

from hpcstrat.engine.gpu import library

__all__ = ["ReplicaDevice"]


class ReplicaDevice:
    """Gives the threads of replicas a GPU, and the stream of the program's thread.

    A `hpcstrat.engine.logical.meetings.Listener`.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._stream: Any = None

    def start(self) -> None:
        """Take note of the program's stream."""
        import cupy

        self._stream = cupy.cuda.get_current_stream()

    def begin(self, index: int) -> None:
        """Compute on the GPU, in the order of the program's stream."""
        del index
        library.use(self._device)
        self._stream.use()

    def pause(self, index: int) -> None:
        """Do nothing: only this replica uses the thread."""

    def resume(self, index: int) -> None:
        """Do nothing: the thread has kept both."""

    def end(self) -> None:
        """Do nothing: the program's thread has kept both."""
