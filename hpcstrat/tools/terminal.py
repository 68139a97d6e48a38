"""Output of commands on a terminal, or in a pipe: help, tables and bars, never cut."""

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

# rich folds to 80 columns without a terminal, which scripts could not read.
_WIDE = 1 << 16


class UncutGroup(click.Group):
    """A group of commands whose help shows the first sentence of each in full."""

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
    """Return standard output; without a terminal, lines have any length.

    ``of_job`` is for a rank: mpirun gives ranks a terminal, but writes to a file.
    """
    if of_job:
        # Without colors: their codes would be in the file to which mpirun writes.
        return Console(markup=False, color_system=None, width=_WIDE)
    # Names of variables may contain brackets, which rich would take for markup.
    console = Console(markup=False)
    return console if console.is_terminal else Console(markup=False, width=_WIDE)


def new_table(*names: str) -> Table:
    """Return an empty table, whose words wrap if they do not fit."""
    return Table(*(Column(name, overflow="fold") for name in names))


def add_row(table: Table, *words: Any) -> None:
    """Add a row to a `new_table`; brackets in names are no markup."""
    table.add_row(*(Text(str(word)) for word in words))


@contextlib.contextmanager
def progress(nbytes: int, title: str) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error, if that is a terminal.

    Yields a function to call with the number of bytes since its last call.
    """
    if not nbytes or not sys.stderr.isatty():
        yield lambda _: None
        return
    # Imported here, because most commands show no bar.
    from hpcstrat.metrics.progress_bar import Progress

    with Progress(nbytes, title, show=True) as bar:
        yield bar.advance
