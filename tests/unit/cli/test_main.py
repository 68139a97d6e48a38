"""The help texts of the commands."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from hpcstrat.cli.main import main


def _commands(command: click.Command, words: list[str]) -> Iterator[list[str]]:
    yield words
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from _commands(inner, [*words, name])


@pytest.mark.parametrize("words", list(_commands(main, [])), ids=" ".join)
def test_help_is_for_people_on_a_terminal(words: list[str]) -> None:
    shown = CliRunner().invoke(main, [*words, "--help"])
    assert shown.exit_code == 0
    # "Collective" statements are for the reference, not for the help texts.
    assert "ollective" not in shown.output
    _, _, commands = shown.output.partition("Commands:")
    # click would truncate a summary that does not fit into one line.
    assert "..." not in commands
    for line in shown.output.splitlines():
        assert len(line) <= 80
