"""Runs a function on replica 0 alone, with its outcome on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcstrat.checkpoint.disk.disk import NO_DESCRIPTORS
from hpcstrat.engine.typing import Replicas
from hpcstrat.errors import CheckpointError

__all__ = ["explained", "on_rank_0"]


def on_rank_0(strategy: Replicas, what: str, action: Callable[[], Any]) -> Any:
    """Run an action on replica 0; return its result, which must pickle, on all.

    Collective over the strategy's replicas. What it raises is a CheckpointError on all
    of them: its own, or one with its text.
    """
    # An error travels as its text and class: not all errors pickle, and a traceback of
    # replica 0 does not belong to another one's.
    outcome: Any = None
    if strategy.replica_id == 0:
        try:
            outcome = ("", action())
        except CheckpointError as error:
            outcome = (str(error), type(error))
        except Exception as error:
            outcome = (explained(what, error), CheckpointError)
    text, result = strategy.collectives.broadcast_object(outcome, 0, what)
    if text:
        raise result(text)
    return result


def explained(what: str, error: BaseException) -> str:
    """Return the message, with advice, of an error of the operating system."""
    advice = "check the path, its permissions and the space on the file system"
    if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
        advice = "close files, or raise their number (ulimit -n)"
    if isinstance(error, FileExistsError) and what.startswith("save"):
        advice = "pass overwrite=True, or another step"
    return (
        f"expected {what} to succeed, found {type(error).__name__}: {error}; {advice}"
    )
