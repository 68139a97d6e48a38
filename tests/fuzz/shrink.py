"""Shrinks a failing program: removes operations without which it still fails."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.fuzz.driver import run_programs
from tests.fuzz.judge import judge
from tests.fuzz.oracles import wants
from tests.fuzz.program import Op, Program

__all__ = ["parts", "shrunk"]

_LIMIT_SECONDS = 12.0


def shrunk(program: Program, n: int, problem: str) -> tuple[Program, str]:
    """Return the shortest program found with the same failure, and its text."""
    size = len(program.ops) // 2
    while size:
        candidates = [p for p in parts(program, size) if _is_whole(p, n)]
        for found, text in _failing(candidates, n, _kind(problem)):
            program, problem = found, text
            break
        else:
            size //= 2
            continue
        size = min(size, len(program.ops) // 2) or 1
    return program, problem


def _failing(
    candidates: list[Program], n: int, kind: str
) -> Iterator[tuple[Program, str]]:
    outcomes = run_programs(candidates, n, limit_seconds=_LIMIT_SECONDS)
    for candidate, outcome in zip(candidates, outcomes, strict=True):
        problem = judge(candidate, n, outcome)
        if problem and _kind(problem) == kind:
            yield candidate, problem


def _kind(problem: str) -> str:
    """Return the kind of a failure: the operation, and its error."""
    found = re.match(r"operation \d+, (\w+)", problem)
    how = re.search(r"rank \d+ (\w+ \w+)", problem)
    return f"{found and found[1]} {how and how[1]}"


def parts(program: Program, size: int) -> Iterator[Program]:
    """Yield the program without each run of some number of consecutive operations."""
    for start in range(1, len(program.ops), size):
        ops = program.ops[:start] + program.ops[start + size :]
        yield Program(ops, program.title)
    if size > 1:
        return
    for index, op in enumerate(program.ops):
        for place in range(len(op.body or ())):
            body = op.body[:place] + op.body[place + 1 :]
            shorter = Op(op.kind, {**op.args, "body": body})
            ops = [*program.ops[:index], shorter, *program.ops[index + 1 :]]
            yield Program(ops, program.title)


def _is_whole(program: Program, n: int) -> bool:
    """Return whether all objects that the program uses are still declared."""
    try:
        wants(program, n)
    except (KeyError, IndexError, StopIteration, TypeError):
        return False
    return True
