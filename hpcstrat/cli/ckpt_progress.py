"""How far a long command is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import click

__all__ = ["progress"]


@contextlib.contextmanager
def progress(nbytes: int, title: str) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error, where that is a terminal.

    Not collective.

    Parameters
    ----------
    nbytes : int
        How much there is to do.
    title : str
        Shown in front of it.

    Yields
    ------
    callable
        To be called with the number of bytes that have been done since the last call.
    """
    if not nbytes or not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=nbytes, label=title, file=sys.stderr) as bar:
        yield bar.update
