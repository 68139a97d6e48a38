"""The loop by which ranks of a worker hand each other pieces in their shared memory.

While the ranks take one piece, the next lies in its place already, so that a piece
costs one step, in which all of them meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps

__all__ = ["hand_over"]

_Piece = TypeVar("_Piece")


def hand_over(
    pieces: Sequence[_Piece],
    put: Callable[[_Piece, int], object],
    take: Callable[[_Piece, int], Any],
    *,
    place_bytes: int,
    call: Call,
    channel: Channel,
    begins: bool = True,
) -> WaitSteps:
    """Let each rank put pieces into its ring, and take those of the others.

    Collective over ``topology.worker_comm``. ``put`` and ``take`` are given a piece and
    its place, in bytes; ``take`` may return steps of its own. ``begins`` says whether a
    header comes first, or a step of a call that goes on.
    """
    rings, place = channel.rings, 0
    if pieces:
        place = rings.take(place_bytes)
        put(pieces[0], place)
    if begins:
        yield HEADER
    elif pieces:
        yield channel.step(call)
    for number, piece in enumerate(pieces, start=1):
        after, step = 0, None
        if number < len(pieces):
            after = rings.take(place_bytes)
            put(pieces[number], after)
            step = channel.step(call)
        yield from take(piece, place) or ()
        if step is not None:
            yield step
        place = after
