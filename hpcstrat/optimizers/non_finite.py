"""Detection of combined gradients that are NaN or infinite.

With the backends `Copies` and `Parts`, a combined gradient has the same bits on every
replica, so all replicas detect the same gradients without a message. Other backends
exchange the result in `all_finite`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import array_module, is_device, is_half, to_host
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.typing import Array
from hpcstrat.errors import NonFiniteError
from hpcstrat.optimizers.gradients import Gradient
from hpcstrat.strategies import Strategy
from hpcstrat.variables import Variable

# Arrays of up to this size are copied into one array: one test is faster than many.
_SMALL = 1024

_ADVICE = (
    "look for the example, lower the learning rate, clip gradients, or leave such "
    "steps out by the setting non_finite='skip'"
)


class NonFinite:
    """Applies the setting ``non_finite`` to steps whose gradients are not finite."""

    def __init__(self) -> None:
        self.skipped = 0
        self._steps = 0

    def refuses(
        self,
        policy: str,
        strategy: Strategy,
        given: Sequence[Sequence[tuple[Any, Variable]]],
        combined: Sequence[Gradient],
    ) -> bool:
        """Return whether to skip a step whose gradients are not finite.

        Collective over the strategy's replicas, with the same result on each. ``given``
        has the gradients of each replica of this process. With the policy ``"raise"``
        every replica raises a NonFiniteError. With other policies, a warning is logged
        for the 1st, 2nd, 4th, 8th ... step with such gradients.
        """
        self._steps += 1
        if policy == "raise":
            message = _describe(strategy, given, combined)
            raise NonFiniteError(f"expected finite gradients, found that {message}")
        skips = policy == "skip"
        self.skipped += skips
        # Only steps at powers of two are logged: a broken run must not fill its log.
        if self._steps & (self._steps - 1) == 0:
            message = _describe(strategy, given, combined)
            if strategy.writes:
                get_logger("optimizers").warning(
                    "%s (step %d of this kind, %s)",
                    message,
                    self._steps,
                    "left out" if skips else "applied",
                )
        return skips


def are_finite(combined: Sequence[Gradient]) -> bool:
    """Return whether all gradients are finite; waits for the GPU if some are on it."""
    arrays = _arrays(combined)
    host = [array for array in arrays if not is_device(array)]
    found: Any = True
    for array in arrays:
        if is_device(array):
            shown = array.astype(np.float32) if is_half(array.dtype) else array
            found = found & array_module(array).isfinite(shown).all()
    # `bool` waits for the GPU only once for all arrays.
    return all_finite(host) and bool(found)


def all_finite(arrays: Iterable[Array]) -> bool:
    """Return whether all elements of all arrays are finite."""
    small: dict[np.dtype[Any], list[Array]] = {}
    for array in arrays:
        if array.size <= _SMALL:
            small.setdefault(array.dtype, []).append(array)
        elif not is_finite(array.reshape(-1)):
            return False
    return all(is_finite(np.concatenate(group, axis=None)) for group in small.values())


def is_finite(flat: Array) -> bool:
    """Return whether all elements of a flat array are finite."""
    # A sum of squares by the BLAS, which supports only these four dtypes, is the faster
    # test. If the sum is not finite, it may have overflowed, so each element is tested.
    if flat.dtype.char in "fdFD" and math.isfinite(np.vdot(flat, flat).real):
        return True
    return bool(np.isfinite(flat).all())


def _arrays(gradients: Iterable[Gradient]) -> list[Array]:
    return [g.values if isinstance(g, IndexedSlices) else g for g in gradients]


def _describe(
    strategy: Strategy,
    given: Sequence[Sequence[tuple[Any, Variable]]],
    combined: Sequence[Gradient],
) -> str:
    """Describe the first gradient that is not finite, and the replicas that caused it.

    Collective over the strategy's replicas."""
    bad = [
        index
        for index, array in enumerate(_arrays(combined))
        if not np.isfinite(to_host(array)).all()
    ]
    _, variable = given[0][bad[0]]
    gradient = combined[bad[0]]
    array = to_host(_arrays([gradient])[0])
    place = int(np.argmin(np.isfinite(array)))
    element = tuple(int(i) for i in np.unravel_index(place, array.shape))
    if isinstance(gradient, IndexedSlices):
        element = (int(gradient.indices[element[0]]), *element[1:])
    finite = [
        bool(np.isfinite(_parts(pairs[bad[0]][0], element)).all()) for pairs in given
    ]
    found = strategy.collectives.all_gather_object(
        finite, f"origin of the gradient of {variable.name}"
    )
    flags = [is_finite for part in found for is_finite in part]
    ranks = [replica for replica, is_finite in enumerate(flags) if not is_finite]
    origin = f"from replicas {ranks}"
    if not ranks:
        origin = "though finite on every replica, because the sum overflows"
    more = len(bad) - 1
    others = f", and {more} more gradients are not finite" if more else ""
    return (
        f"the gradient of variable {variable.name!r} is {array.reshape(-1)[place]} in "
        f"element {element}, {origin}{others}; {_ADVICE}"
    )


def _parts(own: Any, element: tuple[int, ...]) -> Array:
    """Return this replica's gradient at an element of a variable.

    For IndexedSlices, return the values of all rows that have the element's index."""
    if not isinstance(own, IndexedSlices):
        return to_host(own[element])
    rows = own.values[own.indices == element[0]]
    return to_host(rows[(slice(None), *element[1:])])
