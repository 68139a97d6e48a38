"""Loggers that know their rank, and output that appears once."""

from __future__ import annotations

import logging
import platform
import sys
from typing import Any

from hpcstrat.cluster_resolver import launch_from_environment

__all__ = ["get_logger", "place", "print_once", "set_rank"]

_ROOT = "hpcstrat"


class _Rank:
    """This process's place in the job: the launcher's word, then a topology's."""

    rank = launch_from_environment().rank
    size = launch_from_environment().size
    host = platform.node()


def _add_place(record: logging.LogRecord) -> bool:
    """Put rank, size and host on a record, for the formatters of the program, too."""
    record.rank, record.size, record.host = _Rank.rank, _Rank.size, _Rank.host
    return True


def _is_shown(record: logging.LogRecord) -> bool:
    """Show warnings of every rank, and lower levels of rank 0 alone.

    Nothing where the root logger has handlers, which show all records themselves.
    """
    if logging.getLogger().handlers:
        return False
    return _Rank.rank == 0 or record.levelno >= logging.WARNING


def set_rank(rank: int, size: int, host: str) -> None:
    """Tell the loggers which process this is."""
    _Rank.rank, _Rank.size, _Rank.host = rank, size, host


def place() -> str:
    """Return this process's place as text, such as ``rank 1 of 4 on node03``."""
    return f"rank {_Rank.rank} of {_Rank.size} on {_Rank.host}"


def get_logger(name: str | None = None) -> logging.Logger:
    """Return a logger whose lines carry rank and host.

    Not collective.

    Parameters
    ----------
    name : str, optional
        Name below ``hpcstrat``; None gives the library's own.

    Returns
    -------
    logging.Logger
        Its records have the attributes ``rank``, ``size`` and ``host``, and propagate
        to the handlers of the program's root logger. Where that has none, and the
        program has not configured the logger ``hpcstrat`` before, warnings of every
        rank and lower levels of rank 0 go to standard error.
    """
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter(
                "[%(name)s %(rank)d/%(size)d %(host)s] %(levelname)s: %(message)s"
            )
        )
        handler.addFilter(_add_place)
        handler.addFilter(_is_shown)
        root.addHandler(handler)
    logger = root if name is None else root.getChild(name)
    # A logger passes on the records of its children without asking its own filters.
    logger.addFilter(_add_place)
    return logger


def print_once(*values: Any, **options: Any) -> None:
    """Print on rank 0 of the job only.

    Not collective.

    Parameters
    ----------
    *values : object
        As for ``print``.
    **options : object
        As for ``print``.
    """
    if _Rank.rank == 0:
        print(*values, **options)
        # Launchers read pipes, in which lines would be kept back.
        (options.get("file") or sys.stdout).flush()
