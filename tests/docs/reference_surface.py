"""The public names of tf.distribute, captured from TensorFlow itself.

With TensorFlow 2.21 installed, ``python -m tests.docs.reference_surface`` writes these
names to the file that the tests read.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

__all__ = ["FILE", "VERSION", "captured", "installed"]

FILE = Path(__file__).with_name("tf_distribute_names.json")
VERSION = "2.21"
# Members inherited from Python's own classes: enumerations and named tuples.
_OTHERS = {"value", "names", "module", "qualname", "type", "start", "boundary"}


def captured() -> dict[str, dict[str, Any]]:
    """Return each captured name with its versions, kind and parameters."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return found


def installed() -> dict[str, dict[str, Any]]:
    """Return the names, kinds and parameters of the installed TensorFlow."""
    import tensorflow as tf

    found: dict[str, dict[str, Any]] = {}
    for version, module in ((2, tf.distribute), (1, tf.compat.v1.distribute)):
        _walk(module, "", version, found)
    for entry in found.values():
        entry["versions"].sort()
        entry["parameters"].sort()
    return dict(sorted(found.items()))


def _walk(module: Any, prefix: str, version: int, found: dict[str, Any]) -> None:
    for name in (name for name in dir(module) if not name.startswith("_")):
        value, full = getattr(module, name), prefix + name
        if inspect.ismodule(value):
            _note(full, "module", (), version, found)
            _walk(value, f"{full}.", version, found)
        elif inspect.isclass(value):
            _note(full, "class", _parameters(value), version, found)
            _members(value, full, version, found)
        else:
            _note(full, "function", _parameters(value), version, found)


def _members(shown: type, full: str, version: int, found: dict[str, Any]) -> None:
    """Add the members of a class that no public base class has."""
    bases = [base for base in shown.__mro__[1:] if _is_public(base)]
    for name in (name for name in dir(shown) if not name.startswith("_")):
        if any(hasattr(base, name) for base in bases):
            continue
        held = inspect.getattr_static(shown, name)
        is_method = callable(getattr(held, "__func__", held))
        kind = "method" if is_method and not inspect.isclass(held) else "attribute"
        given = _parameters(getattr(shown, name)) if kind == "method" else ()
        _note(f"{full}.{name}", kind, given, version, found)


def _is_public(base: type) -> bool:
    import tensorflow as tf

    if base.__module__ == "builtins":
        return True
    known = [
        value
        for module in (tf.distribute, tf.compat.v1.distribute)
        for part in (module, module.cluster_resolver)
        for value in vars(part).values()
    ]
    return any(base is value for value in known)


def _parameters(called: Any) -> tuple[str, ...]:
    try:
        names = inspect.signature(called).parameters
    except (TypeError, ValueError):
        return ()
    left_out = {"self", "args", "kwargs"}
    if inspect.isclass(called) and "boundary" in names:
        left_out |= _OTHERS
    return tuple(
        name
        for name, parameter in names.items()
        if name not in left_out
        or (
            name in {"args", "kwargs"}
            and parameter.kind.name == "POSITIONAL_OR_KEYWORD"
        )
    )


def _note(
    full: str, kind: str, given: tuple[str, ...], version: int, found: dict[str, Any]
) -> None:
    entry = found.setdefault(full, {"versions": [], "kind": kind, "parameters": []})
    entry["versions"].append(version)
    entry["parameters"] += [name for name in given if name not in entry["parameters"]]


if __name__ == "__main__":
    lines = [f'"{name}": {json.dumps(entry)}' for name, entry in installed().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
