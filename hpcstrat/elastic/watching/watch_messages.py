"""Messages between watchers, and from ranks to the watcher of their node: JSON lines.

Every message is checked before it is used: its length, its kind, its fields, and their
types. After a malformed message, the receiver closes the connection.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

__all__ = [
    "FROM_AGENT",
    "FROM_PEER",
    "FROM_RANK",
    "GREETINGS",
    "MalformedMessageError",
    "MessageStream",
    "read_message",
]

LONGEST_BYTES = 1 << 16

Kinds: TypeAlias = Mapping[str, Mapping[str, Callable[[Any], bool]]]
"""Kinds of messages, with a check of each field."""


class MalformedMessageError(ValueError):
    """Raised if received bytes are not one of the expected messages."""


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_file(value: Any) -> bool:
    """Return whether a value is the name of a file, and no path."""
    return isinstance(value, str) and value.replace("-", "").isalnum()


def _is_names(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) > 0 and all(map(_is_text, value))
    return is_list and len(set(value)) == len(value)


def _is_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


GREETINGS: Kinds = {
    "hello": dict.fromkeys(("version", "job", "name", "purpose", "nonce"), _is_text),
    "proof": {"proof": _is_text},
    "refused": {"reason": _is_text},
}
"""The messages by which two watchers prove to each other that they know the secret."""

FROM_PEER: Kinds = {
    "alive": {},
    # The sender has not heard from the receiver in time, and closes the connection.
    "dropped": {},
    "generation": {
        "number": _is_number,
        "leader": _is_text,
        "members": _is_names,
        "nodes": _is_names,
        "failures": _is_number,
        "blamed": _is_counts,
        "job": _is_text,
    },
    # No process of an older generation is left on the sender's node.
    "cleaned": {"number": _is_number},
    "progress": {"step": _is_number},
    "rank": {"number": _is_number},
    "rank_end": {"number": _is_number, "status": _is_number},
    # The snapshot of an order in the run's folder is to be written by these nodes.
    "save": {"order": _is_file, "nodes": _is_names},
    "end": {"reason": _is_text},
}
"""The messages of an authenticated watcher."""

FROM_AGENT: Kinds = {
    "command": {"number": _is_number, "line": _is_text},
}
"""The message of an authenticated agent of mpirun: a command to start."""

FROM_RANK: Kinds = {
    kind: FROM_PEER[kind] for kind in ("progress", "rank", "rank_end", "save")
}
"""The messages of processes of the node."""


def read_message(line: bytes, kinds: Kinds) -> dict[str, Any]:
    """Return the message in a line; MalformedMessageError if it is of no such kind."""
    try:
        message = json.loads(line.decode())
    # Deeply nested lists are a RecursionError.
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError(
            f"expected a line of JSON, found {line[:200]!r} ({error}); the sender is "
            "no watcher"
        ) from error
    kind = message.get("kind") if isinstance(message, dict) else None
    fields = kinds.get(kind) if isinstance(kind, str) else None
    if fields is None or set(message) != {"kind", *fields}:
        raise MalformedMessageError(
            f"expected a message of the kinds {', '.join(kinds)}, found "
            f"{line[:200]!r}; the sender is no watcher of this version"
        )
    for name, is_valid in fields.items():
        if not is_valid(message[name]):
            raise MalformedMessageError(
                f"expected a valid {name} in a message of the kind {kind}, found "
                f"{str(message[name])[:200]}; the sender is no watcher of this version"
            )
    return dict(message)


class MessageStream:
    """A connection; any thread may send messages, and one thread receives them."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received, self._sending = b"", threading.Lock()

    def __repr__(self) -> str:
        return f"MessageStream({self.socket!r})"

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; raises OSError, or TimeoutError if a part was not taken."""
        line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        with self._sending:
            self.socket.sendall(line)

    def receive(
        self, kinds: Kinds, until: float | None = None
    ) -> dict[str, Any] | None:
        """Return the next message, or None at the end of the connection.

        Raises MalformedMessageError, or OSError; TimeoutError at the time ``until``, or
        when the socket's own timeout is over.
        """
        while b"\n" not in self._received and len(self._received) <= LONGEST_BYTES:
            if until is not None:
                self.socket.settimeout(max(until - time.monotonic(), 1e-3))
            data = self.socket.recv(LONGEST_BYTES)
            if not data:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        if len(line) > LONGEST_BYTES:
            raise MalformedMessageError(
                f"expected lines of at most {LONGEST_BYTES} bytes, found a longer one; "
                "the sender is no watcher"
            )
        return read_message(line, kinds)

    def end(self) -> None:
        """End the connection, also for the thread that receives."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
