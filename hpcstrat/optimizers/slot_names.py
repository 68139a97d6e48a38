"""The names that an optimizer's state has in files: ``<kind>/<name of the variable>``.

A ``/`` in a variable's name makes groups of HDF5. Where that cannot be, the name is
escaped: ``dense`` cannot be a dataset, and the group of ``dense/bias``, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

__all__ = ["file_names", "spellings", "unescaped"]

_ESCAPES = {"%": "%25", "/": "%2F", ".": "%2E", "\0": "%00"}


def _escaped(name: str) -> str:
    return "".join(_ESCAPES.get(letter, letter) for letter in name)


def unescaped(path: str) -> str:
    """Return ``<kind>/<name>`` of a name that `file_names` has given."""
    kind, slash, name = path.partition("/")
    for letter, code in reversed(_ESCAPES.items()):
        name = name.replace(code, letter)
    return kind + slash + name


def spellings(name: str) -> list[str]:
    """Return the names under which files may have some state."""
    kind, slash, rest = name.partition("/")
    escaped = kind + slash + _escaped(rest)
    return [name] if escaped == name else [name, escaped]


def file_names(names: Sequence[str]) -> list[str]:
    """Return the names for files of ``<kind>/<name>``, each a dataset of its own.

    They depend on what there is, not on its order. Most are as given,
    as in old files.
    """
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        kind, _, name = twice[0].partition("/")
        raise ValueError(
            f"expected variables with names of their own to save the state of their "
            f"optimizer, found {kind} of several variables named {name!r}; name them "
            "with Variable(..., name=...)"
        )
    every = set(names)
    return [_file_name(name, every) for name in names]


def _file_name(name: str, every: set[str]) -> str:
    kind, slash, rest = name.partition("/")
    parts = rest.split("/")
    inside = any(
        "/".join([kind, *parts[:count]]) in every for count in range(1, len(parts))
    )
    unfit = any(part in ("", ".", "..") or "\0" in part for part in parts)
    ambiguous = any(code in rest for code in _ESCAPES.values())
    if slash and (inside or unfit or ambiguous):
        return f"{kind}/{_escaped(rest)}"
    return name
