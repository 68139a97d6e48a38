"""Calls that fill arrays of the caller with values of other replicas.

`hpcstrat.engine.calls.gathers` has the calls that return new arrays. Both are made by
plans, see `hpcstrat.engine.calls.repeated_moves`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.blocks import (
    MoveBlocks,
    broadcast_blocks,
    gathered_blocks,
    sent_blocks,
)
from hpcstrat.engine.algorithms.plan import Kinds
from hpcstrat.engine.call_sites import call_site
from hpcstrat.engine.calls.repeated_moves import Move, RepeatedMoves
from hpcstrat.engine.channel.call import Call, describe_call, dtype_text
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CollectiveError

__all__ = ["Moves", "describe_arrays", "flat_view"]

# A message names at most this number of pairs of replicas.
_MOST_NAMED = 4


class Moves:
    """Calls that fill arrays of the caller, which are contiguous, in host memory.

    All calls are collective over ``topology.replica_comm``. ``what`` names the call in
    errors. Raises CollectiveError on every replica if the replicas disagree on the
    call, its root, or on shapes and dtypes, unless a method allows these to differ.
    Raises ValueError if the arrays of a replica do not fit each other; the other
    replicas raise ReplicaError. Arrays may have any fixed-size dtype.
    """

    def __init__(self, collectives: Any) -> None:
        # The `Collectives` of the replicas.
        self.collectives = collectives
        self.size, self.rank = collectives.size, collectives.rank
        self.repeated: RepeatedMoves = collectives.repeated
        # The arrays of a barrier, which has no lengths that could change.
        self._nothing: list[Array] = []
        self._repeat_barrier = self.repeated.repeat_in_kernel

    def barrier(self, what: str = "barrier") -> None:
        """Wait for all replicas; collective over ``topology.replica_comm``."""
        if what == "barrier":
            nothing = self._nothing
            if self._repeat_barrier(what, None, nothing, nothing) is None:
                self.repeated.call(self._barrier, what, None, nothing, nothing)
        elif self.collectives.channel is not None:
            seconds = self.collectives.timeout_seconds
            agree = self.collectives.channel.agree
            self.collectives.call(what, agree, describe_call(what), seconds)

    def _barrier(self, *given: Any) -> None:
        if self.collectives.channel is not None:
            none = MoveBlocks([], [], [0] * self.size, None)
            self._move(describe_call("barrier"), [], [], lambda: none, given[:3])

    def all_gather_into(self, own: Array, parts: Sequence[Array], what: str) -> None:
        """Copy replica ``r``'s array into part ``r``, on every replica, for each ``r``.

        ``own`` may be this replica's part.
        """
        self.repeated.call(self._all_gather_into, what, None, own, parts)

    def _all_gather_into(
        self, what: str, name: None, own: Array, parts: Sequence[Array]
    ) -> None:
        self.check_parts(parts, own)
        call = describe_arrays(what, own, parts)

        def blocks() -> MoveBlocks:
            sizes = [(part.nbytes,) for part in parts]
            found = gathered_blocks(sizes, (1,), (1,), self.rank)
            takes = [b._replace(array=b.rank, at=0) for b in found.takes]
            kept = (0, self.rank) if own.size else (-1, -1)
            return replace(found, takes=takes, own=kept)

        self._move(call, [own], parts, blocks, (what, name, own))

    def broadcast_into(self, array: Array, root: int, what: str) -> None:
        """Copy the root's values into ``array`` of every replica."""
        sends = self.rank == root
        arrays, outs = ([array], []) if sends else ([], [array])
        self.repeated.call(self._broadcast_into, what, ("root", root), arrays, outs)

    def _broadcast_into(
        self, what: str, name: Any, arrays: list[Array], outs: list[Array]
    ) -> None:
        _, root = name
        self.check_root(root)
        [array] = arrays + outs
        flat_view(array)
        call = describe_arrays(f"{what}(root={root})", array)

        def blocks() -> MoveBlocks:
            found = broadcast_blocks([array.nbytes], root, self.rank, self.size)
            # The root has no results.
            return replace(found, takes=[]) if arrays else found

        self._move(call, arrays, outs, blocks, (what, name, arrays))

    def gather_into(
        self, own: Array, parts: Sequence[Array] | None, root: int, what: str
    ) -> None:
        """Copy replica ``r``'s array into part ``r`` on the root, for each ``r``.

        Only the root's ``parts`` are used, which must all have the size of ``own``.
        """
        outs = list(parts or ()) if self.rank == root else []
        self.repeated.call(self._with_root, what, ("root", root), own, outs)

    def scatter_into(
        self, parts: Sequence[Array] | None, result: Array, root: int, what: str
    ) -> None:
        """Copy part ``r`` of the root into replica ``r``'s ``result``.

        Only the root's ``parts`` are used, which must all have the size of ``result``.
        """
        sources = list(parts or ()) if self.rank == root else []
        self.repeated.call(self._with_root, what, ("root", root), sources, [result])

    def _with_root(
        self, what: str, name: Any, value: Array | list[Array], outs: list[Array]
    ) -> None:
        """Gather ``value`` into the root's ``outs``, or scatter the root's list."""
        _, root = name
        self.check_root(root)
        here, every = self.rank == root, {rank: rank for rank in range(self.size)}
        if isinstance(value, list):
            own, parts, does = outs[0], value, "takes"
            arrays, to, source = value, every if here else {}, {root: 0}
            flat_view(own)
        else:
            own, parts, does = value, outs, "gives"
            arrays, to, source = [own], {root: 0}, every if here else {}
        if here:
            self.check_parts(parts, own)
            if any(part.size != own.size for part in parts):
                raise ValueError(
                    f"expected parts of {own.size} elements, as this replica {does}, "
                    f"found sizes {[part.size for part in parts]}; make them equal"
                )
        call = describe_arrays(f"{what}(root={root})", own)

        def blocks() -> MoveBlocks:
            table = np.zeros((self.size, self.size), np.int64)
            table[(slice(None), root) if arrays is not value else root] = own.nbytes
            return sent_blocks(table, self.rank, to, source)

        self._move(call, arrays, outs, blocks, (what, name, value))

    def all_to_all(
        self, sends: Sequence[Array], receives: Sequence[Array], what: str
    ) -> None:
        """Send one part to each replica, and receive one part from each replica.

        All parts have the same dtype. Their sizes may differ, but if a replica sends
        another number of elements than the receiver expects, all replicas raise
        CollectiveError.
        """
        given = what, "all", list(sends), list(receives)
        self.repeated.call(self._send, *given)

    def exchange(
        self, sends: Mapping[int, Array], receives: Mapping[int, Array], what: str
    ) -> None:
        """Send an array to each of some replicas, and receive arrays from others.

        ``sends`` and ``receives`` have one array for each neighbor, by its number. If a
        replica sends to another that does not receive from it, or another size or
        dtype, all replicas raise CollectiveError. ``receives`` must not overlap with
        ``sends``, except for what a replica sends to itself.
        """
        name = tuple(sends), tuple(receives)
        arrays, outs = list(sends.values()), list(receives.values())
        self.repeated.call(self._send, what, name, arrays, outs)

    def _send(
        self, what: str, name: Any, arrays: list[Array], outs: list[Array]
    ) -> None:
        """Send arrays to replicas; ``name`` has the receivers and senders, or "all"."""
        me, size, every, text = self.rank, self.size, [*arrays, *outs], ""
        to, source = (range(size), range(size)) if name == "all" else name
        if name == "all":
            if not len(arrays) == len(outs) == size:
                raise ValueError(
                    f"expected {size} parts to send and to receive, one for each "
                    f"replica, found {len(arrays)} and {len(outs)}; pass as many"
                )
            text = f"{_common_dtype('parts', every)} to {size} replicas"
        for rank in (*to, *source):
            if not 0 <= rank < size:
                raise ValueError(
                    f"expected replicas from 0 to {size - 1} as neighbors, found "
                    f"{rank}; change it"
                )
        for array in every:
            flat_view(array)
        call = describe_call(what, text)
        sends, receives = zip(to, arrays, strict=True), zip(source, outs, strict=True)
        pairs = dict(sends), dict(receives)

        def table(rows: Any) -> Any:
            told = np.array(rows).reshape(size, size, 2, 2)
            if np.array_equal(told[:, :, 0], told[:, :, 1].swapaxes(0, 1)):
                return tuple(map(tuple, told[:, :, 0, 0].tolist()))
            own = *map(_sizes, pairs), call_site()
            found = self.collectives.all_gather_object(own, call.text)
            return CollectiveError(_differences(found))

        def plan(nbytes: Any) -> tuple[MoveBlocks, Kinds]:
            indices = ({rank: i for i, rank in enumerate(ranks)} for ranks in pairs)
            sent = np.broadcast_to(np.array(nbytes, np.int64), (size, size))
            return sent_blocks(sent, me, *indices), []

        # If all sizes of this rank are equal, expect that those of all ranks are.
        sizes = {array.nbytes for array in every}
        expected = sizes.pop() if name == "all" and len(sizes) == 1 else None
        # The kernel's plan is for arrays of these shapes.
        key = tuple(to), tuple(source), *((a.shape, a.dtype) for a in every)
        given, integers = (what, name, arrays), _integers(pairs, size)
        self.repeated.make(
            Move(call, arrays, outs, key, plan, given, integers, table, expected)
        )

    def _move(
        self,
        call: Call,
        arrays: Sequence[Array],
        outs: Sequence[Array],
        blocks: Callable[[], MoveBlocks],
        given: tuple[str, Any, Any],
    ) -> None:
        """Make a call whose header has all sizes, which are the same on all ranks.

        ``given`` are the arguments of the kernel's function that repeats the call.
        """
        if self.collectives.channel is None:
            # A single replica has at most one array and one result, of equal sizes.
            for array, out in zip(arrays, outs, strict=False):
                out[...] = array.reshape(out.shape)
            return
        self.repeated.make_known(call, arrays, outs, lambda: (blocks(), []), given)

    # Checks of arguments.

    def check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(
                f"expected a replica from 0 to {self.size - 1} as root, found {root}; "
                "change it"
            )

    def check_parts(self, parts: Sequence[Array], own: Array) -> None:
        """Raise ValueError unless ``own`` fits this replica's part of all parts."""
        if len(parts) != self.size:
            raise ValueError(
                f"expected {self.size} parts, one for each replica, found "
                f"{len(parts)}; pass as many"
            )
        _common_dtype("arrays", [*parts, own])
        if parts[self.rank].size != own.size:
            raise ValueError(
                f"expected {parts[self.rank].size} elements, as part {self.rank} has, "
                f"found {own.size}; make the sizes equal"
            )
        for array in (*parts, own):
            flat_view(array)


