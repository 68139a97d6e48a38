"""Watchers connect with those that know the secret, and with nobody else."""

from __future__ import annotations

import contextlib
import json
import queue
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hpcstrat.elastic.watching.mesh import Identity, Mesh, greet
from hpcstrat.elastic.watching.watch_messages import (
    GREETINGS,
    MalformedMessageError,
    MessageStream,
)

SECRET, JOB = b"s" * 64, "Slurm 7.0.0"
_SECONDS = 20


class Meeting:
    """The meshes of some nodes of this machine, with the events of each."""

    def __init__(self, names: str, **options: Any) -> None:
        held = [socket.create_server(("", 0)) for _ in names]
        ports = [one.getsockname()[1] for one in held]
        for one in held:
            one.close()
        self.addresses = {
            name: ("127.0.0.1", port) for name, port in zip(names, ports, strict=True)
        }
        self.options = options
        self.events: dict[str, queue.Queue[tuple[Any, ...]]] = {}
        self.meshes: dict[str, Mesh] = {}

    def start(self, name: str, identity: Identity | None = None) -> Mesh:
        """Start the mesh of a node."""
        events = self.events[name] = queue.Queue()
        identity = identity or Identity(SECRET, JOB, name)
        mesh = Mesh(
            identity, self.addresses, lambda *event: events.put(event), **self.options
        )
        mesh.start()
        self.meshes[name] = mesh
        return mesh

    def next(self, name: str, kind: str) -> tuple[Any, ...]:
        """Return the values of the next event of a kind."""
        until = time.monotonic() + _SECONDS
        while True:
            event = self.events[name].get(timeout=until - time.monotonic())
            if event[0] == kind:
                return event[1:]

    def connect(self, name: str) -> socket.socket:
        """Return a connection with the mesh of a node."""
        return socket.create_connection(self.addresses[name], timeout=_SECONDS)

    def greet(self, name: str, identity: Identity, purpose: str) -> MessageStream:
        """Return a connection with the mesh of a node, after the greetings."""
        stream = MessageStream(self.connect(name))
        try:
            greet(identity, stream, purpose)
        except MalformedMessageError:
            stream.socket.close()
            raise
        stream.socket.settimeout(_SECONDS)
        return stream


@contextlib.contextmanager
def meeting(names: str, **options: Any) -> Iterator[Meeting]:
    """Yield a meeting, and close its meshes."""
    found = Meeting(names, **options)
    try:
        yield found
    finally:
        for mesh in found.meshes.values():
            mesh.close()


def test_watchers_meet_talk_and_notice_an_end() -> None:
    with meeting("abc") as met:
        for name in "cab":
            met.start(name)
        for name in "abc":
            others = {met.next(name, "came")[0] for _ in range(2)}
            assert others == set("abc") - {name}
        met.meshes["c"].send(["a", "b", "nobody"], "progress", step=7)
        for name in "ab":
            assert met.next(name, "message") == ("c", {"kind": "progress", "step": 7})
        met.meshes.pop("c").close()
        assert met.next("a", "lost") == ("c", "closed")
        # Both sides of a connection that one of them drops know the same.
        met.meshes["a"].lose("b")
        assert met.next("a", "lost") == ("b", "silent")
        lost = {met.next("b", "lost") for _ in range(2)}
        assert lost == {("c", "closed"), ("a", "silent")}


@pytest.mark.parametrize(
    ("identity", "said"),
    [
        (Identity(b"x" * 64, JOB, "b"), "found a wrong proof"),
        (Identity(SECRET, "Slurm 8.0.0", "b"), "two jobs use the same folder"),
        (Identity(SECRET, JOB, "b", version="0.0.0"), "0.0.0"),
    ],
)
def test_a_stranger_is_refused(identity: Identity, said: str) -> None:
    with meeting("ab") as met:
        met.start("a")
        met.start("b", identity)
        # Both sides say why.
        assert said in met.next("a", "log")[0]
        assert said in met.next("b", "log")[0]
        kinds = {event[0] for name in "ab" for event in met.events[name].queue}
        assert kinds <= {"log"}


