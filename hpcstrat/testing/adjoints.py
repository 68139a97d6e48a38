"""The dot-product test: whether a function is the adjoint of another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.strategies.current import get_strategy

__all__ = ["check_adjoint"]


def check_adjoint(
    forward: Callable[..., Any],
    adjoint: Callable[..., Any],
    *shapes: Sequence[int],
    inside: Any = None,
    dtype: Any = np.float64,
    seed: int = 0,
    tolerance: float = 1e-12,
) -> None:
    """Require that a linear function and its adjoint fit each other.

    Collective over the ranks of the replica.

    The test draws random arrays x for the function A, and y of the shapes of A(x), and
    compares the sums ``<A(x), y>`` and ``<x, adjoint(y)>`` over all ranks. The values
    differ between ranks.

    Parameters
    ----------
    forward : callable
        The linear function: takes an array for each of ``shapes``, and returns an array
        or a sequence of arrays. It may make calls of all ranks.
    adjoint : callable
        Takes an array for each result of ``forward``, and returns an array for each of
        ``shapes``; if there are several, a sequence.
    *shapes : sequence of int
        The shapes of this rank's arrays. They may differ between ranks.
    inside : Inside, optional
        The ranks of the replica; default: those of the current strategy's replica.
    dtype : dtype_like
        A floating or complex type.
    seed : int
        The random values depend on this number and on the position of the rank.
    tolerance : float
        Largest difference of the two sums, relative to the sum of the absolute values
        of their terms.

    Raises
    ------
    AssertionError
        On every rank, if the sums differ; the message has both.
    ValueError
        If ``adjoint`` returns another number of arrays, or other shapes; the other
        ranks raise ReplicaError.
    """
    if inside is None:
        strategy: Any = get_strategy()
        inside = strategy.inside
    rng = np.random.default_rng([seed, inside.position])
    kind = np.dtype(dtype)

    def drawn(shape: Sequence[int]) -> Array:
        values = rng.standard_normal(tuple(shape))
        if kind.kind == "c":
            return (values + 1j * rng.standard_normal(tuple(shape))).astype(kind)
        return values.astype(kind)

    def products() -> Array:
        given = [drawn(shape) for shape in shapes]
        found = _arrays(forward(*(one.copy() for one in given)))
        others = [drawn(one.shape) for one in found]
        back = _arrays(adjoint(*(one.copy() for one in others)))
        if [one.shape for one in back] != [one.shape for one in given]:
            raise ValueError(
                f"expected arrays of shapes {[one.shape for one in given]} from the "
                f"adjoint, found {[one.shape for one in back]}; return as many, of "
                "these shapes"
            )
        left, right = _terms(found, others), _terms(given, back)
        return np.array([left.sum(), right.sum(), abs(left).sum() + abs(right).sum()])

    own = inside.collectives.call("check_adjoint", products)
    sums = inside.collectives.batch_reduce(ReduceOp.SUM, own, "check_adjoint")
    left, right, scale = (complex(one) if kind.kind == "c" else one for one in sums)
    # A comparison with NaN is false, so that NaN is an error.
    if not abs(left - right) <= tolerance * abs(scale):
        raise AssertionError(
            f"expected <A x, y> == <x, adjoint(y)>, found {left} and {right}, which "
            f"differ by {abs(left - right) / abs(scale):.1e} of their terms; correct "
            "the adjoint, or pass a larger tolerance"
        )


def _arrays(value: Any) -> list[Array]:
    several = isinstance(value, (list, tuple))
    return [np.asarray(one) for one in (value if several else [value])]


def _terms(ones: list[Array], others: list[Array]) -> Array:
    """Return the terms of the inner product of two lists of arrays, as a flat array."""
    return np.concatenate(
        [
            np.ravel(np.conj(one) * other).astype(np.result_type(one, other, "f8"))
            for one, other in zip(ones, others, strict=True)
        ]
    )
