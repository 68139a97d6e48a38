"""The page on stability lists each public name with its stability."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.public import names_of_reference

PAGE = Path(__file__).parents[2] / "docs" / "stability.md"
ENTRY = re.compile(r"^`(hpcstrat[\w.]*)`\n: ((?:.+\n)+)", re.M)


def listed(heading: str) -> list[str]:
    """Return the full names that are listed below a heading of the page."""
    _, _, text = PAGE.read_text().partition(f"\n## {heading}\n")
    text, _, _ = text.partition("\n## ")
    return [
        f"{module}.{name}"
        for module, names in ENTRY.findall(text)
        for name in re.findall(r"`([\w.]+)`", names)
    ]


def test_each_public_name_is_stable_or_experimental() -> None:
    said = [*listed("Stable"), *listed("Experimental")]
    assert len(said) == len(set(said))
    public = names_of_reference().keys()
    assert not public - set(said), "add these to a list of docs/stability.md"
    assert not set(said) - public, "docs/stability.md lists what is not public"
