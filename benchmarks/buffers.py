"""Arrays with numbers whose sum is known, and mpi4py's all-reduce of them in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["fill", "in_pieces", "require_sum"]

Array = np.ndarray[Any, Any]

# Small integers: their sums are exact in all types. Larger arrays repeat them, with a
# period that is no power of two, so that exchanged pieces are found out.
_NUMBERS = np.arange(251 * 4096) % 251


def fill(array: Array, rank: int) -> None:
    """Write a rank's numbers into an array, which touches all its pages, too.

    Not collective.

    Parameters
    ----------
    array : ndarray
        Contiguous.
    rank : int
        Whose numbers.
    """
    flat = array.reshape(-1)
    for start in range(0, flat.size, _NUMBERS.size):
        part = flat[start : start + _NUMBERS.size]
        np.add(_NUMBERS[: part.size], rank, out=part, casting="unsafe")


def require_sum(what: str, array: Array, num_ranks: int) -> None:
    """Demand that an array holds the sum of the ranks' numbers.

    Not collective.

    Parameters
    ----------
    what : str
        Who has added them.
    array : ndarray
        Contiguous.
    num_ranks : int
        The numbers of how many ranks, from 0.

    Raises
    ------
    ArithmeticError
        If an element is not what it should be.
    """
    flat = array.reshape(-1)
    numbers = _NUMBERS[: flat.size]
    total = numbers * num_ranks + num_ranks * (num_ranks - 1) // 2
    for start in range(0, flat.size, _NUMBERS.size):
        part = flat[start : start + _NUMBERS.size]
        wrong = np.flatnonzero(part != total[: part.size])
        if wrong.size:
            place = wrong[0]
            raise ArithmeticError(
                f"expected {total[place]} as element {start + place} of {flat.size} "
                f"after {what}, found {part[place]}; do not use its times"
            )


def in_pieces(
    comm: Any, send: Any, receive: Array, piece_bytes: int
) -> Callable[[], None]:
    """Return a function that sums a buffer by one ``Allreduce`` after the other.

    Not collective; the function is, over ``comm``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    send : ndarray of shape (n,) or mpi4py.MPI.IN_PLACE
        This rank's numbers.
    receive : ndarray of shape (n,)
        The sum.
    piece_bytes : int
        Of how many bytes each is at most.

    Returns
    -------
    callable
        Without arguments. The pieces are cut here, not at each call.
    """
    step = max(piece_bytes // receive.itemsize, 1)
    parts = [slice(i, i + step) for i in range(0, receive.size, step)]
    is_array = isinstance(send, np.ndarray)
    pairs = [(send[part] if is_array else send, receive[part]) for part in parts]

    def all_reduce() -> None:
        for own, total in pairs:
            comm.Allreduce(own, total)

    return all_reduce
