"""Tables that cut no names, on terminals and in pipes."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

__all__ = ["add_row", "new_console", "new_table"]

_WIDE = 1 << 16


def new_console() -> Console:
    """Return where to print; lines have any length where that is no terminal.

    Not collective.

    Returns
    -------
    Console
        On standard output; brackets are no markup.
    """
    console = Console(markup=False)
    return console if console.is_terminal else Console(markup=False, width=_WIDE)


def new_table(*names: str) -> Table:
    """Return an empty table, whose words are folded where they have no room.

    Not collective.

    Parameters
    ----------
    *names : str
        Of the columns.

    Returns
    -------
    Table
        For `add_row`.
    """
    return Table(*(Column(name, overflow="fold") for name in names))


def add_row(table: Table, *words: Any) -> None:
    """Add a row; brackets in names are no markup.

    Not collective.

    Parameters
    ----------
    table : Table
        From `new_table`.
    *words : object
        One for each column.
    """
    table.add_row(*(Text(str(word)) for word in words))
