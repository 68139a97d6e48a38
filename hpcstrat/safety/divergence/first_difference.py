"""Search for the first array and element whose copies differ between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from hpcstrat.engine.arrays.kinds import to_host
from hpcstrat.engine.typing import Array
from hpcstrat.errors import DivergenceError

__all__ = [
    "ADVICE",
    "REPLICAS",
    "Copy",
    "Names",
    "compare_bits",
    "digest_of",
    "first_difference",
    "index_of",
    "most_common",
    "octets",
]

ADVICE = (
    "assign the same value on every rank, use an aggregation, or create the variable "
    "in the strategy's scope; if it is a weight of a torch model, call "
    "hpcstrat.integrations.torch.replicate(model, strategy) before training"
)
"""Advice at the end of an error about replicas that differ."""

# Two ranks search for their first difference in blocks of this size.
_BLOCK_BYTES = 1 << 16
_SHOWN_RANKS = 8


@dataclass(frozen=True, slots=True)
class Names:
    """The words by which errors name the ranks of a communicator.

    By default its ranks are replicas. ``numbers`` has a number for each rank, if it is
    not the rank itself.
    """

    one: str = "replica"
    every: str = "all replicas"
    numbers: Sequence[int] = ()

    def number(self, rank: int) -> int:
        """Return the number that errors name."""
        return self.numbers[rank] if self.numbers else rank

    def name(self, rank: int) -> str:
        """Return the words for one rank, such as ``replica 2``."""
        return f"{self.one} {self.number(rank)}"

    def names(self, ranks: Sequence[int]) -> str:
        """Return the words for these ranks, or the first eight if there are more."""
        found = [self.number(rank) for rank in ranks]
        if len(found) > _SHOWN_RANKS:
            shown = ", ".join(map(str, found[:_SHOWN_RANKS]))
            return f"{len(found)} {self.one}s ({shown}, ...)"
        return f"{self.one}s {found}"


REPLICAS = Names()
"""The names of ranks that are replicas."""


@dataclass(frozen=True, slots=True)
class Copy:
    """This rank's copy of a variable."""

    name: str
    # The variable's component, in host memory or on a GPU.
    array: Array


def octets(array: Array) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of an array, without the padding of long doubles.

    The result has shape (numbers, bytes per number). It is a view if the array is
    contiguous and in host memory. A complex long double counts as two numbers. An array
    on a GPU is copied to the host; the call waits for the copy.
    """
    flat = np.ascontiguousarray(to_host(array)).reshape(-1)
    if array.dtype.char in "gG":
        flat = flat.view(np.longdouble)
    rows = flat.view(np.uint8).reshape(-1, flat.dtype.itemsize)
    if array.dtype.char in "gG" and np.finfo(np.longdouble).nmant == 63:
        # Long doubles of x86 have 10 bytes, followed by padding with undefined content.
        rows = rows[:, :10]
    return rows


def compare_bits(
    comm: Any, copies: Sequence[Copy], names: Names = REPLICAS
) -> DivergenceError | None:
    """Compare the bits of arrays; return an error if ranks differ, or None.

    Collective over ``comm``; the arrays are in the same order on every rank.
    """
    from mpi4py import MPI

    own = np.array([digest_of(copy.array) for copy in copies], np.int64)
    # One allreduce with MAX returns the maxima and the negated minima. If their sum is
    # 0, the digests of all ranks are equal.
    extremes = np.concatenate([own, -own])
    comm.Allreduce(MPI.IN_PLACE, extremes, op=MPI.MAX)
    differing = np.flatnonzero(extremes[: len(own)] + extremes[len(own) :])
    if not differing.size:
        return None
    first = int(differing[0])
    copy = copies[first]
    reference, ranks = most_common(comm.allgather(int(own[first])))
    text, element = first_difference(
        comm, copy.array, copy.array.shape, reference, ranks, names=names
    )
    more = len(differing) - 1
    others = f", and that {more} more variables differ" if more else ""
    return DivergenceError(
        f"expected equal copies of variable {copy.name!r} on {names.every}, "
        f"{text}{others}; {ADVICE}",
        [names.number(rank) for rank in ranks],
        variable=copy.name,
        element=element,
    )


def first_difference(
    comm: Any,
    array: Array | None,
    shape: tuple[int, ...],
    reference: int,
    ranks: Sequence[int],
    *,
    names: Names = REPLICAS,
) -> tuple[str, tuple[int, ...]]:
    """Return a text about the first element that differs, and the element's index.

    Collective over ``comm``. The ranks ``reference`` and ``ranks[0]`` compare their
    arrays, which must have the same shape and dtype.
    """
    index, values = _first_element(comm, array, reference, ranks[0])
    element = index_of(index, shape)
    text = (
        f"found differences from {names.name(reference)} on {names.names(ranks)}, "
        f"first in element {element}: {values[1]} on {names.name(ranks[0])}, "
        f"{values[0]} on {names.name(reference)}"
    )
    return text, element


def most_common(found: Sequence[Any]) -> tuple[int, list[int]]:
    """Return the first rank with the most frequent value, and all ranks without it.

    If several values are equally frequent, the value that has the lowest rank counts.
    """
    counts: dict[Any, int] = {}
    for value in found:
        counts[value] = counts.get(value, 0) + 1
    usual = max(counts, key=lambda value: counts[value])
    ranks = [rank for rank, value in enumerate(found) if value != usual]
    return found.index(usual), ranks


def index_of(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the element at flat position ``place``, as integers."""
    return tuple(int(i) for i in np.unravel_index(place, shape))


