"""Connections of a watcher with the watchers of all other nodes.

Each pair of watchers has one connection, which a thread reads. Its end, or silence for
some seconds, is the loss of a node. Another thread sends a sign of life twice a second;
the watcher's main thread may wait for files or processes meanwhile.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcstrat._version import __version__
from hpcstrat.elastic.watching.watch_messages import (
    FROM_AGENT,
    FROM_PEER,
    GREETINGS,
    MalformedMessageError,
    MessageStream,
)
from hpcstrat.elastic.watching.watch_secret import proof, proves

__all__ = ["Identity", "Mesh", "greet"]

_BEAT_SECONDS = 0.5
_GREETING_SECONDS = 5.0
_RETRY_SECONDS = 0.1
_MOST_STRANGERS = 256


@dataclass(frozen=True)
class Identity:
    """A watcher's secret, the scheduler's job that it belongs to, and its node."""

    secret: bytes = field(repr=False)
    job: str
    node: str
    version: str = __version__


def _accept_all(hello: Mapping[str, Any]) -> None:
    del hello


def greet(
    own: Identity,
    stream: MessageStream,
    purpose: str,
    check: Callable[[Mapping[str, Any]], None] = _accept_all,
) -> dict[str, Any]:
    """Exchange proofs of the secret, and return what the other side says of itself.

    ``purpose`` is that of the connecting side, ``peer`` or ``command``; the other side
    passes none. Both sides send a hello with a random number. The connecting side then
    proves the secret first, so that strangers get no proof; a proof is that of a role,
    and of both hellos. ``check`` may refuse a side that knows the secret, by raising
    MalformedMessageError.
    """
    until = time.monotonic() + _GREETING_SECONDS

    def next_of(kind: str) -> dict[str, Any]:
        message = stream.receive(GREETINGS, until)
        if message is None:
            raise ConnectionError("the other side has closed the connection")
        if message["kind"] == "refused":
            raise MalformedMessageError(message["reason"])
        if message["kind"] != kind:
            raise MalformedMessageError(
                f"expected the greeting {kind}, found {message['kind']}; the other "
                "side is no watcher of this run"
            )
        return message

    mine: dict[str, Any] = {
        "kind": "hello",
        "version": own.version,
        "job": own.job,
        "name": own.node,
        "purpose": purpose,
        "nonce": secrets.token_hex(16),
    }
    stream.send(**mine)
    other = next_of("hello")
    if other["version"] != own.version:
        raise MalformedMessageError(
            f"expected hpcstrat {own.version} on every node, found {other['version']}; "
            "use one environment on all nodes"
        )
    roles, hellos = ("connector", "acceptor"), (mine, other)
    if not purpose:
        roles, hellos = roles[::-1], hellos[::-1]
    else:
        stream.send("proof", proof=proof(own.secret, roles[0], *hellos))
    if not proves(next_of("proof")["proof"], own.secret, roles[1], *hellos):
        raise MalformedMessageError(
            "expected the secret of this run, found a wrong proof; the other side is a "
            "watcher of another run, or another program has the port"
        )
    # Everything below comes from somebody who knows the secret.
    if other["job"] != own.job:
        raise MalformedMessageError(
            f"expected a watcher of job {own.job}, found one of {other['job']}; two "
            "jobs use the same folder"
        )
    check(other)
    if not purpose:
        stream.send("proof", proof=proof(own.secret, roles[0], *hellos))
    return other


class Mesh:
    """The connections of one watcher, in threads of their own.

    ``deliver`` is called in these threads with the kind of an event and its values:
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
        self._peers: dict[str, MessageStream] = {}
        self._heard: dict[str, float] = {}
        self._lost: set[str] = set()
        self._changing = threading.Lock()
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        self._logged: set[str] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"Mesh({self._identity.node}, connected with {sorted(self._peers)})"

    def start(self) -> None:
        """Listen on this node's port; OSError if another program has the port."""
        node = self._identity.node
        port = self._addresses[node][1]
        try:
            self._listener = socket.create_server(("", port), backlog=256)
        except OSError as error:
            raise OSError(
                error.errno,
                f"expected port {port} of {node} to be free for the watcher, found: "
                f"{error.strerror}; use --port",
            ) from error
        self._begin(self._accept)
        self._begin(self._send_signs_of_life)
        # A connection is made by the node that comes later in the list.
        names = list(self._addresses)
        for name in names[: names.index(node)]:
            self._begin(self._call, name)

    def send(self, names: Iterable[str], kind: str, **fields: Any) -> None:
        """Send a message to some nodes; those that are lost do not get it."""
        for name in names:
            if name == self._identity.node:
                self._deliver("message", name, {"kind": kind, **fields})
            elif stream := self._peers.get(name):
                try:
                    stream.send(kind, **fields)
                except TimeoutError:
                    self.lose(name)
                except OSError:
                    # The thread that reads the connection reports its end.
                    continue

    def doubtful(self, names: Iterable[str]) -> list[str]:
        """Return those of some connected nodes that have missed a sign of life.

        They speak again soon, or are lost soon.
        """
        limit = time.monotonic() - 2 * _BEAT_SECONDS
        # Without a connection, the event of the loss is under way.
        return [
            name
            for name in names
            if name not in self._peers or self._heard[name] < limit
        ]

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        MessageStream(self._listener).end()
        self._listener.close()
        for stream in list(self._peers.values()):
            stream.end()

    def _begin(self, act: Callable[..., None], *values: Any) -> None:
        """Call a function in a thread; an error ends the watcher.

        Without one of its threads, others could take this node for lost.
        """

        def run() -> None:
            try:
                act(*values)
            except Exception as error:
                self._deliver("failed", f"{type(error).__name__}: {error}")

        threading.Thread(target=run, daemon=True).start()

    def _log(self, text: str) -> None:
        # A stranger that tries again and again fills no log, and ends no line of it.
        text = "".join(c if c.isprintable() else "?" for c in text)
        if text not in self._logged and len(self._logged) < 1000:
            self._logged.add(text)
            self._deliver("log", text)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, address = self._listener.accept()
            except OSError:
                # There are too many open files, or the mesh was closed.
                time.sleep(_RETRY_SECONDS)
                continue
            if self._strangers.acquire(blocking=False):
                self._begin(self._converse, connection, address[0])
            else:
                connection.close()

    def _call(self, name: str) -> None:
        """Connect with a node, as soon as its watcher is there."""
        while not (self._is_closed or name in self._lost):
            with contextlib.suppress(OSError):
                address, limit = self._addresses[name], _GREETING_SECONDS
                connection = socket.create_connection(address, timeout=limit)
                self._converse(connection, name, is_known=True)
            time.sleep(_RETRY_SECONDS)

    def _send_signs_of_life(self) -> None:
        while not self._is_closed:
            self.send(list(self._peers), "alive")
            time.sleep(_BEAT_SECONDS)

    def _converse(
        self, connection: socket.socket, name: str, *, is_known: bool = False
    ) -> None:
        """Greet the other side, and take its command, or messages until its end."""
        stream, why = MessageStream(connection), "closed"

        def check(hello: Mapping[str, Any]) -> None:
            self._check(hello, name if is_known else None)

        try:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hello = greet(self._identity, stream, "peer" if is_known else "", check)
            except TimeoutError:
                raise MalformedMessageError("the greeting took too long") from None
            finally:
                if not is_known:
                    self._strangers.release()
            if hello["purpose"] == "command":
                if message := stream.receive(FROM_AGENT):
                    connection.settimeout(None)
                    self._deliver("command", message, connection.dup())
                return
            name = hello["name"]
            with self._changing:
                if name in self._peers or name in self._lost:
                    return
                self._heard[name] = time.monotonic()
                self._peers[name] = stream
            self._deliver("came", name)
            why = self._listen(name, stream)
        except MalformedMessageError as error:
            self._log(f"a connection with {name} is closed: {error}")
            with contextlib.suppress(OSError):
                stream.send("refused", reason=str(error)[:200])
        except OSError:
            pass
        finally:
            if self._peers.get(name) is stream:
                self.lose(name, why)
            connection.close()

    def _check(self, hello: Mapping[str, Any], expected: str | None) -> None:
        """Refuse a watcher of another node than expected, or a second one of a node."""
        name, purpose = hello["name"], hello["purpose"]
        if expected is not None:
            if name != expected:
                raise MalformedMessageError(
                    f"expected node {expected}, found {name}; correct the names of the "
                    "nodes"
                )
        elif purpose == "peer":
            if name not in self._addresses or name in {*self._peers, *self._lost}:
                raise MalformedMessageError(
                    f"expected a new node of the job, found {name}, which is lost, "
                    "connected, or no node of the job; start one watcher for each node"
                )
        elif purpose != "command":
            raise MalformedMessageError(f"expected peer or command, found {purpose}")

    def _listen(self, name: str, stream: MessageStream) -> str:
        """Take the messages of a node until its loss, and return how it was lost."""
        misses, seconds = 0, min(_BEAT_SECONDS, self._silent_seconds / 4)
        stream.socket.settimeout(seconds)
        # Silence is counted, not measured: while this process is stopped, or has no
        # core, it hears nobody.
        while misses * seconds < self._silent_seconds:
            try:
                message = stream.receive(FROM_PEER)
            except TimeoutError:
                misses += 1
                continue
            if message is None:
                return "closed"
            misses, self._heard[name] = 0, time.monotonic()
            if message["kind"] == "dropped":
                break
            if message["kind"] != "alive":
                self._deliver("message", name, message)
        return "silent"

    def lose(self, name: str, why: str = "silent") -> None:
        """Count a node as lost, and tell it so."""
        with self._changing:
            if name in self._lost:
                return
            self._lost.add(name)
            stream = self._peers.pop(name, None)
        if stream is not None:
            if why == "silent":
                # Without this, the other side would take the end of the connection for
                # the end of this watcher.
                with contextlib.suppress(OSError):
                    stream.send("dropped")
            stream.end()
        self._deliver("lost", name, why)
