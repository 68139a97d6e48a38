"""The start of the command ``hpcstrat``, also as ``python -m hpcstrat``."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["start"]


def start() -> Any:
    """Run the command of the command line."""
    if sys.argv[1:2] == ["watch"]:
        # Watchers start at once, because they load none of the other commands.
        from hpcstrat.elastic.watching.watch_command import watch

        return watch(sys.argv[2:])
    from hpcstrat.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(start())
