"""Faults that one rank makes on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from hpcstrat.engine.arrays.recycling import Recycler
from hpcstrat.engine.collectives.kernel_sum import KernelSum
from hpcstrat.safety import exits

__all__ = ["BadBatchError", "Interrupting", "memory_runs_out", "raised"]


class BadBatchError(ValueError):
    """Of the program's own."""


class Interrupting:
    """An array whose reading is interrupted by Ctrl-C."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise KeyboardInterrupt


_CLASSES = {
    "ValueError": ValueError,
    "FloatingPointError": FloatingPointError,
    "OSError": OSError,
    "BadBatchError": BadBatchError,
}


def raised(name: str) -> Exception:
    """Return an exception of one of the classes that programs raise."""
    return _CLASSES[name]("planted")


@contextmanager
def memory_runs_out() -> Iterator[None]:
    """Let the next result have no memory, once."""
    arrays, repeat = Recycler.arrays, KernelSum.repeat

    def fails(*args: Any, **kwargs: Any) -> Any:
        mends()
        raise MemoryError("planted")

    def repeats(self: KernelSum, value: Any, out: Any, seconds: Any) -> Any:
        # The kernel makes small results itself.
        return fails() if out is None else repeat(self, value, out, seconds)

    def mends() -> None:
        Recycler.arrays = arrays  # type: ignore[method-assign]
        KernelSum.repeat = repeat  # type: ignore[method-assign]

    Recycler.arrays = fails  # type: ignore[method-assign, assignment]
    KernelSum.repeat = repeats  # type: ignore[method-assign]
    for channel in exits._channels:
        # The kernel makes no call alone, and so the next one comes here.
        channel.state.attention = True
    try:
        yield
    finally:
        mends()
