"""HTML tables by which notebooks show an object."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

__all__ = ["table"]

_MOST_CHARACTERS = 2000


def table(title: str, rows: Mapping[str, Any]) -> str:
    """Return an HTML table with a title and a row for each pair, with escaped text."""
    cells = "".join(
        f'<tr><th style="text-align: left; vertical-align: top">{escape(name)}</th>'
        f'<td style="text-align: left"><pre style="margin: 0">{escape(_text(value))}'
        "</pre></td></tr>"
        for name, value in rows.items()
    )
    caption = f'<caption style="text-align: left">{escape(title)}</caption>'
    return f"<table>{caption}<tbody>{cells}</tbody></table>"


def _text(value: Any) -> str:
    text = str(value)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]} ... ({len(text)} characters in all)"
