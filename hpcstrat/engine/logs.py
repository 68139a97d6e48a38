"""Loggers whose records name the rank, and a print function for rank 0 only."""

from __future__ import annotations

import logging
import platform
import sys
from typing import Any, TextIO

from hpcstrat.cluster_resolver import launch_from_environment

__all__ = ["get_logger", "is_first_rank", "print_once", "rank_on_host", "set_rank"]

_ROOT = "hpcstrat"


class _Rank:
    """Rank, size and host of this process: from the launcher, later from a topology."""

    rank = launch_from_environment().rank
    size = launch_from_environment().size
    host = platform.node()


def _add_rank(record: logging.LogRecord) -> bool:
    """Add rank, size and host to a record, so that any formatter can use them."""
    record.rank, record.size, record.host = _Rank.rank, _Rank.size, _Rank.host
    return True


class _OwnHandler(logging.StreamHandler[TextIO]):
    """A handler for the warnings of every rank, and for lower levels of rank 0 only.

    Drops records for which the program has a handler, even one that was added later.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(
            logging.Formatter(
                "[%(name)s %(rank)d/%(size)d %(host)s] %(levelname)s: %(message)s"
            )
        )
        self.addFilter(_add_rank)

    # Read sys.stderr each time, because programs and tests replace and close it.
    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless a handler of the program receives it."""
        is_for_all = _Rank.rank == 0 or record.levelno >= logging.WARNING
        if is_for_all and not self._others(record):
            super().emit(record)

    def _others(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


_own = _OwnHandler()


def set_rank(rank: int, size: int, host: str) -> None:
    """Set the rank, size and host that the loggers show for this process."""
    _Rank.rank, _Rank.size, _Rank.host = rank, size, host


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of the job."""
    return _Rank.rank == 0


def rank_on_host() -> str:
    """Return this process's rank and host as text, like ``rank 1 of 4 on node03``."""
    return f"rank {_Rank.rank} of {_Rank.size} on {_Rank.host}"


def get_logger(name: str | None = None) -> logging.Logger:
    """Return a logger whose lines show the rank and the host.

    Not collective.

    Parameters
    ----------
    name : str, optional
        Name below ``hpcstrat``; None for the logger ``hpcstrat`` itself.

    Returns
    -------
    logging.Logger
        Its records have the attributes ``rank``, ``size`` and ``host``, and propagate
        to the handlers of the program's loggers. If there is no handler at this logger,
        at ``hpcstrat`` or at the root, records are written to standard error: warnings
        and errors of every rank, and records of lower levels only on rank 0.
    """
    root = logging.getLogger(_ROOT)
    root.addHandler(_own)
    logger = root if name is None else root.getChild(name)
    # Add the filter to each logger: records propagate without passing parents' filters.
    logger.addFilter(_add_rank)
    return logger


def print_once(*values: Any, **options: Any) -> None:
    """Print on rank 0 of the job only.

    Not collective.

    Parameters
    ----------
    *values : object
        Passed to ``print``.
    **options : object
        Passed to ``print``.
    """
    if is_first_rank():
        print(*values, **options)
        # Flush, because launchers read pipes, for which Python buffers the output.
        (options.get("file") or sys.stdout).flush()
