"""The definitions that users call: what the reference in docs/api shows.

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
# Left out: GL01, ES01, EX01, SA01 (text below the quotes; sections that only some
# need), PR02 and RT01, which take no notice of dataclass fields and of properties.
_CHECKS = {
    *("GL03", "GL05", "GL06", "GL07", "GL08", "GL10"),
    *("SS01", "SS02", "SS03", "SS04", "SS06"),
    *("PR01", "PR03", "PR04", "PR06", "PR07", "RT03", "YD01"),
}
# Says of a member that the reference leaves it out.
_INTERNAL = re.compile(r"\bfor\s+the\s+library's\s+own\s+modules\b", re.I)
# The text of a method that takes and returns what another one does, which it names.
_OLDER_NAME = "The older name of"
# Its text documents the parameters of what it makes.
_OTHERWISE = "hpcstrat.Variable"


def is_installed(name: str) -> bool:
    """Return whether the framework is there, where a name is of its integration."""
    parts = name.split(".")
    if parts[1] != "integrations":
        return True
    # Horovod itself is not needed for what stands in its place.
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
    """Return the full names that the reference has, whatever is installed.

    With the members that a page chooses to show of one; none stands for all.
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
    """Return those names of the reference whose framework is installed."""
    every = names_of_reference()
    return {name: chosen for name, chosen in every.items() if is_installed(name)}


def _members(shown: type) -> Iterator[Any]:
    # Not dir(), which leaves out the methods of an enumeration.
    for name in sorted({name for base in shown.__mro__ for name in vars(base)}):
        owner = next(base for base in shown.__mro__ if name in vars(base))
        if not name.startswith("_") and owner.__module__.startswith("hpcstrat"):
            held = getattr(vars(owner)[name], "__func__", vars(owner)[name])
            found = inspect.unwrap(held)
            text = inspect.getdoc(held) or ""
            # One that has the text of what it overrides is described there.
            is_described = bool(text) and not held.__doc__
            is_described |= text.startswith(_OLDER_NAME)
            if is_described or _INTERNAL.search(text):
                continue
            yield getattr(found, "fget", None) or getattr(found, "func", found)


def public_definitions() -> dict[tuple[str, str], str]:
    """Return each definition, as module and qualified name, and a name to reach it."""
    found: dict[tuple[str, str], str] = {}
    for name, chosen in shown_names().items():
        value = _resolve(name)
        if inspect.isclass(value):
            # Under the shorter one of two names.
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
    """Return whether a name's own docstring documents what it is called with."""
    module, _, attribute = name.rpartition(".")
    value = getattr(sys.modules.get(module), attribute, None)
    return not inspect.isclass(value) or (
        "__init__" in vars(value)
        and name != _OTHERWISE
        # typing gives a protocol an __init__ of its own.
        and not getattr(value, "_is_protocol", False)
    )


def main() -> int:
    """Print each fault that numpydoc finds; return how many there are."""
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
