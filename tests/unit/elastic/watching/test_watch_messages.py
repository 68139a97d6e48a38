"""Malformed messages are errors; nothing else comes from them."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from hpcstrat.elastic.watching.watch_messages import (
    FROM_AGENT,
    FROM_PEER,
    FROM_RANK,
    GREETINGS,
    MalformedMessageError,
    MessageStream,
    read_message,
)

TABLES = (GREETINGS, FROM_PEER, FROM_AGENT, FROM_RANK)
RIGHT: dict[str, Any] = {
    "number": 3,
    "step": 3,
    "status": 0,
    "failures": 0,
    "blamed": {"node1": 2},
    "members": ["node1", "node2"],
    "nodes": ["node1"],
    "argv": ["true"],
}
WRONG = (
    *(None, True, -1, 1.5, 1 << 70, float("nan"), "", "x" * 300, "a\0b"),
    *([], [1], ["a", "a"], ["a"] * 5000, {}, {"a": -1}, {"a": "b"}, [[]]),
)


def _right(table: Any, kind: str) -> dict[str, Any]:
    return {"kind": kind, **{name: RIGHT.get(name, "text") for name in table[kind]}}


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, MessageStream]]:
    """Return the sending side of a connection, and the messages of the other one."""
    sender, receiver = socket.socketpair()
    with sender, receiver:
        sender.settimeout(20)
        receiver.settimeout(20)
        yield sender, MessageStream(receiver)


def test_each_message_is_read_as_it_was_written(
    pair: tuple[socket.socket, MessageStream],
) -> None:
    sender, stream = pair
    for table in TABLES:
        for kind in table:
            message = _right(table, kind)
            MessageStream(sender).send(**message)
            assert stream.receive(table) == message
    sender.close()
    assert stream.receive(GREETINGS) is None


def test_a_message_of_another_table_is_refused() -> None:
    for table in TABLES:
        for other in TABLES:
            for kind in other.keys() - table.keys():
                line = json.dumps(_right(other, kind)).encode()
                with pytest.raises(MalformedMessageError, match="expected a message"):
                    read_message(line, table)


@pytest.mark.parametrize("value", [True, -1, 1.5, "3", None, 1 << 62, [3]])
def test_a_number_of_another_type_is_refused(value: object) -> None:
    line = json.dumps({"kind": "cleaned", "number": value}).encode()
    with pytest.raises(MalformedMessageError, match="expected a valid number"):
        read_message(line, FROM_PEER)


def _fuzzed(random_: random.Random) -> bytes:
    """Return a line that is nearly a message, or bytes that are none."""
    table = random_.choice(TABLES)
    message: Any = _right(table, random_.choice(list(table)))
    match random_.randrange(6):
        case 0:
            return random_.randbytes(random_.randrange(200)) + b"\n"
        case 1:
            message[random_.choice(list(message))] = random_.choice(WRONG)
        case 2:
            del message[random_.choice(list(message))]
        case 3:
            message[random_.choice(["extra", "kind", "number"])] = random_.choice(WRONG)
        case 4:
            message = random_.choice([*WRONG, [message], json.dumps(message)])
        case 5:
            line = bytearray(json.dumps(message).encode())
            for _ in range(random_.randrange(1, 4)):
                line[random_.randrange(len(line))] = random_.randrange(256)
            return bytes(line) + b"\n"
    return json.dumps(message).encode() + b"\n"


def test_fuzzed_messages_are_right_or_an_error() -> None:
    random_ = random.Random(1)
    num_refused = 0
    for _ in range(10_000):
        line, table = _fuzzed(random_), random_.choice(TABLES)
        try:
            message = read_message(line, table)
        except MalformedMessageError:
            num_refused += 1
        else:
            assert set(message) == {"kind", *table[message["kind"]]}
            for name, is_valid in table[message["kind"]].items():
                assert is_valid(message[name])
    assert num_refused > 7_000


def test_lines_may_come_in_pieces(pair: tuple[socket.socket, MessageStream]) -> None:
    sender, stream = pair
    random_, data = random.Random(3), b""
    for step in range(100):
        data += json.dumps({"kind": "progress", "step": step}).encode() + b"\n"
    while data:
        size = random_.randrange(1, 99)
        sender.sendall(data[:size])
        data = data[size:]
    for step in range(100):
        assert stream.receive(FROM_RANK) == {"kind": "progress", "step": step}


def test_long_and_deep_lines_are_refused(
    pair: tuple[socket.socket, MessageStream],
) -> None:
    sender, stream = pair
    sender.sendall(b"x" * 70_000)
    with pytest.raises(MalformedMessageError, match="at most 65536 bytes"):
        stream.receive(FROM_PEER)
    for line in (b"[" * 60_000, b"9" * 60_000):
        with pytest.raises(MalformedMessageError, match="expected a line of JSON"):
            read_message(line, FROM_PEER)


def test_a_file_of_a_rank_is_no_path() -> None:
    for name in ("../secret", "a/b", ".", ""):
        line = json.dumps({"kind": "save", "order": name, "nodes": ["n1"]}).encode()
        with pytest.raises(MalformedMessageError, match="valid order"):
            read_message(line, FROM_RANK)
