"""Groups of commands."""

from __future__ import annotations

import click

__all__ = ["Group"]


class Group(click.Group):
    """A group whose help shows the first sentence of each command, uncut."""

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the list of commands; click would cut each to one line.

        Not collective.

        Parameters
        ----------
        ctx : Context
            Of the group.
        formatter : HelpFormatter
            Where the list goes.
        """
        commands = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        rows = [
            (command.name or "", command.get_short_help_str(limit=1000))
            for command in commands
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
