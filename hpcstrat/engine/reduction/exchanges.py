"""Collective calls that copy parts of arrays between replicas into existing arrays.

Integrations of libraries such as ``torch.distributed`` use this module. All arrays must
be contiguous and in host memory. Calls that only move data accept any fixed-size dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.channel.waitable import EveryRankError, WaitSteps
from hpcstrat.engine.collectives import parts as algorithms
from hpcstrat.engine.reduction.object_collectives import ObjectCollectives
from hpcstrat.engine.typing import Array

__all__ = ["Exchanges"]

_TAG = 29


class Exchanges:
    """Calls in which replicas exchange parts of arrays.

    All calls are collective over ``topology.replica_comm``. ``what`` names the call in
    errors. Raises CollectiveError on every replica if the replicas disagree on the
    call, its root, or on shapes and dtypes, unless a method allows these to differ.
    Raises ValueError if the arrays of a replica do not fit each other; the other
    replicas raise ReplicaError. Reductions combine the values in replica order, and
    divide the result by a ``divisor`` other than 0, in floating point.
    """

    def __init__(self, collectives: ObjectCollectives) -> None:
        self.collectives = collectives
        self._size = collectives.size
        channel: Any = collectives.channel
        self._rank: int = 0 if channel is None else channel.topology.replica_id

    @collective
    def combine(self, function: np.ufunc, array: Array, what: str) -> None:
        """Combine the arrays of all replicas by a ufunc, in place, on every replica."""
        _check_function(function, array, what)
        flat, size = _flat(array), self._size
        bounds = [flat.size * number // size for number in range(size + 1)]
        parts = [flat[bounds[n] : bounds[n + 1]] for n in range(size)]
        call = _call(what, array)
        if not self._alone():
            self._drive(call, self._combined(function, flat, parts, call))

    def _combined(
        self, function: np.ufunc, flat: Array, parts: list[Array], call: Call
    ) -> WaitSteps:
        channel: Any = self.collectives.channel
        own = parts[self._rank]
        yield from algorithms.reduce_scatter(parts, own, function, call, channel)
        # The gather needs no header, because each rank can compute all part sizes.
        yield from algorithms.all_gather(own, parts, flat, call, channel, begins=False)

    @collective
    def reduce_to(
        self,
        function: np.ufunc,
        array: Array,
        root: int,
        what: str,
        *,
        divisor: int = 0,
    ) -> None:
        """Combine the arrays of all replicas by a ufunc, in place, on the root only."""
        _check_function(function, array, what)
        flat, size = _flat(array), self._size
        self._check_root(root)
        bounds = [flat.size * number // size for number in range(size + 1)]
        parts = [flat[bounds[n] : bounds[n + 1]] for n in range(size)]
        own = np.empty_like(parts[self._rank])
        call = _call(f"{what}(root={root})", array)
        if self._alone():
            return
        channel: Any = self.collectives.channel
        scatter = algorithms.reduce_scatter(
            parts, own, function, call, channel, divisor=divisor
        )
        into = parts if self._rank == root else None
        lengths = [part.size for part in parts]
        collect = algorithms.gather(
            own,
            into,
            lengths,
            root=root,
            call=call,
            channel=channel,
            begins=False,
        )
        self._drive(call, _both(scatter, collect))

    @collective
    def reduce_scatter(
        self,
        function: np.ufunc,
        parts: Sequence[Array],
        result: Array,
        what: str,
        *,
        divisor: int = 0,
    ) -> None:
        """Combine part ``r`` of all replicas by a ufunc, on replica ``r``.

        The ``parts`` have one dtype, but may have different sizes. ``result`` receives
        this replica's part of the results; it may be the memory of this part itself.
        """
        _check_function(function, result, what)
        self._check_parts(parts, result, self._rank)
        flat, flats = _flat(result), [_flat(part) for part in parts]
        if any(
            np.may_share_memory(flat, part)
            for rank, part in enumerate(flats)
            if rank != self._rank or part.ctypes.data != flat.ctypes.data
        ):
            flats = [part.copy() for part in flats]
        call = _call(what, parts[0], flats)
        if not self._alone(flats[self._rank], flat):
            channel: Any = self.collectives.channel
            steps = algorithms.reduce_scatter(
                flats, flat, function, call, channel, divisor=divisor
            )
            self._drive(call, steps)

    @collective
    def all_gather(
        self, own: Array, parts: Sequence[Array], what: str, whole: Array | None = None
    ) -> None:
        """Copy replica ``r``'s array into part ``r``, on every replica, for each ``r``.

        ``own`` may be this replica's part. If the parts are adjacent in memory and in
        order, ``whole`` may be the array that contains them all.
        """
        self._check_parts(parts, own, self._rank)
        flat, flats = _flat(own), [_flat(part) for part in parts]
        if _overlaps(flat, flats, self._rank):
            flat = flat.copy()
        call = _call(what, own, flats)
        if not self._alone(flat, flats[self._rank]):
            channel: Any = self.collectives.channel
            into = None if whole is None else _flat(whole)
            self._drive(call, algorithms.all_gather(flat, flats, into, call, channel))

    @collective
    def gather(
        self, own: Array, parts: Sequence[Array] | None, root: int, what: str
    ) -> None:
        """Copy replica ``r``'s array into part ``r`` on the root, for each ``r``.

        Only the root's ``parts`` are used, which must all have the size of ``own``.
        """
        self._check_root(root)
        flat, flats, size = _flat(own), None, self._size
        if self._rank == root:
            self._check_parts(parts or (), own, self._rank)
            flats = [_flat(part) for part in parts or ()]
            if any(part.size != flat.size for part in flats):
                raise ValueError(
                    f"expected parts of {flat.size} elements, as this replica gives, "
                    f"found sizes {[part.size for part in flats]}; make them equal"
                )
            if _overlaps(flat, flats, root):
                flat = flat.copy()
        call = _call(f"{what}(root={root})", own)
        if not self._alone(flat, None if flats is None else flats[root]):
            channel: Any = self.collectives.channel
            lengths = [flat.size] * size
            steps = algorithms.gather(
                flat, flats, lengths, root=root, call=call, channel=channel
            )
            self._drive(call, steps)

    @collective
    def scatter(
        self, parts: Sequence[Array] | None, result: Array, root: int, what: str
    ) -> None:
        """Copy part ``r`` of the root into replica ``r``'s ``result``.

        Only the root's ``parts`` are used, which must all have the size of ``result``.
        """
        self._check_root(root)
        flat, size = _flat(result), self._size
        sends = [flat[:0]] * size
        receives = [flat if rank == root else flat[:0] for rank in range(size)]
        if self._rank == root:
            self._check_parts(parts or (), result, self._rank)
            # Copy: ``result`` may overlap with the parts to send.
            sends = [_flat(part).copy() for part in parts or ()]
            if any(part.size != flat.size for part in sends):
                raise ValueError(
                    f"expected parts of {flat.size} elements, as this replica takes, "
                    f"found sizes {[part.size for part in sends]}; make them equal"
                )
        call = _call(f"{what}(root={root})", result)
        if not self._alone(sends[self._rank], flat):
            channel: Any = self.collectives.channel
            self._drive(call, algorithms.all_to_all(sends, receives, channel))

    @collective
    def broadcast(self, array: Array, root: int, what: str) -> None:
        """Copy the root's values into ``array`` of every replica."""
        self._check_root(root)
        flat = _flat(array)
        call = _call(f"{what}(root={root})", array)
        if not self._alone():
            channel: Any = self.collectives.channel
            self._drive(call, algorithms.broadcast(flat, root, call, channel))

    @collective
    def all_to_all(
        self, sends: Sequence[Array], receives: Sequence[Array], what: str
    ) -> None:
        """Send one part to each replica, and receive one part from each replica.

        All parts have the same dtype. Their sizes may differ, but if a replica sends
        another number of elements than the receiver expects, all replicas raise
        ValueError.
        """
        size = self._size
        if not len(sends) == len(receives) == size:
            raise ValueError(
                f"expected {size} parts to send and to receive, one for each replica, "
                f"found {len(sends)} and {len(receives)}; pass as many"
            )
        kinds = {str(array.dtype) for array in (*sends, *receives)}
        if len(kinds) > 1:
            raise ValueError(
                f"expected parts of one dtype, found {sorted(kinds)}; cast them first"
            )
        flats = [_flat(array) for array in receives]
        sent = [_flat(array) for array in sends]
        if any(np.may_share_memory(a, b) for a in sent for b in flats):
            sent = [array.copy() for array in sent]
        call = describe_call(what, f"{kinds.pop()} to {size} replicas")
        if self.collectives.channel is None:
            if sent[0].size != flats[0].size:
                raise ValueError(
                    f"expected as many elements to receive as are sent, {sent[0].size},"
                    f" found {flats[0].size}; make the sizes equal"
                )
            flats[0][...] = sent[0]
            return
        self._drive(call, self._all_to_all(sent, flats))

    def _all_to_all(self, sends: list[Array], receives: list[Array]) -> WaitSteps:
        channel: Any = self.collectives.channel
        steps = algorithms.all_to_all(sends, receives, channel)
        counts = np.array([array.size for array in sends], np.int64)
        wanted = np.array([array.size for array in receives], np.int64)
        told = np.empty_like(counts)
        yield next(steps)
        comm = channel.interruptible(channel.topology.replica_comm)
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        told[comm.rank] = counts[comm.rank]
        comm.exchange(
            {rank: counts[rank : rank + 1] for rank in others},
            {rank: told[rank : rank + 1] for rank in others},
            _TAG,
        )
        wrong = np.flatnonzero(told != wanted)
        if comm.allreduce(int(wrong.size), channel.topology.mpi.SUM):
            said = [
                f"replica {rank} sends {told[rank]} elements to replica {comm.rank}, "
                f"which expects {wanted[rank]}"
                for rank in wrong.tolist()
            ]
            found = "; ".join(text for texts in comm.allgather(said) for text in texts)
            raise EveryRankError(
                "expected each replica to receive what the others send to it, found "
                f"that {found}; make the sizes equal"
            )
        yield from steps

    def _alone(self, own: Array | None = None, result: Array | None = None) -> bool:
        """Return whether only one replica exists; if so, copy ``own`` to ``result``."""
        if self.collectives.channel is not None:
            return False
        if own is not None and result is not None:
            result[...] = own
        return True

    def _drive(self, call: Call, steps: WaitSteps) -> None:
        channel: Any = self.collectives.channel
        channel.drive(steps, call, self.collectives.timeout_seconds)

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self._size:
            raise ValueError(
                f"expected a replica from 0 to {self._size - 1} as root, found {root}; "
                "change it"
            )

    def _check_parts(self, parts: Sequence[Array], own: Array, rank: int) -> None:
        if len(parts) != self._size:
            raise ValueError(
                f"expected {self._size} parts, one for each replica, found "
                f"{len(parts)}; pass as many"
            )
        kinds = {str(array.dtype) for array in (*parts, own)}
        if len(kinds) > 1:
            raise ValueError(
                f"expected arrays of one dtype, found {sorted(kinds)}; cast them first"
            )
        if parts[rank].size != own.size:
            raise ValueError(
                f"expected {parts[rank].size} elements, as part {rank} has, found "
                f"{own.size}; make the sizes equal"
            )


