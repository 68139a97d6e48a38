"""The public definitions, which are shown in the reference in docs/api.

``python -m tests.docs.public`` checks their docstrings by numpydoc's rules.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hpcstrat

ROOT = Path(__file__).parents[2]
_DIRECTIVE = re.compile(
    r"^\.\. auto\w+:: (hpcstrat\.\S+)\n(?: +:members: (\S.*)\n)?", re.M
)
# Excluded checks: GL01, ES01, EX01, SA01 (text position; sections that only some
# docstrings need), and PR02 and RT01, which ignore dataclass fields and properties.
_CHECKS = {
    *("GL03", "GL05", "GL06", "GL07", "GL08", "GL10"),
    *("SS01", "SS02", "SS03", "SS04", "SS06"),
    *("PR01", "PR03", "PR04", "PR06", "PR07", "RT03", "YD01"),
}
# Text of members that the reference omits.
_INTERNAL = re.compile(r"\bfor\s+the\s+library's\s+own\s+modules\b", re.I)
# Text of a method with parameters and results like those of a named method.
_OLDER_NAME = "The older name of"
# Function whose docstring documents the parameters of the objects that it makes.
_OTHERWISE = "hpcstrat.Variable"


def is_installed(name: str) -> bool:
    """Return whether a name's framework is installed; True for other names."""
    parts = name.split(".")
    if parts[1] != "integrations":
        return True
    # The replacement of Horovod does not need Horovod itself.
    return find_spec(parts[3] if parts[2] == "horovod" else parts[2]) is not None


def _resolve(name: str) -> Any:
    first, *rest = name.split(".")
    value: Any = importlib.import_module(first)
    for part in rest:
        if inspect.ismodule(value) and not hasattr(value, part):
            importlib.import_module(f"{value.__name__}.{part}")
        value = getattr(value, part)
    return value


def names_of_reference() -> dict[str, list[str]]:
    """Return the full names in the reference, independent of installed frameworks.

    Each name has the members that the page selects; an empty list means all members.
    """
    names = [f"hpcstrat.{name}" for name in hpcstrat._HOMES]
    for module in hpcstrat._MODULES:
        loaded = getattr(hpcstrat, module)
        own = [name for name in loaded.__all__ if name not in hpcstrat.__all__]
        names += [f"hpcstrat.{module}.{name}" for name in own]
    shown = {name: list[str]() for name in sorted(set(names))}
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for name, members in _DIRECTIVE.findall(page.read_text()):
            shown[name] = members.split(", ") if members else []
    return shown


def shown_names() -> dict[str, list[str]]:
    """Return the names in the reference whose framework is installed."""
    every = names_of_reference()
    return {name: chosen for name, chosen in every.items() if is_installed(name)}


def _members(shown: type) -> Iterator[Any]:
    # Do not use dir(), which omits the methods of an enumeration.
    for name in sorted({name for base in shown.__mro__ for name in vars(base)}):
        owner = next(base for base in shown.__mro__ if name in vars(base))
        if not name.startswith("_") and owner.__module__.startswith("hpcstrat"):
            held = getattr(vars(owner)[name], "__func__", vars(owner)[name])
            found = inspect.unwrap(held)
            text = inspect.getdoc(held) or ""
            # A member with an inherited docstring is documented in its base class.
            is_described = bool(text) and not held.__doc__
            is_described |= text.startswith(_OLDER_NAME)
            if is_described or _INTERNAL.search(text):
                continue
            yield getattr(found, "fget", None) or getattr(found, "func", found)


def public_definitions() -> dict[tuple[str, str], str]:
    """Return each definition, by module and qualified name, with its public name."""
    found: dict[tuple[str, str], str] = {}
    for name, chosen in shown_names().items():
        value = _resolve(name)
        if inspect.isclass(value):
            # Of two public names, use the shorter one.
            found.setdefault((value.__module__, value.__qualname__), name)
            for member in _members(value):
                if not (inspect.isroutine(member) or inspect.isclass(member)):
                    continue
                if not chosen or member.__name__ in chosen:
                    key = member.__module__, member.__qualname__
                    found.setdefault(key, f"{name}.{member.__name__}")
        elif inspect.isroutine(value):
            value = inspect.unwrap(value)
            found[value.__module__, value.__qualname__] = name
    return {key: name for key, name in found.items() if key[0].startswith("hpcstrat")}


def _has_parameters(name: str) -> bool:
    """Return whether a name's own docstring documents its parameters."""
    value = _resolve(name)
    return not inspect.isclass(value) or (
        "__init__" in vars(value)
        and name != _OTHERWISE
        # Exclude protocols, to which typing adds an __init__.
        and not getattr(value, "_is_protocol", False)
    )


def main() -> int:
    """Print each fault that numpydoc finds; return the number of faults."""
    from numpydoc.validate import validate

    faults = [
        f"{name}: {code} {text}"
        for name in sorted(public_definitions().values())
        for code, text in validate(name)["errors"]
        if code in _CHECKS and (code != "PR01" or _has_parameters(name))
    ]
    print("\n".join(faults))
    return len(faults)


if __name__ == "__main__":
    sys.exit(bool(main()))
