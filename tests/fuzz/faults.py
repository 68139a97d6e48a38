"""Faults that one rank causes on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from hpcstrat.engine.algorithms.plan import KernelPlan
from hpcstrat.engine.arrays.recycling import Recycler
from hpcstrat.safety import exits

__all__ = ["BadBatchError", "Interrupting", "memory_runs_out", "raised"]


class BadBatchError(ValueError):
    """An exception class of the program."""


class Interrupting:
    """An array that raises KeyboardInterrupt when it is read."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise KeyboardInterrupt


_CLASSES = {
    "ValueError": ValueError,
    "FloatingPointError": FloatingPointError,
    "OSError": OSError,
    "BadBatchError": BadBatchError,
}


def raised(name: str) -> Exception:
    """Return an exception of a class that programs raise."""
    return _CLASSES[name]("planted")


@contextmanager
def memory_runs_out() -> Iterator[None]:
    """Let the next allocation of a result fail with MemoryError, once."""
    arrays, repeat = Recycler.arrays, KernelPlan.repeat

    def fails(*args: Any, **kwargs: Any) -> Any:
        mends()
        raise MemoryError("planted")

    def repeats(self: KernelPlan, value: Any, out: Any, seconds: Any) -> Any:
        # The kernel allocates small results itself.
        return fails() if out is None else repeat(self, value, out, seconds)

    def mends() -> None:
        Recycler.arrays = arrays  # type: ignore[method-assign]
        KernelPlan.repeat = repeat  # type: ignore[method-assign]

    Recycler.arrays = fails  # type: ignore[method-assign, assignment]
    KernelPlan.repeat = repeats  # type: ignore[method-assign]
    for channel in exits._channels:
        # With attention set, the kernel does not handle the next call without Python.
        channel.state.attention = True
    try:
        yield
    finally:
        mends()