def digest_of(array: Array) -> int:
    """Return a hash of the bits of an array, from 0 to 2**63 - 1."""
    return _digest(octets(array))


def _digest(rows: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """Return a 63-bit hash of bytes, whose negative also fits into 64 bits."""
    data: Any = rows if rows.flags.c_contiguous else rows.tobytes()
    return xxh3_64_intdigest(data) >> 1


def _first_element(
    comm: Any, array: Array | None, reference: int, odd: int
) -> tuple[int, tuple[str, str]]:
    """Return where the arrays of two ranks differ first, and both values.

    Collective over ``comm``; the result is the same on every rank.
    """
    found = None
    if comm.rank in (reference, odd):
        assert array is not None
        peer = odd if comm.rank == reference else reference
        rows = octets(array)
        step = max(1, _BLOCK_BYTES // rows.shape[1])
        starts = range(0, len(rows), step)
        own = [_digest(rows[start : start + step]) for start in starts]
        [other] = comm.exchange_objects({peer: own}, [peer]).values()
        start = next(s for s, a, b in zip(starts, own, other, strict=True) if a != b)
        block = np.ascontiguousarray(rows[start : start + step])
        [received] = comm.exchange_objects({peer: block}, [peer]).values()
        row = start + int(np.flatnonzero((block != received).any(axis=1))[0])
        index = row // (len(rows) // array.size)
        element = to_host(array.reshape(-1)[index : index + 1])
        [texts] = comm.exchange_objects({peer: _text(element)}, [peer]).values()
        if comm.rank == reference:
            found = index, _distinct(_text(element), texts)
    located: tuple[int, tuple[str, str]] = comm.bcast(found, root=reference)
    return located


def _text(element: Array) -> tuple[str, str]:
    """Return the decimal text of a number, and its bytes in hexadecimal."""
    return str(element[0]), octets(element)[:, ::-1].tobytes().hex()


def _distinct(own: tuple[str, str], other: tuple[str, str]) -> tuple[str, str]:
    """Return texts of two numbers, with their bytes if the decimal texts are equal."""
    if own[0] != other[0]:
        return own[0], other[0]
    return f"{own[0]} (0x{own[1]})", f"{other[0]} (0x{other[1]})"
