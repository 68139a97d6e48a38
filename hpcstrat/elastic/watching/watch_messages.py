"""Messages between watchers, and from ranks to the watcher of their node: JSON lines.

Every message is checked before it is used: its length, its kind, its fields, and their
types. A malformed message is an error, after which the receiver closes the connection.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "FROM_AGENT",
    "FROM_PEER",
    "FROM_RANK",
    "GREETINGS",
    "LineBuffer",
    "MalformedMessageError",
    "check_message",
    "encode",
    "normalized",
]

LONGEST_BYTES = 1 << 16
_MOST_WORDS = 4096
_LONGEST_NAME = 255

_Check = Callable[[Any], bool]


class MalformedMessageError(ValueError):
    """Raised if received bytes are not one of the expected messages."""


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_NAME


def _is_file(value: Any) -> bool:
    """Return whether a value is the name of a file, and no path."""
    return _is_name(value) and bool(value.replace("-", "").isalnum())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_words(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= _MOST_WORDS
        and all(_is_text(word) for word in value)
    )


def _is_names(value: Any) -> bool:
    return (
        _is_words(value) and all(map(_is_name, value)) and len(set(value)) == len(value)
    )


def _is_counts(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= _MOST_WORDS
        and all(_is_name(name) and _is_number(count) for name, count in value.items())
    )


GREETINGS: Mapping[str, Mapping[str, _Check]] = {
    "challenge": {"version": _is_name, "nonce": _is_name},
    "hello": {
        "version": _is_name,
        "job": _is_name,
        "name": _is_name,
        "purpose": _is_name,
        "nonce": _is_name,
        "proof": _is_name,
    },
    "welcome": {"name": _is_name, "proof": _is_name},
    "refused": {"reason": _is_text},
}
"""The messages by which two watchers prove to each other that they know the secret."""

FROM_PEER: Mapping[str, Mapping[str, _Check]] = {
    "alive": {},
    # The sender has not heard from the receiver in time, and closes the connection.
    "dropped": {},
    "generation": {
        "number": _is_number,
        "leader": _is_name,
        "members": _is_names,
        "nodes": _is_names,
        "failures": _is_number,
        "blamed": _is_counts,
    },
    # No process of an older generation is left on the sender's node.
    "cleaned": {"number": _is_number},
    "progress": {"step": _is_number},
    "rank_came": {"number": _is_number},
    "rank_ended": {"number": _is_number, "status": _is_number},
    "save": {"order": _is_file, "nodes": _is_names},
    "end": {"reason": _is_name},
}
"""The messages of an authenticated watcher."""

FROM_AGENT: Mapping[str, Mapping[str, _Check]] = {
    "command": {"number": _is_number, "line": _is_text, "folder": _is_text},
}
"""The message of an authenticated agent of mpirun: a command to start."""

FROM_RANK: Mapping[str, Mapping[str, _Check]] = {
    "rank": {"number": _is_number},
    "rank_end": {"number": _is_number, "status": _is_number},
    "progress": {"step": _is_number},
    # The snapshot of an order in the run's folder is to be written by these nodes.
    "save": {"order": _is_file, "nodes": _is_names},
}
"""The messages of processes of the node, as `normalized` returns them."""


def encode(kind: str, **fields: Any) -> bytes:
    """Return a message as one line."""
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


def check_message(
    message: Mapping[str, Any], kinds: Mapping[str, Mapping[str, _Check]]
) -> str:
    """Return the kind of a message; raise MalformedMessageError if it is not one."""
    kind = message.get("kind")
    fields = kinds.get(kind) if isinstance(kind, str) else None
    if fields is None or set(message) != {"kind", *fields}:
        raise MalformedMessageError(
            f"expected a message of the kinds {', '.join(kinds)}, found "
            f"{str(dict(message))[:200]}; the sender is no watcher of this version"
        )
    for name, is_valid in fields.items():
        if not is_valid(message[name]):
            raise MalformedMessageError(
                f"expected a valid {name} in a message of the kind {kind}, found "
                f"{str(message[name])[:200]}; the sender is no watcher of this version"
            )
    return str(kind)


def normalized(message: dict[str, Any]) -> dict[str, Any]:
    """Return a process's message with its kind: ``{"progress": 7}`` has none."""
    match message:
        case {"kind": _}:
            return message
        case {"progress": step}:
            return {"kind": "progress", "step": step}
        case {"save": order, "nodes": nodes}:
            return {"kind": "save", "order": order, "nodes": nodes}
    return message


class LineBuffer:
    """Bytes of a connection that are not yet a whole line."""

    def __init__(self) -> None:
        self._bytes = b""

    def __repr__(self) -> str:
        return f"LineBuffer({len(self._bytes)} bytes)"

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Add received bytes, and return the messages that are now complete."""
        *lines, self._bytes = (self._bytes + data).split(b"\n")
        if any(len(line) > LONGEST_BYTES for line in (*lines, self._bytes)):
            raise MalformedMessageError(
                f"expected lines of at most {LONGEST_BYTES} bytes, found a longer one; "
                "the sender is no watcher"
            )
        return [_decode(line) for line in lines]


def _decode(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line.decode())
    # Deeply nested lists are a RecursionError.
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError(
            f"expected a line of JSON, found {line[:200]!r} ({error}); the sender is "
            "no watcher"
        ) from error
    if not isinstance(message, dict):
        raise MalformedMessageError(
            f"expected an object of JSON, found {line[:200]!r}; the sender is no "
            "watcher"
        )
    return message
