"""Output of commands on a terminal or in a pipe: help, tables and progress bars."""

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

# The width in a pipe. By default rich folds lines at 80 columns, which breaks scripts.
_WIDE = 1 << 16


class UncutGroup(click.Group):
    """A group of commands, whose help has the whole first sentence of each command."""

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the list of commands; click would cut each text to one line."""
        commands = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        rows = [
            (command.name or "", command.get_short_help_str(limit=1000))
            for command in commands
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def new_console(*, of_job: bool = False) -> Console:
    """Return a console for standard output; in a pipe it does not fold lines.

    Pass ``of_job`` on a rank: a rank of mpirun has a terminal, even if mpirun writes
    the rank's output to a file, in which color codes would be wrong.
    """
    if of_job:
        return Console(markup=False, color_system=None, width=_WIDE)
    # Turn markup off, because rich would interpret brackets in names of variables.
    console = Console(markup=False)
    return console if console.is_terminal else Console(markup=False, width=_WIDE)


def new_table(*names: str) -> Table:
    """Return an empty table that folds words that are too long."""
    return Table(*(Column(name, overflow="fold") for name in names))


def add_row(table: Table, *words: Any) -> None:
    """Add a row to a table of `new_table`, without interpreting brackets as markup."""
    table.add_row(*(Text(str(word)) for word in words))


@contextlib.contextmanager
def progress(nbytes: int, title: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error, if that is a terminal.

    Yields a function; call it with the number of bytes processed since its last call.
    """
    if not nbytes or not sys.stderr.isatty():
        yield lambda _: None
        return
    # Import the bar here, because most commands show none.
    from hpcstrat.metrics.progress_bar import Progress

    with Progress(nbytes, title, show=True) as bar:
        yield bar.advance
