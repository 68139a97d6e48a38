"""Periodic checks that the copies of mirrored variables are equal on all replicas.

Each call of ``run`` begins by hashing a slice: about a thousandth of the bytes of all
mirrored variables. Successive calls hash successive slices. In a correct program, the
copies are equal at that point. The hash is sent in the headers of the collective calls
that follow. The ranks compare these headers anyway, so that the check needs no extra
message. Each hash is seeded with the previous hash, so that a collective call also
checks all earlier calls of ``run``. Slices of variables on a GPU are hashed a few calls
of ``run`` later, see `hpcstrat.safety.divergence.gpu_copies`.

Different hashes do not prove that copies differ, because garbage collection may free a
variable earlier on one rank than on another. When ranks see different hashes, all ranks
are in the same collective call. They then compare all copies, and continue this call if
the copies are equal.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_intdigest

from hpcstrat.engine.arrays.kinds import is_device, is_half
from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.errors import DivergenceError
from hpcstrat.safety.divergence.first_difference import (
    REPLICAS,
    Copy,
    index_of,
    octets,
)
from hpcstrat.safety.divergence.tolerance import compare
from hpcstrat.variables import MirroredVariable

if TYPE_CHECKING:
    from hpcstrat.safety.divergence.gpu_copies import DeviceCopies

__all__ = ["MirroredCopies"]

_SHARE = 1000
_MOST_BYTES = 1 << 20
_LEAST_BYTES = 16 << 10
# Fixed cost of hashing a piece, as the number of bytes that are hashed in that time.
_PIECE_BYTES = 4 << 10
# Each slice is searched for NaN in every 32nd turn, because a search costs far more
# than a hash. That is enough, because NaN spreads to other elements.
_LOOKS_EVERY = 32

_COMPARISON = describe_call("comparison of mirrored variables")

_Key = tuple[int, str, tuple[int, ...], str]
# The work in one call of ``run``: pieces of memory to hash, and ranges of elements
# (variable, start, stop) to search for NaN.
_Slice = tuple[list[memoryview], list[tuple["_Variable", int, int]]]
_Variable = weakref.ref[MirroredVariable]


class MirroredCopies:
    """Checks the mirrored variables of all strategies that share a channel."""

    def __init__(self, channel: Channel, settings: Settings) -> None:
        self._channel = channel
        # The words for the ranks of the channel in errors.
        self.names = REPLICAS
        self._tolerance = settings.divergence_tolerance or 0.0
        self._rolls = not self._tolerance
        full = settings.divergence == "full"
        self._interval = (settings.divergence_interval or 0) if full else 0
        self._variables: dict[int, _Variable] = {}
        self._number = 0
        # Number of added and removed variables: now, and when the slices were planned.
        self._changes = 0
        self._planned = 0
        self._slices: list[_Slice] = []
        self._on_device: DeviceCopies | None = None
        self._compared_at: int | None = None
        self._looks = True

    @property
    def num_slices(self) -> int:
        """Number of calls of ``run`` after which all bytes have been hashed."""
        if self._planned != self._changes:
            self._plan()
        lagging = self._on_device
        return max(len(self._slices), lagging.num_slices if lagging else 0)

    def add(self, variable: MirroredVariable) -> None:
        """Check a variable from now on, until it is freed.

        Logically collective over the replicas.
        """
        number = self._number = self._number + 1
        freed = functools.partial(self._forget, number)
        self._variables[number] = weakref.ref(variable, freed)
        if self._on_device is None and is_device(variable.component):
            from hpcstrat.safety.divergence.gpu_copies import DeviceCopies

            self._on_device = DeviceCopies()
        self._changes += 1

    def leave_out(self, strategy: Replicas) -> None:
        """Stop checking the variables of a strategy that is being closed.

        Logically collective over the replicas.
        """
        for number, variable in list(self._alive()):
            if variable.distribute_strategy is strategy:
                self._forget(number)
        if self._on_device is not None:
            self._on_device.finish()

    def _forget(self, number: int, _: Any = None) -> None:
        """Stop checking a variable; the garbage collector can call this at any time."""
        if self._variables.pop(number, None) is not None:
            self._changes += 1
            # Drop the slices, which would keep the variable's memory alive.
            self._slices = []
            if self._on_device is not None:
                self._on_device.slices = []

    def _alive(self) -> Iterator[tuple[int, MirroredVariable]]:
        # Copy the dict, because the garbage collector may change it during the loop.
        for number, reference in self._variables.copy().items():
            variable = reference()
            if variable is not None:
                yield number, variable

    def mark(self, run_index: int, mark: int) -> int:
        """Return the new hash (mark) to send in headers, at the beginning of ``run``.

        Logically collective over the replicas. It is collective in every
        ``divergence_interval``-th call of ``run``, if the settings ask for full
        comparisons with a tolerance.
        """
        if self._planned != self._changes:
            self._plan()
        slices, lagging = self._slices, self._on_device
        if self._interval and not run_index % self._interval:
            if self._tolerance:
                self.check()
            else:
                mark = _hashed(mark, slices)
                mark = lagging.hashed(mark) if lagging is not None else mark
        mark = self._rolled(run_index, mark)
        if lagging is not None and self._rolls:
            mark, found = lagging.roll(run_index, mark)
            if found is not None and self._looks:
                self._warn_of_nan(*found)
        return mark

    def _rolled(self, run_index: int, mark: int) -> int:
        """Return the mark after hashing the next slice of variables in host memory."""
        slices = self._slices
        # Increment the mark, as `Position.enter_run` does, so that the marks of ranks
        # differ if they have run different numbers of steps. An exclusive or with the
        # step number would make some of these marks equal.
        mark = mark + 1 & (1 << 63) - 1
        if not self._rolls or not slices:
            return mark
        turn, index = divmod(run_index, len(slices))
        if not (turn + index) % _LOOKS_EVERY and self._looks:
            self._look_for_nan(slices[index][1])
        return _hashed(mark, slices[index : index + 1])

    def difference(self, comm: Any) -> DivergenceError | None:
        """Compare all copies, because marks differed; return an error for all replicas.

        Collective over ``comm``; all replicas are in the same call. Returns None if the
        copies are equal.
        """
        if self._on_device is not None:
            self._on_device.forget_copies()
        copies, freed = self._common(comm)
        now = self._channel.position.run_index
        last = self._compared_at
        if freed:
            # A program may create and free variables all the time: limit how often all
            # copies are compared, so that comparisons take no longer than hashing.
            # Replica 0 decides for all replicas, because ``num_slices`` differs between
            # ranks that freed different variables.
            recent = last is not None and now - last < self.num_slices
            if comm.bcast(recent):
                return None
        self._compared_at = now
        error = self._compare(comm, copies, 0.0)
        if error is None and not freed:
            get_logger("divergence").info(
                "copies of mirrored variables differed where run was entered, and were "
                "equal again at the next collective call"
            )
        return error

    def check(self) -> None:
        """Compare all copies of all variables now.

        Collective over the replicas. If copies differ, raises DivergenceError on every
        replica, for the first variable that differs.
        """
        self._channel.agree(_COMPARISON)
        with self._channel.moving(_COMPARISON) as comm:
            copies, _ = self._common(comm)
            error = self._compare(comm, copies, self._tolerance)
        if error is not None:
            raise error

    def _compare(
        self, comm: Any, copies: list[Copy], tolerance: float
    ) -> DivergenceError | None:
        return compare(comm, copies, tolerance, self.names)

    def _common(self, comm: Any) -> tuple[list[Copy], bool]:
        """Return the variables alive on all ranks, and whether some are not.

        Collective over ``comm``.
        """
        alive = {
            (number, v.name, v.shape, v.dtype.str): v for number, v in self._alive()
        }
        own = xxh3_64_intdigest(repr(list(alive)).encode(errors="replace"))
        freed = len(set(comm.allgather(own))) > 1
        if freed:
            found: list[list[_Key]] = comm.allgather(list(alive))
            common = set(found[0]).intersection(*found[1:])
            for key in alive.keys() - common:
                self._forget(key[0])
            alive = {key: v for key, v in alive.items() if key in common}
        names = [v.name for v in alive.values()]
        copies = []
        for place, variable in enumerate(alive.values(), 1):
            name = variable.name
            if names.count(name) > 1:
                name = f"{name} (number {place} of {len(names)})"
            copies.append(Copy(name, variable.component))
        return copies, freed

    def _plan(self) -> None:
        """Divide all variables into slices that take equally long to hash."""
        changes = self._changes
        every = [v for _, v in self._alive()]
        alive = [(v, octets(v.component)) for v in every if not is_device(v.component)]
        if self._on_device is not None:
            self._on_device.plan([v for v in every if is_device(v.component)])
        # ``octets`` copies a noncontiguous array; the copy would become outdated.
        assert all(v.component.flags.c_contiguous for v, _ in alive)
        total = sum(rows.size + _PIECE_BYTES for _, rows in alive)
        share = max(total // _SHARE + _PIECE_BYTES, _LEAST_BYTES)
        budget = min(share, _MOST_BYTES)
        slices: list[_Slice] = []
        left = 0
        for variable, rows in alive:
            start, width = 0, rows.shape[1]
            while start < len(rows):
                if left < _PIECE_BYTES + width:
                    slices.append(([], []))
                    left = budget
                stop = min(len(rows), start + max(1, (left - _PIECE_BYTES) // width))
                _add_piece(slices[-1], variable, rows, start, stop)
                left -= (stop - start) * width + _PIECE_BYTES
                start = stop
        self._slices = slices
        self._planned = changes

    def _look_for_nan(self, floats: list[tuple[_Variable, int, int]]) -> None:
        """Warn about the first variable that has NaN or infinities in these ranges."""
        for reference, start, stop in floats:
            variable = reference()
            if variable is None:
                continue
            finite = np.isfinite(variable.component.reshape(-1)[start:stop])
            if finite.all():
                continue
            place = start + int(np.argmin(finite))
            value = variable.component.reshape(-1)[place]
            self._warn_of_nan(variable, place, value)
            return

    def _warn_of_nan(self, variable: MirroredVariable, place: int, value: Any) -> None:
        self._looks = False
        if self._channel.topology.replica_id == 0:
            get_logger("divergence").warning(
                "variable %r is %s in element %s; the setting non_finite='warn', "
                "'raise' or 'skip' finds the gradient and the replica from which "
                "it comes",
                variable.name,
                value,
                index_of(place, variable.shape),
            )


def _add_piece(
    part: _Slice, variable: MirroredVariable, rows: Array, start: int, stop: int
) -> None:
    pieces, floats = part
    piece: Any = rows[start:stop]
    pieces.append(memoryview(piece.reshape(-1) if piece.flags.c_contiguous else piece))
    dtype = variable.dtype
    if variable.trainable and (dtype.kind in "fc" or is_half(dtype)):
        per_element = len(rows) // variable.size
        floats.append(
            (weakref.ref(variable), start // per_element, -(-stop // per_element))
        )


def _hashed(mark: int, slices: list[_Slice]) -> int:
    for pieces, _ in slices:
        for piece in pieces:
            # A piece is noncontiguous if there is padding between its numbers.
            mark = xxh3_64_intdigest(piece if piece.contiguous else bytes(piece), mark)
    return mark >> 1
