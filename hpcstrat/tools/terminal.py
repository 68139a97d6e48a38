"""Output of commands on a terminal, or in a pipe: help, tables and bars, all uncut."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

__all__ = ["UncutGroup", "add_row", "new_console", "new_table", "progress"]

# rich folds to 80 columns where it finds no terminal, which no script could read.
_WIDE = 1 << 16


class UncutGroup(click.Group):
    """A group of commands whose help shows the first sentence of each, uncut."""

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the list of commands; click would cut each to one line."""
        commands = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        rows = [
            (command.name or "", command.get_short_help_str(limit=1000))
            for command in commands
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def new_console(*, of_job: bool = False) -> Console:
    """Return standard output; lines have any length where it is no terminal.

    ``of_job`` is that of a rank: mpirun gives ranks a terminal, and writes to a file.
    """
    if of_job:
        # Without colors: their codes would be in the file to which mpirun writes.
        return Console(markup=False, color_system=None, width=_WIDE)
    # Names of variables may hold brackets, which rich would take for markup.
    console = Console(markup=False)
    return console if console.is_terminal else Console(markup=False, width=_WIDE)


def new_table(*names: str) -> Table:
    """Return an empty table, whose words are folded where they have no room."""
    return Table(*(Column(name, overflow="fold") for name in names))


def add_row(table: Table, *words: Any) -> None:
    """Add a row to a `new_table`; brackets in names are no markup."""
    table.add_row(*(Text(str(word)) for word in words))


@contextlib.contextmanager
def progress(nbytes: int, title: str) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error, where that is a terminal.

    Yields a function to call with the number of bytes since its last call.
    """
    if not nbytes or not sys.stderr.isatty():
        yield lambda _: None
        return
    # Loaded here: most commands show no bar.
    from hpcstrat.metrics.progress_bar import Progress

    with Progress(nbytes, title, show=True) as bar:
        yield bar.advance
