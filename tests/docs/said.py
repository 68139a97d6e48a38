"""Messages that pages show, and the check that a program has printed them.

A text block with a comment after it, which is invisible to readers, is a message::

    ```text
    expected 4 ranks, found 1; ...
    ```
    <!-- said: too-few -->

A test that provokes the message calls `assert_said`. Numbers and paths may differ, and
``...`` matches any text.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["assert_said", "messages"]

_DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```text\n((?:(?!```).*\n)+)```\n+<!-- said: (\S+) -->$", re.M)


def messages() -> dict[str, str]:
    """Return the messages of all pages, by name."""
    pages = sorted(_DOCS.rglob("*.md"))
    found = [pair for page in pages for pair in _BLOCK.findall(page.read_text())]
    names = [name for _, name in found]
    assert len(names) == len(set(names)), names
    return {name: text for text, name in found}


def _pattern(text: str) -> str:
    """Return the regular expression that matches a message."""

    def word_of(word: str) -> str:
        parts = re.split(r"(\.\.\.|\d+|[^\s'`;,]*/[^\s'`;,]*)", word)
        return "".join(
            ".*?"
            if part == "..."
            else r"\d+"
            if part.isdigit()
            else r"[^\s'`;,]+"
            if "/" in part
            else re.escape(part)
            for part in parts
        )

    return r"\s+".join(word_of(word) for word in text.split())


def assert_said(name: str, output: str) -> None:
    """Raise unless an output contains the message of this name."""
    text = messages()[name]
    assert re.search(_pattern(text), output, re.DOTALL), f"{text}\nnot in\n{output}"
