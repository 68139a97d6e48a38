"""Helpers that the tests of checkpoints share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hpcstrat as hs
from tests.mpi.ranks.aggregations import AGGREGATIONS

POLICIES = ("error", "first", "cycle", "init")
# The last aggregation that these lists name is NONE, which has rows of its own.
KINDS = ("mirrored", *AGGREGATIONS[1:], "none")


class Counter:
    """An object with plain state, as programs save it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"größe": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@contextmanager
def warnings_of_checkpoints() -> Iterator[list[str]]:
    """Yield a list that gets the checkpoint warnings of this rank."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = hs.get_logger("checkpoint"), Collector(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def make_variable(kind: str, value: Any, name: str = "x") -> Any:
    if kind == "mirrored":
        return hs.Variable(value, name=name)
    return hs.Variable(value, name=name, synchronization="on_read", aggregation=kind)


def fill(variable: Any, value: Any) -> None:
    """Assign a value to this replica's component only."""
    variable.component[...] = value
