"""The code blocks of a page, and how they are run: ``python -m tests.docs.page``.

The words after the language of a fenced block say where it runs:

=================  ====================================================================
``python``         everywhere: in one process, and on two ranks if the page makes a
                   strategy on MPI
``python ranks``   on two ranks only
``python gpu``     with CuPy, in one process and on two ranks: see tests/gpu
``python no-run``  nowhere; for programs of other libraries
=================  ====================================================================

Blocks of other languages are text. All blocks of a page that run share one namespace.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Block", "blocks", "run"]

_FENCE = re.compile(r"^( *)```+([^\n`]*)$")
WORDS = {"", "ranks", "gpu", "no-run"}


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Parameters
    ----------
    line : int
        Number of its first line of code.
    language : str
        First word after the fence.
    where : str
        The other words.
    code : str
        Its lines.
    """

    line: int
    language: str
    where: str
    code: str


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    opened: tuple[int, str, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if fence and opened is None:
            language, _, where = fence.group(2).strip().partition(" ")
            opened, lines = (number + 1, language, where.strip()), []
        elif fence and opened is not None:
            yield Block(*opened, "\n".join(lines) + "\n")
            opened = None
        elif opened is not None:
            lines.append(line)


def runnable(page: Path, size: int, extra: str = "") -> list[Block]:
    """Return the blocks that run in a job of this many ranks, and those of a word."""
    wanted = {"", extra} if size == 1 else {"", "ranks", extra}
    return [
        block
        for block in blocks(page.read_text())
        if block.language == "python" and block.where in wanted
    ]


def run(page: Path, size: int, extra: str = "") -> None:
    """Run a page's blocks, in order; errors are shown with the page's own lines."""
    namespace = {"__name__": "__main__", "__file__": str(page)}
    for block in runnable(page, size, extra):
        code = "\n" * (block.line - 1) + block.code
        exec(compile(code, str(page), "exec"), namespace)


if __name__ == "__main__":
    path, folder = Path(sys.argv[1]).resolve(), sys.argv[2]
    os.chdir(folder)
    run(path, int(sys.argv[3]), *sys.argv[4:])
