"""The versions of other libraries that the adapters need."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec

__all__ = ["require"]


def require(name: str, least: str, distribution: str | None = None) -> None:
    """Refuse a library that is missing or too old; imports nothing of it."""
    distribution = distribution or name
    if find_spec(name) is None:
        raise ImportError(
            f"expected {distribution} {least} or newer, found none; install it: "
            f"pip install '{distribution}>={least}'"
        )
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        # Importable, but not installed: a build in its own folder.
        return
    if _numbers(found) < _numbers(least):
        raise ImportError(
            f"expected {distribution} {least} or newer, found {found}; upgrade it: "
            f"pip install '{distribution}>={least}'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers before a local part or a mark such as rc1."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
