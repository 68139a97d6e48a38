"""A GPU stream that is held back, and counts of a program's waits for the GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import cupy
import numpy as np
import pytest

LIMIT_SECONDS = 40.0

_WAITS = {
    "stream_synchronizations",
    "device_synchronizations",
    "event_synchronizations",
}


@contextmanager
def held_stream() -> Iterator[threading.Event]:
    """Hold back all work of the current stream until an event, which is set at the end.

    A thread that waits for the stream before the event waits for the end of the test.
    """
    goes_on = threading.Event()
    came: list[bool] = []
    stream = cupy.cuda.get_current_stream()
    stream.launch_host_func(lambda _: came.append(goes_on.wait(LIMIT_SECONDS)), None)
    try:
        yield goes_on
    finally:
        goes_on.set()
        stream.synchronize()
    assert came == [True], "the program waited for a stream that was held"


@dataclass
class Waits:
    """Counts of waits for the GPU, of this thread and of other threads."""

    here: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)


@contextmanager
def counted_waits(patch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """Count the waits that the stand-in records; skip the test with CuPy itself."""
    standin = pytest.importorskip("cupy._standin", reason="needs the stand-in")
    found, here, count = Waits(), threading.current_thread(), standin.count

    def noted(name: str, number: int = 1) -> None:
        if name in _WAITS or name == "pageable":
            own = threading.current_thread() is here
            (found.here if own else found.elsewhere).append(name)
        count(name, number)

    with patch.context() as own_patch:
        own_patch.setattr(standin, "count", noted)
        yield found


def on_host(value: Any) -> Any:
    """Return a value as a NumPy array."""
    return cupy.asnumpy(value) if isinstance(value, cupy.ndarray) else np.asarray(value)
