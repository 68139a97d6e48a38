"""The command ``hpcstrat``, which also works on a login node, without MPI."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcstrat.cli.main import main as main

__all__ = ["main", "start"]


def start() -> Any:
    """Run the command of the command line."""
    if sys.argv[1:2] == ["watch"]:
        # Watchers start at once, because they load none of the other commands.
        from hpcstrat.elastic.watching.watch_command import watch

        return watch(sys.argv[2:])
    from hpcstrat.cli.main import main

    return main()


def __getattr__(name: str) -> Any:
    """Load the group of commands when it is first used."""
    if name != "main":
        raise AttributeError(f"module 'hpcstrat.cli' has no attribute {name!r}")
    from hpcstrat.cli.main import main

    return main
