"""`check_mirrored`: comparison of mirrored variables between replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpcstrat.engine.typing import Replicas
from hpcstrat.safety.divergence.first_difference import Copy
from hpcstrat.safety.divergence.tolerance import compare
from hpcstrat.variables import SyncOnReadVariable, Variable

__all__ = ["check_mirrored"]

_LEAST_BYTES = 16 << 20
_PARTS = 8


def check_mirrored(
    strategy: Replicas,
    variables: Mapping[str, Variable],
    turn: int | None = None,
) -> None:
    """Compare mirrored variables, or a part of their bytes, between replicas.

    Collective over the strategy's replicas; the names of ``variables`` are the same on
    every replica. If copies differ, raises DivergenceError on every replica. SyncOnRead
    and sharded variables are skipped; plain variables are compared, too. If ``turn`` is
    given, only a part is compared: 16 MiB, or an eighth of a replica's share of all
    bytes if that is larger. The turns 0, 1, 2 and so on together cover all bytes.
    """
    if strategy.num_ranks == 1:
        return
    copies = [
        Copy(name, variable.component)
        for name, variable in variables.items()
        if not (isinstance(variable, SyncOnReadVariable) or variable.is_sharded)
    ]
    total = sum(copy.array.nbytes for copy in copies)
    part = copies
    if turn is not None:
        share = total // strategy.num_ranks
        part = list(_part(copies, total, turn, max(_LEAST_BYTES, share // _PARTS)))
    what = f"comparison of {len(copies)} mirrored variables"
    strategy.collectives.barrier(what)
    tolerance = strategy.settings.divergence_tolerance
    with strategy.collectives.moving(what) as comm:
        error = compare(comm, part, tolerance)
        if error is not None and turn is not None:
            # Compare whole arrays, to report the element's index in the whole array.
            error = compare(comm, copies, tolerance)
    if error is not None:
        raise error


def _part(copies: Sequence[Copy], total: int, turn: int, nbytes: int) -> Iterator[Copy]:
    """Yield the parts of arrays that are compared in a turn, ``nbytes`` in total."""
    start = turn % max(1, -(-total // nbytes)) * nbytes
    stop = start + nbytes
    for copy in copies:
        length, size = copy.array.nbytes, copy.array.itemsize
        if start < length and stop > 0:
            # Extend the byte range to whole elements.
            flat = copy.array.reshape(-1)
            yield Copy(copy.name, flat[max(start, 0) // size : -(-stop // size)])
        start -= length
        stop -= length
