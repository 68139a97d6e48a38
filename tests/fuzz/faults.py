"""What goes wrong on one rank, on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from hpcstrat.arrays.recycling import Recycler

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
    arrays = Recycler.arrays

    def fails(self: Recycler, *args: Any, **kwargs: Any) -> Any:
        Recycler.arrays = arrays  # type: ignore[method-assign]
        raise MemoryError("planted")

    Recycler.arrays = fails  # type: ignore[method-assign]
    try:
        yield
    finally:
        Recycler.arrays = arrays  # type: ignore[method-assign]
