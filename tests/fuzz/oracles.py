"""Choice of the oracle for a program."""

from __future__ import annotations

from typing import Any

from tests.fuzz.oracle import Oracle
from tests.fuzz.oracle_groups import OracleOfGroups
from tests.fuzz.oracle_served import OracleOfServed
from tests.fuzz.program import Program
from tests.fuzz.wanted import Want

__all__ = ["wants"]


def wants(program: Program, n: int) -> list[Want]:
    """Return the expected result of each operation on n ranks."""
    ways = {
        "groups": OracleOfGroups,
        "served": OracleOfServed,
        "shared": OracleOfServed,
    }
    made: Any = ways.get(program.ops[0].way, Oracle)
    wants: list[Want] = made(program, n).wants()
    return wants
