"""Arrays of numbers with a known sum, and mpi4py's allreduce of arrays in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["fill", "in_pieces", "require_sum"]

Array = np.ndarray[Any, Any]

# Use small integers, because their sums are exact in all types. Larger arrays repeat
# them, with a period that is no power of two, so that a check detects swapped pieces.
_NUMBERS = np.arange(251 * 4096) % 251


def fill(array: Array, rank: int) -> None:
    """Write a rank's numbers into an array, and so touch all its memory pages.

    Not collective.

    Parameters
    ----------
    array : ndarray
        A contiguous array.
    rank : int
        Whose numbers.
    """
    flat = array.reshape(-1)
    for start in range(0, flat.size, _NUMBERS.size):
        part = flat[start : start + _NUMBERS.size]
        np.add(_NUMBERS[: part.size], rank, out=part, casting="unsafe")


def require_sum(what: str, array: Array, num_ranks: int) -> None:
    """Raise if an array does not hold the sum of the ranks' numbers.

    Not collective.

    Parameters
    ----------
    what : str
        Name of the alternative that computed the sum.
    array : ndarray
        A contiguous array.
    num_ranks : int
        Number of ranks whose numbers were summed.

    Raises
    ------
    ArithmeticError
        If an element is wrong.
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
    """Return a function that sums a buffer piece by piece, each by one ``Allreduce``.

    Not collective; the returned function is collective over ``comm``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    send : ndarray of shape (n,) or mpi4py.MPI.IN_PLACE
        This rank's numbers.
    receive : ndarray of shape (n,)
        The sum.
    piece_bytes : int
        Maximum size of a piece in bytes.

    Returns
    -------
    callable
        Without arguments. The pieces are views that are made here, not at each call.
    """
    step = max(piece_bytes // receive.itemsize, 1)
    parts = [slice(i, i + step) for i in range(0, receive.size, step)]
    is_array = isinstance(send, np.ndarray)
    pairs = [(send[part] if is_array else send, receive[part]) for part in parts]

    def all_reduce() -> None:
        for own, total in pairs:
            comm.Allreduce(own, total)

    return all_reduce