def _read(stream: socket.socket) -> list[dict[str, Any]]:
    """Return the messages until the other side closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := stream.recv(1 << 16):
            found += data
    return [json.loads(line) for line in found.splitlines()]


def _hello(identity: Identity, purpose: str) -> dict[str, Any]:
    return {
        "kind": "hello",
        "version": identity.version,
        "job": identity.job,
        "name": identity.node,
        "purpose": purpose,
        "nonce": "0",
    }


@pytest.mark.parametrize("given", ["0" * 64, "", "\ud800"])
def test_no_command_comes_from_a_stranger(given: str) -> None:
    own = Identity(SECRET, JOB, "b")
    told = {"number": 1, "line": "touch /nonexistent/file"}
    command = {"kind": "command", **told}
    with meeting("ab") as met:
        met.start("a")
        greetings = (), (_hello(own, "command"), {"kind": "proof", "proof": given})
        for greeting in greetings:
            with met.connect("a") as stream:
                for message in (*greeting, command):
                    stream.sendall(json.dumps(message).encode() + b"\n")
                # A stranger gets no proof.
                assert [one["kind"] for one in _read(stream)] == ["hello", "refused"]
        # With the secret, it is delivered.
        stream = met.greet("a", own, "command")
        with stream.socket:
            stream.send(**command)
            message, delivered = met.next("a", "command")
            delivered.close()
        assert message == command
        assert met.events["a"].empty()


def test_a_proof_of_another_connection_is_refused() -> None:
    """Somebody reads a connection, and sends the same words again."""
    with meeting("ab") as met:
        met.start("a")
        said: list[bytes] = []
        with met.connect("a") as connection:
            stream = MessageStream(connection)
            send = connection.sendall

            class Recorded:
                """A connection whose sent bytes are kept."""

                def __getattr__(self, name: str) -> Any:
                    return getattr(connection, name)

                def sendall(self, data: bytes) -> None:
                    said.append(data)
                    send(data)

            stream.socket = Recorded()  # type: ignore[assignment]
            greet(Identity(SECRET, JOB, "b"), stream, "command")
        with met.connect("a") as later:
            for data in said:
                later.sendall(data)
            assert [one["kind"] for one in _read(later)] == ["hello", "refused"]
        assert "wrong proof" in met.next("a", "log")[0]


def test_a_stranger_that_listens_gets_no_secret_and_no_command() -> None:
    """Another program has the port of a watcher, and sends its own words back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = Identity(SECRET, JOB, "b")
        stream = MessageStream(socket.create_connection(server.getsockname()))
        connection, _ = server.accept()
        other = MessageStream(connection)
        with stream.socket, connection:
            other.send(**_hello(Identity(b"", JOB, "a"), ""))
            other.send("proof", proof="0" * 64)
            with pytest.raises(MalformedMessageError, match="another program has"):
                greet(own, stream, "command")
            told = [other.receive(GREETINGS) for _ in range(2)]
            assert SECRET.decode() not in str(told)


def test_fuzzed_bytes_change_nothing() -> None:
    random_ = random.Random(2)
    with meeting("ab") as met:
        met.start("a")
        met.start("b")
        assert met.next("a", "came") == ("b",)
        for _ in range(50):
            with met.connect("a") as stream, contextlib.suppress(OSError):
                for _ in range(random_.randrange(1, 20)):
                    words = random_.randbytes(random_.randrange(100))
                    stream.sendall(random_.choice([b"{", b'{"kind":', b""]) + words)
                    stream.sendall(b"\n")
        met.meshes["b"].send(["a"], "progress", step=1)
        assert met.next("a", "message") == ("b", {"kind": "progress", "step": 1})


def test_a_stranger_writes_no_lines_into_the_log() -> None:
    with meeting("ab") as met:
        met.start("a")
        with met.connect("a") as stream:
            reason = "x\nnode1: ends: complete\x1b[2J"
            MessageStream(stream).send("refused", reason=reason)
            assert met.next("a", "log")[0].endswith("x?node1: ends: complete?[2J")


def test_a_malformed_message_of_a_watcher_is_its_loss() -> None:
    with meeting("ab") as met:
        met.start("a")
        stream = met.greet("a", Identity(SECRET, JOB, "b"), "peer")
        with stream.socket:
            assert met.next("a", "came") == ("b",)
            stream.send("generation", number=-1)
            assert "expected a message" in met.next("a", "log")[0]
            assert met.next("a", "lost") == ("b", "closed")


def test_a_silent_watcher_is_lost() -> None:
    with meeting("ab", silent_seconds=0.3) as met:
        met.start("a")
        stream = met.greet("a", Identity(SECRET, JOB, "b"), "peer")
        with stream.socket:
            assert met.next("a", "lost") == ("b", "silent")
            assert _read(stream.socket)[-1] == {"kind": "dropped"}


def test_a_watcher_that_reads_nothing_is_lost() -> None:
    """Its messages must not keep this watcher waiting."""
    with meeting("ab", silent_seconds=0.3) as met:
        mesh = met.start("a")
        stream = met.greet("a", Identity(SECRET, JOB, "b"), "peer")
        with stream.socket:
            assert met.next("a", "came") == ("b",)
            for _ in range(1000):
                stream.send("alive")
                mesh.send(["b"], "end", reason="x" * 60_000)
                if not met.events["a"].empty():
                    break
            assert met.next("a", "lost") == ("b", "silent")


def test_a_second_watcher_of_a_node_is_refused() -> None:
    with meeting("ab") as met:
        met.start("a")
        met.start("b")
        assert met.next("a", "came") == ("b",)
        with pytest.raises(MalformedMessageError, match="which is lost, connected"):
            met.greet("a", Identity(SECRET, JOB, "b"), "peer")
        with pytest.raises(MalformedMessageError, match="found c, which is lost"):
            met.greet("a", Identity(SECRET, JOB, "c"), "peer")


def test_a_node_is_doubtful_before_it_is_lost() -> None:
    with meeting("abc", silent_seconds=2.0) as met:
        mesh = met.start("a")
        met.start("b")
        assert met.next("a", "came") == ("b",)
        stream = met.greet("a", Identity(SECRET, JOB, "c"), "peer")
        with stream.socket:
            assert met.next("a", "came") == ("c",)
            assert mesh.doubtful("bc") == []
            until = time.monotonic() + _SECONDS
            while mesh.doubtful("bc") != ["c"]:
                assert time.monotonic() < until
                time.sleep(0.02)
            # The loss has not been reported yet.
            assert met.events["a"].empty()
            assert met.next("a", "lost") == ("c", "silent")
            assert mesh.doubtful("b") == []


def test_a_port_in_use_is_an_error() -> None:
    with meeting("ab") as met, socket.create_server(("", met.addresses["a"][1])):
        met.events["a"] = queue.Queue()
        mesh = Mesh(Identity(SECRET, JOB, "a"), met.addresses, print)
        with pytest.raises(OSError, match="to be free for the watcher"):
            mesh.start()
