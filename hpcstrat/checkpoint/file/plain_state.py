"""Conversion of a program's plain state to JSON and back, with the types of values.

Values that JSON supports are written as they are. Any other value becomes an object
with one key, which begins with ``$``; ``docs/checkpoint-format.md`` lists the keys.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

__all__ = ["MOST_STATE_BYTES", "as_text", "from_text", "is_typed"]

MOST_STATE_BYTES = 256 << 20
"""Largest plain state of all objects together; readers refuse larger states."""

# A level of state becomes up to three levels of JSON, and readers allow about 1000.
_MOST_DEPTH = 100
# Larger integers are written in hexadecimal, because Python can be set to refuse
# decimal numbers of more than 640 digits.
_MOST_INT = 1 << 2048
_MOST_SHOWN = 8
_UNCHANGED = frozenset({type(None), bool, float})
_PAIRS: dict[type, str] = {
    dict: "$dict",
    OrderedDict: "$OrderedDict",
    Counter: "$Counter",
}
_ITEMS: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_OTHERS: dict[type, Callable[[Any], Any]] = {
    int: hex,
    str: lambda value: value.encode("utf-8", "surrogatepass").hex(),
    bytes: lambda value: base64.b64encode(value).decode(),
    bytearray: lambda value: base64.b64encode(value).decode(),
    complex: lambda value: [value.real, value.imag],
}
# NumPy's scalar types by name, without longdouble, which differs between machines.
_SCALARS: dict[str, type] = {
    np.dtype(kind).name: np.dtype(kind).type for kind in "?bhilBHILefdFD"
}


class _UnkeptError(Exception):
    """Error for a value that JSON cannot keep; ``place`` is its path in reverse."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found)
        self.found, self.advice = found, advice
        self.place: list[str] = []


def as_text(name: str, state: Any) -> bytes:
    """Return the state of an object as JSON in ASCII; ``name`` is for error messages.

    Raises ValueError if `from_text` would not return the same state.
    """
    try:
        # Python's JSON keeps NaN and infinities, too.
        return json.dumps(_plain(state, 0)).encode()
    except _UnkeptError as error:
        place = "".join(error.place[: -_MOST_SHOWN - 1 : -1])
        place += "..." * (len(error.place) > _MOST_SHOWN)
        raise ValueError(
            f"expected plain state of {name!r} that a restore returns unchanged, found "
            f"{error.found} at state{place}; {error.advice}"
        ) from None


def is_typed(text: bytes) -> bool:
    """Return whether a text from `as_text` has types that plain JSON does not have."""
    # In a JSON string, these bytes cannot occur: a quote has a backslash before it.
    return b'{"$' in text


def from_text(text: bytes, *, typed: bool = True) -> Any:
    """Return the state of JSON text; ``typed`` is False for format versions 1 and 2."""
    # Make an object for each NaN: in a set, a shared NaN object would be one element.
    return json.loads(text, object_hook=_built if typed else None, parse_constant=float)


def _plain(value: Any, depth: int) -> Any:
    """Return a value as objects that ``json.dumps`` accepts."""
    # Compare exact types, because a restore would return a subclass (such as an
    # enumeration) as its base class.
    kind = type(value)
    if kind in _UNCHANGED or (kind is int and -_MOST_INT < value < _MOST_INT):
        return value
    if kind is str and _is_text(value):
        return value
    if depth > _MOST_DEPTH:
        raise _UnkeptError(
            f"lists and dicts nested more than {_MOST_DEPTH} deep",
            "flatten them",
        )
    if kind is list:
        return _plain_items(value, depth)
    if kind in _PAIRS:
        return _plain_pairs(value, kind, depth)
    if kind in _ITEMS:
        return {_ITEMS[kind]: _plain_items(value, depth)}
    if kind in _OTHERS:
        return {f"${kind.__name__}": _OTHERS[kind](value)}
    return _plain_scalar(value)


def _plain_items(values: Collection[Any], depth: int) -> list[Any]:
    if isinstance(values, list) and _is_uniform(values):
        return values
    found = []
    for index, value in enumerate(values):
        try:
            found.append(_plain(value, depth + 1))
        except _UnkeptError as error:
            unordered = isinstance(values, (set, frozenset))
            error.place.append(" in a set" if unordered else f"[{index}]")
            raise
    return found


def _is_uniform(values: list[Any]) -> bool:
    """Return True if a quick check shows that JSON keeps all items of a long list."""
    kinds = set(map(type, values))
    if kinds <= _UNCHANGED:
        return True
    return kinds == {int} and -_MOST_INT < min(values) <= max(values) < _MOST_INT


def _plain_pairs(values: Mapping[Any, Any], kind: type, depth: int) -> Any:
    found = []
    for key, value in values.items():
        try:
            found.append([_plain(key, depth + 1), _plain(value, depth + 1)])
        except _UnkeptError as error:
            error.place.append(f"[{key!r}]")
            raise
    # Keys in JSON are text, and a key that begins with "$" marks a typed value.
    if kind is dict and all(type(key) is str and key[:1] != "$" for key, _ in found):
        return dict(found)
    return {_PAIRS[kind]: found}


def _plain_scalar(value: Any) -> Any:
    """Return a NumPy scalar as a JSON object; raise _UnkeptError for other values."""
    kind = type(value)
    name = value.dtype.name if isinstance(value, np.generic) else ""
    if _SCALARS.get(name) is kind:
        number = value.item()
        parts = [number.real, number.imag] if isinstance(number, complex) else number
        return {"$numpy": [name, parts]}
    found = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    advice = "return numbers, text, bytes, None, and lists, tuples, sets and dicts"
    bases = (int, float, complex, str, bytes, list, tuple, set, dict)
    base = next((base for base in bases if isinstance(value, base)), None)
    if base is not None:
        # Refuse it, because after a restore the value would be of the base class.
        name = base.__name__
        advice = f"turn it into {name} before a save, and back after a restore"
    elif hasattr(value, "__array__") and not isinstance(value, np.generic):
        advice = "keep arrays and tensors in Variables, and give these to the manager"
    raise _UnkeptError(f"a value of type {found}", advice)


def _is_text(value: str) -> bool:
    """Return whether JSON keeps a text: one without unpaired surrogates."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _built(found: dict[str, Any]) -> Any:
    """Return the value for a JSON object: a typed value, or ``found`` itself."""
    if len(found) != 1:
        return found
    ((kind, content),) = found.items()
    if not kind.startswith("$"):
        return found
    return _BUILDERS[kind](content)


def _pairs(make: Callable[[Iterable[tuple[Any, Any]]], Any]) -> Callable[[Any], Any]:
    return lambda content: make((key, value) for key, value in content)


def _number(content: Any) -> Any:
    name, value = content
    kind = _SCALARS[name]
    return kind(complex(*value) if isinstance(value, list) else value)


_BUILDERS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda content: int(content, 16),
    "$str": lambda content: bytes.fromhex(content).decode("utf-8", "surrogatepass"),
    "$bytes": base64.b64decode,
    "$bytearray": lambda content: bytearray(base64.b64decode(content)),
    "$complex": lambda content: complex(*content),
    "$numpy": _number,
    "$dict": _pairs(dict),
    "$OrderedDict": _pairs(OrderedDict),
    "$Counter": _pairs(lambda pairs: Counter(dict(pairs))),
    **{tag: kind for kind, tag in _ITEMS.items()},
}