def _check_function(function: np.ufunc, array: Array, what: str) -> None:
    """Before the header, raise TypeError if the ufunc does not accept the dtype."""
    nothing = array.reshape(-1)[:0]
    try:
        function(nothing, nothing)
    except TypeError as error:
        raise TypeError(
            f"expected a type for which {function.__name__} is defined in {what}, "
            f"found {array.dtype}; use another reduction or another type"
        ) from error


def _both(first: WaitSteps, second: WaitSteps) -> Iterator[Any]:
    yield from first
    yield from second


def _flat(array: Array) -> Array:
    """Return a flat view of a contiguous array; raise ValueError for other arrays."""
    if not array.flags.c_contiguous:
        raise ValueError(
            f"expected a contiguous array, found shape {array.shape} with strides "
            f"{array.strides}; pass a copy"
        )
    return array.reshape(-1)


def _overlaps(own: Array, parts: Sequence[Array], rank: int) -> bool:
    """Return whether ``own`` overlaps with a part; it may be part ``rank`` itself."""
    return any(
        np.may_share_memory(own, part)
        for number, part in enumerate(parts)
        if number != rank or part.ctypes.data != own.ctypes.data
    )


def _call(what: str, array: Array, parts: Sequence[Array] | None = None) -> Call:
    """Describe a call for an array, or for parts if their sizes differ."""
    sizes = {part.size for part in parts or ()}
    if len(sizes) > 1:
        text = f"{array.dtype} of sizes {[part.size for part in parts or ()]}"
        return describe_call(what, text, sum(part.nbytes for part in parts or ()))
    return describe_call(what, f"{array.dtype}{list(array.shape)}", array.nbytes)