def _common_dtype(what: str, arrays: Sequence[Array]) -> str:
    """Return the only dtype of arrays; raise ValueError if there are several."""
    kinds = {dtype_text(array.dtype) for array in arrays}
    if len(kinds) > 1:
        raise ValueError(
            f"expected {what} of one dtype, found {sorted(kinds)}; cast them first"
        )
    return kinds.pop()


def _sizes(parts: Mapping[int, Array]) -> tuple[tuple[int, int, str], ...]:
    """Return each neighbor's number, and the size and dtype of its array."""
    return tuple((r, p.size, str(p.dtype)) for r, p in parts.items())


def _integers(pairs: tuple[Mapping[int, Array], ...], size: int) -> list[int]:
    """Return bytes and dtype of what this rank sends and receives, for each rank."""
    found = np.zeros((size, 2, 2), np.int64)
    for column, parts in enumerate(pairs):
        for rank, part in parts.items():
            if part.size:
                kind = zlib.crc32(dtype_text(part.dtype).encode())
                found[rank, column] = part.nbytes, kind
    return found.reshape(-1).tolist()


def _differences(rows: Sequence[Any]) -> str:
    """Return a text on arrays that are not received as they are sent."""
    sent, wanted = dict[Any, Any](), dict[Any, Any]()
    sites = [f" ({row[2]})" if row[2] else "" for row in rows]
    for rank, (to, source, _) in enumerate(rows):
        sent |= {(rank, r): (size, dtype) for r, size, dtype in to if size}
        wanted |= {(r, rank): (size, dtype) for r, size, dtype in source if size}
    wrong = []
    for a, b in sorted(sent.keys() | wanted.keys()):
        gives, takes = sent.get((a, b)), wanted.get((a, b))
        if gives != takes:
            wrong.append(
                f"replica {a}{sites[a]} sends {_amount(gives)} to replica {b}"
                f"{sites[b]}, which expects {_amount(takes)}"
            )
    more = len(wrong) - _MOST_NAMED
    if more > 0:
        wrong[_MOST_NAMED:] = [f"and {more} more pairs differ"]
    return (
        "expected each replica to receive what the others send to it, found that "
        f"{'; '.join(wrong)}; make neighbors, sizes and dtypes equal"
    )


def _amount(kind: tuple[int, str] | None) -> str:
    return "nothing" if kind is None else f"{kind[0]} elements of {kind[1]}"


def flat_view(array: Array) -> Array:
    """Return a flat view of a contiguous array; raise ValueError for other arrays."""
    if not array.flags.c_contiguous:
        raise ValueError(
            f"expected a contiguous array, found shape {array.shape} with strides "
            f"{array.strides}; pass a copy"
        )
    return array.reshape(-1)


def describe_arrays(
    what: str, array: Array, parts: Sequence[Array] | None = None
) -> Call:
    """Describe a call for an array, or for parts if their sizes differ."""
    dtype, sizes = dtype_text(array.dtype), [part.size for part in parts or ()]
    if len({*sizes}) > 1:
        nbytes = sum(part.nbytes for part in parts or ())
        return describe_call(what, f"{dtype} of sizes {sizes}", nbytes)
    return describe_call(what, f"{dtype}{list(array.shape)}", array.nbytes)
