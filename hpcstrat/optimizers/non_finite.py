"""Combined gradients that are NaN or infinite.

With the backends `Copies` and `Parts` a combined gradient has the same bits on every
replica, so that all replicas decide the same without a message; other backends agree in
`UpdateBackend.all_finite`. Finding the replica that it comes from takes a message.
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

# Copying so many elements takes less time than a call for each array.
_SMALL = 1024

_ADVICE = (
    "look for the example, lower the learning rate, clip gradients, or leave such "
    "steps out by the setting non_finite='skip'"
)


class NonFinite:
    """Skips, reports or refuses an optimizer's steps with gradients that are not
    finite.
    """

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

        Collective over the strategy's replicas, with the same result. ``given`` are the
        gradients of each replica of this process. The policy ``"raise"`` raises a
        NonFiniteError on every replica; otherwise the 1st, 2nd, 4th, 8th ... such step
        is logged.
        """
        self._steps += 1
        if policy == "raise":
            message = _describe(strategy, given, combined)
            raise NonFiniteError(f"expected finite gradients, found that {message}")
        skips = policy == "skip"
        self.skipped += skips
        # Less and less often, so that a broken run does not fill its log.
        if self._steps & (self._steps - 1) == 0:
            message = _describe(strategy, given, combined)
            if strategy.replica_id == 0:
                get_logger("optimizers").warning(
                    "%s (step %d of this kind, %s)",
                    message,
                    self._steps,
                    "left out" if skips else "applied",
                )
        return skips


def are_finite(combined: Sequence[Gradient]) -> bool:
    """Whether all gradients are finite; waits for a GPU that has any of them."""
    arrays = _arrays(combined)
    host = [array for array in arrays if not is_device(array)]
    found: Any = True
    for array in arrays:
        if is_device(array):
            shown = array.astype(np.float32) if is_half(array.dtype) else array
            found = found & array_module(array).isfinite(shown).all()
    # `bool` waits for the GPU, once for all arrays.
    return all_finite(host) and bool(found)


def all_finite(arrays: Iterable[Array]) -> bool:
    """Whether no element of any array is NaN or infinite."""
    small: dict[np.dtype[Any], list[Array]] = {}
    for array in arrays:
        if array.size <= _SMALL:
            small.setdefault(array.dtype, []).append(array)
        elif not is_finite(array.reshape(-1)):
            return False
    return all(is_finite(np.concatenate(group, axis=None)) for group in small.values())


def is_finite(flat: Array) -> bool:
    """Whether no element of a flat array is NaN or infinite."""
    # One pass of the BLAS, which has these types only. Squares that overflow need the
    # second look; vdot gives no warning of them.
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
    """Name the first gradient that is not finite, and the replicas it comes from."""
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
    """Return this replica's part of an element, or several parts if it has rows."""
    if not isinstance(own, IndexedSlices):
        return to_host(own[element])
    rows = own.values[own.indices == element[0]]
    return to_host(rows[(slice(None), *element[1:])])
