"""A model of all orders of loads and stores of ranks that sum through shared memory.

A rank's stores wait in a buffer, and reach the memory in any order, except stores of
ticks, which are release stores: earlier stores reach the memory before. Its loads are
executed in any order until the rank posts its next tick. Therefore the model contains
every order that C11 allows the kernel, and some more. The modeled steps are those of
`hpcstrat.engine.channel.shared_rings` and hpcstrat/engine/native/kernel.c.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Design", "find_error"]

# A store's address, ("tick", rank, half) or ("place", rank, number), and its value.
_Store = tuple[Any, Any]
_State = tuple[tuple["_Rank", ...], tuple[tuple[Any, Any], ...]]


@dataclass(frozen=True, slots=True)
class Design:
    """A design of the sum to explore: the kernel's design, or a wrong one.

    With ``scattered``, each rank adds a segment, and all ranks copy the sums out.
    """

    ranks: int
    pieces: int
    scattered: bool = False
    places: int = 4
    releases: bool = True
    waits: bool = True


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank's state: its program line, its invisible stores, its pending loads."""

    line: int = 0
    stores: tuple[_Store, ...] = ()
    loads: tuple[tuple[Any, Any], ...] = ()


def _program(design: Design, me: int) -> list[tuple[Any, ...]]:
    """Return the program lines of a rank."""
    others = [rank for rank in range(design.ranks) if rank != me]
    segments = range(design.ranks) if design.scattered else [0]

    def place(rank: int, piece: int, segment: int) -> Any:
        return "place", rank, piece % design.places, segment

    def lay_out(piece: int) -> list[tuple[Any, ...]]:
        return [("store", place(me, piece, s), (piece, me)) for s in segments]

    lines: list[tuple[Any, ...]] = [*lay_out(0), ("post", 1), ("wait", 1)]
    for piece in range(design.pieces):
        if follows := piece + 1 < design.pieces:
            lines += lay_out(piece + 1)
        tick, own = piece + 2, me if design.scattered else 0
        loads = [("load", place(rank, piece, own), (piece, rank)) for rank in others]
        meet = [("post", tick), ("wait", tick)]
        if design.scattered:
            # The sum overwrites the rank's own values, after all terms have been
            # loaded.
            sums = "sum", piece
            lines += [*loads, ("loaded",), ("store", place(me, piece, me), sums), *meet]
            lines += [("load", place(rank, piece, rank), sums) for rank in others]
        elif follows:
            lines += [meet[0], *loads, meet[1]]
        else:
            lines += loads
    return [line for line in lines if design.waits or line[0] != "wait"]


def find_error(design: Design) -> str:
    """Explore all orders; return a description of an error, or an empty text."""
    programs = [_program(design, rank) for rank in range(design.ranks)]
    start: _State = (tuple(_Rank() for _ in programs), ())
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        ranks, _ = state
        stuck = True
        for following in _followers(design, programs, state):
            if isinstance(following, str):
                return following
            stuck = False
            if following not in seen:
                seen.add(following)
                todo.append(following)
        ended = all(
            rank.line == len(program) and not rank.stores and not rank.loads
            for rank, program in zip(ranks, programs, strict=True)
        )
        if stuck and not ended:
            return "the ranks wait for ever"
    return ""


def _followers(
    design: Design, programs: list[list[tuple[Any, ...]]], state: _State
) -> Iterator[_State | str]:
    ranks, memory = state
    values = dict(memory)
    for me, rank in enumerate(ranks):
        for index, (where, value) in enumerate(rank.stores):
            waits = any(w == where for w, _ in rank.stores[:index])
            if where[0] == "tick" and design.releases:
                # A release store waits until earlier stores are visible.
                waits = index > 0
            if not waits:
                left = rank.stores[:index] + rank.stores[index + 1 :]
                after = tuple(sorted({**values, where: value}.items()))
                yield _moved(ranks, me, replace(rank, stores=left)), after
        for index, (where, wanted) in enumerate(rank.loads):
            found = values.get(where)
            if found != wanted:
                yield f"rank {me} wants {wanted} in {where}, and loads {found}"
                return
            left = rank.loads[:index] + rank.loads[index + 1 :]
            yield _moved(ranks, me, replace(rank, loads=left)), memory
        if rank.line < len(programs[me]):
            moved = _stepped(design, me, rank, programs[me][rank.line], values)
            if moved is not None:
                yield _moved(ranks, me, replace(moved, line=rank.line + 1)), memory


def _stepped(
    design: Design, me: int, rank: _Rank, line: tuple[Any, ...], values: dict[Any, Any]
) -> _Rank | None:
    """Return a rank after its next line, or None if that line has to wait."""
    kind, *words = line
    if kind == "store":
        return replace(rank, stores=(*rank.stores, (words[0], words[1])))
    if kind == "load":
        return replace(rank, loads=(*rank.loads, (words[0], words[1])))
    if kind == "loaded":
        return None if rank.loads else rank
    if kind == "post":
        if rank.loads:
            return None
        tick = ("tick", me, words[0] % 2), words[0]
        return replace(rank, stores=(*rank.stores, tick))
    ticks = [values.get(("tick", r, words[0] % 2)) for r in range(design.ranks)]
    return rank if all(tick == words[0] for tick in ticks) else None


def _moved(ranks: tuple[_Rank, ...], me: int, rank: _Rank) -> tuple[_Rank, ...]:
    return (*ranks[:me], rank, *ranks[me + 1 :])
