"""Connections of a watcher with the watchers of all other nodes.

A thread owns all sockets; it sends a sign of life twice a second, and reports events to
the watcher's main thread, which may wait for files or processes meanwhile. Each pair of
watchers has one connection. Its end, or silence for some seconds, is the loss of a
node.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcstrat._version import __version__
from hpcstrat.elastic.watching.watch_messages import (
    FROM_AGENT,
    FROM_PEER,
    GREETINGS,
    LineBuffer,
    MalformedMessageError,
    check_message,
    encode,
)
from hpcstrat.elastic.watching.watch_secret import nonce, proof, proves

__all__ = ["Identity", "Mesh", "greet"]

_BEAT_SECONDS = 0.5
_GREETING_SECONDS = 5.0
_RETRY_SECONDS = 0.1
_MOST_STRANGERS = 256
_MOST_UNSENT_BYTES = 1 << 22


@dataclass(frozen=True)
class Identity:
    """A watcher's secret, the scheduler's job that it belongs to, and its node."""

    secret: bytes = field(repr=False)
    job: str
    node: str
    version: str = __version__


@dataclass(eq=False)
class _PeerConnection:
    """A connection; ``expects`` is the kind of the next greeting, empty after them."""

    socket: socket.socket
    expects: str
    name: str = ""
    purpose: str = "peer"
    nonces: tuple[str, str] = ("", "")
    began: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    unsent: bytes = b""
    lines: LineBuffer = field(default_factory=LineBuffer)


class Mesh:
    """The connections of one watcher, in a thread of their own.

    ``deliver`` is called in that thread with the kind of an event and its values:
    ``came`` and ``lost`` with a node, ``message`` with a node and a message,
    ``command`` with a message and a socket, ``log`` with a text. After
    ``silent_seconds`` a silent node counts as lost.
    """

    def __init__(
        self,
        identity: Identity,
        addresses: Mapping[str, tuple[str, int]],
        deliver: Callable[..., None],
        *,
        silent_seconds: float = 3.0,
    ) -> None:
        self._identity, self._deliver = identity, deliver
        self._addresses, self._silent_seconds = addresses, silent_seconds
        self._selector = selectors.DefaultSelector()
        self._open: dict[str, _PeerConnection] = {}
        self._lost: set[str] = set()
        self._greeting: set[_PeerConnection] = set()
        self._requests: collections.deque[Callable[[], None]] = collections.deque()
        self._wakeup, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # A connection is made by the node that comes later in the list.
        names = list(addresses)
        self._to_call = dict.fromkeys(names[: names.index(identity.node)], 0.0)
        self._logged: set[str] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __repr__(self) -> str:
        return f"Mesh({self._identity.node}, connected with {sorted(self._open)})"

    def start(self) -> None:
        """Listen on this node's port; OSError if another program has the port."""
        port = self._addresses[self._identity.node][1]
        try:
            self._listener = socket.create_server(("", port), backlog=128)
        except OSError as error:
            raise OSError(
                error.errno,
                f"expected port {port} of {self._identity.node} to be free for the "
                f"watcher, found: {error.strerror}; use --port",
            ) from error
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._thread.start()

    def send(self, names: Sequence[str], kind: str, **fields: Any) -> None:
        """Send a message to some nodes; those that are lost do not get it."""
        data = encode(kind, **fields)
        self._request(lambda: self._send_all(names, data))

    def drop(self, name: str) -> None:
        """Count a node as lost, and tell it so."""
        self._request(lambda: self._lose(name, "silent"))

    def doubtful(self, names: Iterable[str]) -> list[str]:
        """Return those of some connected nodes that have missed a sign of life.

        They speak again soon, or are lost soon.
        """
        limit, found = time.monotonic() - 2 * _BEAT_SECONDS, []
        for name in names:
            connection = self._open.get(name)
            # Without a connection, the event of the loss is under way.
            if connection is None or connection.heard < limit:
                found.append(name)
        return found

    def close(self) -> None:
        """Send what is left to send, and close all connections."""

        def close() -> None:
            self._closing = True

        self._request(close)
        self._thread.join(timeout=_GREETING_SECONDS)

    def _request(self, act: Callable[[], Any]) -> None:
        self._requests.append(act)
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"x")

    def _log(self, text: str) -> None:
        # A stranger that tries again and again fills no log, and ends no line of it.
        text = "".join(c if c.isprintable() else "?" for c in text)
        if text not in self._logged and len(self._logged) < 1000:
            self._logged.add(text)
            self._deliver("log", text)

    def _serve(self) -> None:
        try:
            self._serve_until_closed()
        except Exception as error:
            # Without this thread, the others take this node for lost.
            self._deliver("failed", f"{type(error).__name__}: {error}")

    def _serve_until_closed(self) -> None:
        next_beat, last = 0.0, time.monotonic()
        while not self._closing:
            for key, _ in self._selector.select(_RETRY_SECONDS):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wakeup:
                    os.read(self._wakeup, 4096)
                else:
                    self._receive(key.data)
            while self._requests:
                self._requests.popleft()()
            now, before = time.monotonic(), last
            last = now
            if now - before > 2 * _BEAT_SECONDS:
                self._allow_silence(now)
            if now >= next_beat:
                next_beat = now + _BEAT_SECONDS
                for connection in list(self._open.values()):
                    self._send(connection, encode("alive"))
            self._call_peers(now)
            # Received bytes are read first: after a stop of this process, the others
            # may have sent signs of life in time.
            self._look_for_silence(now)
        for connection in self._open.values():
            with contextlib.suppress(OSError):
                connection.socket.settimeout(1.0)
                connection.socket.sendall(connection.unsent)
            connection.socket.close()
        self._listener.close()

    def _allow_silence(self, now: float) -> None:
        """Give the others half of the time again.

        This process was stopped, or had no core, and the others perhaps as well.
        """
        for connection in self._open.values():
            again = now - self._silent_seconds / 2
            connection.heard = max(connection.heard, again)

    def _look_for_silence(self, now: float) -> None:
        for name, connection in list(self._open.items()):
            if now - connection.heard > self._silent_seconds:
                self._lose(name, "silent")
        for connection in list(self._greeting):
            # A stranger that sends a byte now and then keeps no place.
            if now - connection.began > _GREETING_SECONDS:
                self._refuse(connection, "a greeting took too long")

    def _lose(self, name: str, why: str) -> None:
        if name in self._lost:
            return
        self._lost.add(name)
        self._to_call.pop(name, None)
        if connection := self._open.pop(name, None):
            if why == "silent":
                # Without this, the other side would take the end of the connection for
                # the end of this watcher.
                self._send(connection, encode("dropped"))
            self._forget(connection)
        self._deliver("lost", name, why)

    def _forget(self, connection: _PeerConnection) -> None:
        self._greeting.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()

    def _end(self, connection: _PeerConnection, why: str) -> None:
        if self._open.get(connection.name) is connection:
            self._lose(connection.name, why)
        else:
            self._forget(connection)

    def _send_all(self, names: Sequence[str], data: bytes) -> None:
        for name in names:
            self._send(self._open.get(name), data)

    def _send(self, connection: _PeerConnection | None, data: bytes) -> None:
        if connection is None:
            return
        data = connection.unsent + data
        try:
            sent = connection.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            # The end of the connection is read as well, which reports it.
            return
        connection.unsent = data[sent:][-_MOST_UNSENT_BYTES:]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            stream, _ = self._listener.accept()
            if len(self._greeting) >= _MOST_STRANGERS:
                stream.close()
                return
            connection = self._add(stream, "hello")
            connection.nonces = (nonce(), "")
            challenge = encode(
                "challenge", version=self._identity.version, nonce=connection.nonces[0]
            )
            self._send(connection, challenge)

    def _add(self, stream: socket.socket, expects: str) -> _PeerConnection:
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _PeerConnection(stream, expects)
        self._greeting.add(connection)
        self._selector.register(stream, selectors.EVENT_READ, connection)
        return connection

    def _call_peers(self, now: float) -> None:
        for name, again in list(self._to_call.items()):
            if now < again or any(c.name == name for c in self._greeting):
                continue
            self._to_call[name] = now + _RETRY_SECONDS
            stream = socket.socket()
            stream.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                try:
                    stream.connect(self._addresses[name])
                except BlockingIOError:
                    raise
                except OSError:
                    stream.close()
                    continue
            self._add(stream, "challenge").name = name

    def _receive(self, connection: _PeerConnection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(connection, "closed")
            return
        connection.heard = time.monotonic()
        try:
            for message in connection.lines.feed(data):
                if connection.expects:
                    self._greet(connection, message)
                elif connection.purpose == "command":
                    self._take_command(connection, message)
                else:
                    self._take(connection, message)
        except MalformedMessageError as error:
            self._refuse(connection, str(error))

    def _take(self, connection: _PeerConnection, message: dict[str, Any]) -> None:
        kind = check_message(message, FROM_PEER)
        if self._open.get(connection.name) is not connection or kind == "alive":
            return
        if kind == "dropped":
            self._lose(connection.name, "silent")
        else:
            self._deliver("message", connection.name, message)

    def _take_command(
        self, connection: _PeerConnection, message: dict[str, Any]
    ) -> None:
        check_message(message, FROM_AGENT)
        self._greeting.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.setblocking(True)
        self._deliver("command", message, connection.socket)

    def _refuse(self, connection: _PeerConnection, reason: str) -> None:
        who = connection.name
        if not who:
            with contextlib.suppress(OSError, IndexError):
                who = str(connection.socket.getpeername()[0])
        self._log(f"a connection with {who} is closed: {reason}")
        if connection.expects:
            self._send(connection, encode("refused", reason=reason[:200]))
        self._end(connection, "closed")

    def _greet(self, connection: _PeerConnection, message: dict[str, Any]) -> None:
        kind = check_message(message, GREETINGS)
        if kind == "refused":
            raise MalformedMessageError(message["reason"])
        if kind != connection.expects:
            raise MalformedMessageError(
                f"expected the greeting {connection.expects}, found {kind}; the other "
                "side is no watcher of this run"
            )
        own = self._identity
        if kind == "challenge":
            answer = hello(own, "peer", message)
            connection.nonces = (message["nonce"], answer["nonce"])
            connection.expects = "welcome"
            self._send(connection, encode(**answer))
        elif kind == "welcome":
            check_welcome(own, message, connection.nonces)
            if message["name"] != connection.name:
                raise MalformedMessageError(
                    f"expected node {connection.name}, found {message['name']}; "
                    "correct the names of the nodes"
                )
            self._establish(connection)
        else:
            self._examine_hello(connection, message)

    def _examine_hello(
        self, connection: _PeerConnection, hello: dict[str, Any]
    ) -> None:
        own = self._identity
        connection.nonces = (connection.nonces[0], hello["nonce"])
        if hello["version"] != own.version:
            raise MalformedMessageError(_other_version(own.version, hello["version"]))
        words = [hello[word] for word in ("job", "name", "purpose")]
        if not proves(
            hello["proof"], own.secret, "connector", *connection.nonces, *words
        ):
            raise MalformedMessageError(
                "expected the secret of this run, found a wrong proof; is it a watcher "
                "of another run, or a stranger?"
            )
        # Everything below comes from somebody who knows the secret.
        if hello["job"] != own.job:
            raise MalformedMessageError(
                f"expected a watcher of job {own.job}, found one of {hello['job']}; "
                "two jobs use the same folder"
            )
        name, purpose = hello["name"], hello["purpose"]
        if purpose == "peer":
            if name not in self._addresses or name in self._open or name in self._lost:
                raise MalformedMessageError(
                    f"expected a new node of the job, found {name}, which is lost, "
                    "connected, or no node of the job; start one watcher for each node"
                )
        elif purpose != "command":
            raise MalformedMessageError(f"expected peer or command, found {purpose}")
        connection.name, connection.purpose = name, purpose
        welcome = proof(own.secret, "acceptor", *connection.nonces, own.node)
        self._send(connection, encode("welcome", name=own.node, proof=welcome))
        if purpose == "peer":
            self._establish(connection)
        else:
            connection.expects = ""

    def _establish(self, connection: _PeerConnection) -> None:
        connection.expects = ""
        self._greeting.discard(connection)
        self._to_call.pop(connection.name, None)
        self._open[connection.name] = connection
        self._deliver("came", connection.name)


def _other_version(own: str, other: str) -> str:
    return (
        f"expected hpcstrat {own} on every node, found {other}; use one environment on "
        "all nodes"
    )


def hello(own: Identity, purpose: str, challenge: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a challenge, as fields of a message."""
    if challenge["version"] != own.version:
        raise MalformedMessageError(_other_version(own.version, challenge["version"]))
    number = nonce()
    words = (challenge["nonce"], number, own.job, own.node, purpose)
    return {
        "kind": "hello",
        "version": own.version,
        "job": own.job,
        "name": own.node,
        "purpose": purpose,
        "nonce": number,
        "proof": proof(own.secret, "connector", *words),
    }


def check_welcome(
    own: Identity, welcome: Mapping[str, Any], nonces: tuple[str, str]
) -> None:
    """Raise MalformedMessageError unless the other side has proved the secret."""
    name, given = welcome["name"], welcome["proof"]
    if not proves(given, own.secret, "acceptor", *nonces, name):
        raise MalformedMessageError(
            "expected the secret of this run, found a wrong proof; another program has "
            "the port, or there are two runs"
        )


def greet(own: Identity, stream: socket.socket) -> None:
    """Greet a watcher over a blocking socket, to send it a command afterwards."""
    lines = LineBuffer()
    received: list[dict[str, Any]] = []

    def next_message(expected: str) -> dict[str, Any]:
        while not received:
            data = stream.recv(1 << 12)
            if not data:
                raise MalformedMessageError("the watcher has closed the connection")
            received.extend(lines.feed(data))
        message = received.pop(0)
        kind = check_message(message, GREETINGS)
        if kind != expected:
            found = message.get("reason", f"expected {expected}, found {kind}")
            raise MalformedMessageError(found)
        return message

    challenge = next_message("challenge")
    answer = hello(own, "command", challenge)
    stream.sendall(encode(**answer))
    nonces = (challenge["nonce"], answer["nonce"])
    check_welcome(own, next_message("welcome"), nonces)
