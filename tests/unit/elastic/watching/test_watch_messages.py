"""Malformed messages are errors; nothing else comes from them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from hpcstrat.elastic.watching.watch_messages import (
    FROM_AGENT,
    FROM_PEER,
    FROM_RANK,
    GREETINGS,
    LineBuffer,
    MalformedMessageError,
    check_message,
    encode,
    normalized,
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
    *([], [1], ["a", "a"], ["x" * 300], ["a"] * 5000, {}, {"a": -1}, {"a": "b"}, [[]]),
)


def _right(table: Any, kind: str) -> dict[str, Any]:
    return {"kind": kind, **{name: RIGHT.get(name, "text") for name in table[kind]}}


def test_each_message_is_read_as_it_was_written() -> None:
    for table in TABLES:
        for kind in table:
            message = _right(table, kind)
            [read] = LineBuffer().feed(encode(**message))
            assert read == message
            assert check_message(read, table) == kind


def test_a_message_of_another_table_is_refused() -> None:
    for table in TABLES:
        for other in TABLES:
            for kind in other.keys() - table.keys():
                with pytest.raises(MalformedMessageError, match="expected a message"):
                    check_message(_right(other, kind), table)


@pytest.mark.parametrize("value", [True, -1, 1.5, "3", None, 1 << 62, [3]])
def test_a_number_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(MalformedMessageError, match="expected a valid number"):
        check_message({"kind": "cleaned", "number": value}, FROM_PEER)


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
        line = _fuzzed(random_)
        cut = random_.randrange(len(line) + 1)
        table, lines = random_.choice(TABLES), LineBuffer()
        try:
            # The same in two pieces.
            for told in [*lines.feed(line[:cut]), *lines.feed(line[cut:])]:
                message = normalized(told)
                kind = check_message(message, table)
                assert set(message) == {"kind", *table[kind]}
                for name, is_valid in table[kind].items():
                    assert is_valid(message[name])
        except MalformedMessageError:
            num_refused += 1
    assert num_refused > 7_000


def test_long_and_deep_lines_are_refused() -> None:
    with pytest.raises(MalformedMessageError, match="at most 65536 bytes"):
        LineBuffer().feed(b"x" * 70_000)
    with pytest.raises(MalformedMessageError, match="expected a line of JSON"):
        LineBuffer().feed(b"[" * 60_000 + b"\n")
    with pytest.raises(MalformedMessageError, match="expected a line of JSON"):
        LineBuffer().feed(b"9" * 60_000 + b"\n")


def test_short_forms_of_a_rank_are_messages() -> None:
    assert check_message(normalized({"progress": 7}), FROM_RANK) == "progress"
    save = {"save": "save-1", "nodes": ["n1"]}
    assert check_message(normalized(save), FROM_RANK) == "save"
    for name in ("../secret", "a/b", ".", ""):
        with pytest.raises(MalformedMessageError, match="valid order"):
            check_message(normalized({**save, "save": name}), FROM_RANK)
    with pytest.raises(MalformedMessageError):
        check_message(normalized({"progress": "7"}), FROM_RANK)
