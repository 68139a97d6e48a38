"""Context managers and decorators that record ranges while recording is on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from hpcstrat.engine.observe.timeline.events import shown_text
from hpcstrat.engine.observe.timeline.recorder import WAIT, Recorder, active

__all__ = ["recorded_wait", "trace", "traced"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(slots=True)
class _Range:
    """A context manager that records a range."""

    recorder: Recorder
    name: str
    args: Any
    category: str = "program"
    start: int = 0

    def __enter__(self) -> None:
        self.start = self.recorder.enter(self.name)

    def __exit__(self, *_: object) -> None:
        self.recorder.leave(self.name, self.category, self.start, self.args)


_PLAIN = (bool, float, int, str, type(None))
_NOTHING = contextlib.nullcontext()


def trace(name: str, **args: Any) -> contextlib.AbstractContextManager[None]:
    """Record a range of the program under a name, if recording is on.

    Not collective. May be used by any thread.

    Parameters
    ----------
    name : str
        Name of the range.
    **args : object
        Details of the range, shown with it in the timeline.

    Returns
    -------
    context manager
        The recorded range is the ``with`` block. Ranges may be nested.
    """
    recorder = active.recorder
    if recorder is None:
        return _NOTHING
    # Convert to text now: the objects may change before the writer thread runs.
    shown = {key: v if type(v) in _PLAIN else shown_text(v) for key, v in args.items()}
    return _Range(recorder, name, shown or None)


def recorded_wait(text: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that records a wait for a pending call."""
    recorder = active.recorder
    if recorder is None:
        return _NOTHING
    return _Range(recorder, WAIT, {"call": text}, "wait")


def traced(name: str, category: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that records each call of a function as a range."""

    def _decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def _recorded(*values: _P.args, **named: _P.kwargs) -> _R:
            recorder = active.recorder
            if recorder is None:
                return function(*values, **named)
            with _Range(recorder, name, None, category):
                return function(*values, **named)

        return _recorded

    return _decorate
