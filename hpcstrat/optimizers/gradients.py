"""Functions on gradients: checks, zeros for missing gradients, norms and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import rounded, without_fp_warnings
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import (
    array_module,
    device_of,
    is_device,
    is_half,
    to_device,
    to_reducible,
)
from hpcstrat.engine.arrays.row_updates import summed_rows
from hpcstrat.engine.context import second_strategy
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.strategies import get_strategy
from hpcstrat.variables import Variable

Gradient = Array | IndexedSlices
Pairs = Sequence[tuple[Gradient | None, Variable]]

# Number of elements squared at a time, to allocate no array of the gradient's size.
_BLOCK = 1 << 15


def _checked_gradient(gradient: Any, variable: Variable) -> Gradient:
    """Return a gradient as an array or IndexedSlices of its variable's dtype.

    Python numbers are copied to the variable's device. An array must already be on that
    device, and is copied only if its dtype differs. Raises ValueError for a wrong
    shape, dtype or device.
    """
    dtype, shape, name = variable.dtype, variable.shape, variable.name
    if dtype.kind not in "fc" and not is_half(dtype):
        raise ValueError(
            f"expected a floating variable to update, found {name!r} of dtype {dtype}; "
            "leave it out, or make it a float"
        )
    sparse = isinstance(gradient, IndexedSlices)
    # Gradients are converted, so that all replicas reduce in the variable's dtype.
    array = to_reducible(gradient.values if sparse else gradient)
    array = _in_place_of(variable, array, sparse or hasattr(gradient, "dtype"))
    if array.dtype.kind == "c" and dtype.kind != "c":
        raise ValueError(
            f"expected a real gradient for variable {name!r} of dtype {dtype}, found "
            f"{array.dtype}; take its real part"
        )
    values = rounded(array, dtype)
    if not sparse:
        if array.shape != shape:
            raise ValueError(
                f"expected a gradient of shape {shape} for variable {name!r}, found "
                f"{array.shape}; check the model"
            )
        return values
    rows, whole = gradient.indices, gradient.dense_shape
    if not shape or array.shape[1:] != shape[1:] or whole not in (None, shape):
        raise ValueError(
            f"expected rows of variable {name!r} of shape {shape}, found rows of shape "
            f"{array.shape[1:]} of an array of shape {whole}; check the model"
        )
    if rows.size and (rows.min() < 0 or rows.max() >= shape[0]):
        raise ValueError(
            f"expected rows from 0 to {shape[0] - 1} of variable {name!r}, found "
            f"{rows.min()} to {rows.max()}; check the indices"
        )
    # Indices are converted, because their dtypes may differ between replicas.
    return IndexedSlices(values, rows.astype(np.int64, copy=False), shape)


def _in_place_of(variable: Variable, array: Array, placed: bool) -> Array:
    """Return a gradient on its variable's device; raise an error for another device.

    If ``placed`` is False, as for Python numbers, the gradient is copied instead."""
    component: Any = variable.component
    on_gpu = is_device(component)
    if on_gpu and not placed:
        return to_device(array)
    # An empty array belongs to no particular GPU.
    if on_gpu == is_device(array) and (
        not on_gpu or not array.size or component.device == array.device
    ):
        return array
    advice = (
        "copy it with cupy.asarray, or leave the variable in host memory (setting "
        "device='cpu')"
        if on_gpu
        else "make the variable of a CuPy array or with the setting device='gpu', or "
        "copy the gradient with cupy.asnumpy"
    )
    raise ValueError(
        f"expected a gradient on {device_of(component)} for variable "
        f"{variable.name!r}, which is there, found one on {device_of(array)}; {advice}"
    )


def zero_gradient(variable: Variable, sparse: bool) -> Gradient:
    """Return a gradient of zeros for a variable; if ``sparse``, one without rows.

    The gradient is on the variable's device. In host memory, dense zeros are a
    read-only view of a single zero."""
    module = array_module(variable.component)
    if sparse:
        values = module.empty((0, *variable.shape[1:]), variable.dtype)
        return IndexedSlices(values, module.empty(0, np.int64), variable.shape)
    if is_device(variable.component):
        zeros: Array = module.zeros(variable.shape, variable.dtype)
        return zeros
    return np.broadcast_to(np.zeros((), variable.dtype), variable.shape)


def merged_rows(rows: IndexedSlices) -> IndexedSlices:
    """Sum rows with equal indices; return new rows with ascending indices."""
    indices, values = summed_rows(rows.indices, rows.values)
    return IndexedSlices(values, indices, rows.dense_shape)


def sum_of_squares(array: Array) -> Any:
    """Return the square of an array's norm, summed in double precision.

    Contiguous arrays with equal bits have results with equal bits, at any alignment in
    memory. For an array on a GPU the result is on the GPU, and the host does not wait.
    """
    flat = array.reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    if is_device(flat):
        doubles = flat.astype(np.float64)
        return array_module(flat).sum(doubles * doubles)
    total = 0.0
    for start in range(0, flat.size, _BLOCK):
        # Square in double precision, because squares of large float32 numbers overflow.
        block = flat[start : start + _BLOCK].astype(np.float64)
        # The order of summation of np.dot would depend on the BLAS and its threads.
        np.multiply(block, block, out=block)
        total += float(np.add.reduce(block))
    return total


def clip_to_norm(
    arrays: Sequence[Array],
    limit: float,
    total: Callable[[Sequence[Any]], Any] = sum,
) -> Any:
    """Scale arrays in place so that their common norm is at most ``limit``.

    Returns the norm before scaling. ``total`` adds the sums of squares of the arrays;
    if ranks have different arrays, it adds the other ranks', too. If the norm is not
    finite, all elements become NaN, to show the error, as in tf.clip_by_global_norm
    (Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural
    networks, ICML 2013, arXiv:1211.5063).
    """
    squares: Any = total([sum_of_squares(array) for array in arrays])
    if is_device(squares) and all(map(is_device, arrays)):
        return _clip_on_device(arrays, limit, squares)
    norm = math.sqrt(squares)
    # The comparison uses ``not``, so that NaN counts as too large.
    if not norm <= limit:
        scale(arrays, limit / norm if math.isfinite(norm) else math.nan)
    return norm


def _clip_on_device(arrays: Sequence[Any], limit: float, squares: Any) -> Any:
    """Clip arrays, given their squared norm on a GPU, without waiting for the GPU."""
    module = array_module(squares)
    norm = module.sqrt(squares)
    factor = module.where(module.isfinite(norm), limit / norm, math.nan)
    # A factor of NaN fails the comparison, and so remains NaN.
    factor = module.where(factor >= 1, 1.0, factor)
    for array in arrays:
        if is_half(array.dtype):
            array[...] = array.astype(np.float32) * factor.astype(np.float32)
        else:
            np.multiply(array, factor.astype(array.dtype), out=array)
    return norm


def scale(arrays: Iterable[Array], factor: float) -> None:
    """Multiply arrays in place; float16 and bfloat16 are multiplied in float32."""
    if factor == 1:
        return
    with np.errstate(all="ignore"):
        for array in arrays:
            if not is_half(array.dtype):
                np.multiply(array, array.dtype.type(factor), out=array)
            elif is_device(array):
                array[...] = array.astype(np.float32) * np.float32(factor)
            else:
                # In a 16-bit type, a small factor would be rounded to 0.
                factors = np.float32(factor)
                np.multiply(array, factors, out=array, casting="unsafe")


def require_names(variables: Iterable[Variable]) -> None:
    """Raise ValueError if there are no variables, or two have the same name."""
    # Checkpoints store state by the names of variables, so names must be unique.
    names = [variable.name for variable in variables]
    if not names:
        raise ValueError(
            "expected at least one gradient, found none; give pairs of gradient and "
            "variable"
        )
    if len(set(names)) == len(names):
        return
    twice = sorted({name for name in names if names.count(name) > 1})
    raise ValueError(
        f"expected variables with names of their own, found {twice} more than once;"
        " name them with Variable(..., name=...)"
    )


@without_fp_warnings
def checked(grads_and_vars: Iterable[tuple[Any, Variable]]) -> Pairs:
    """Return gradients as arrays of their variables' dtypes.

    Raises ValueError for a wrong shape, dtype or device, before any communication.
    """
    pairs = [
        (None if gradient is None else _checked_gradient(gradient, variable), variable)
        for gradient, variable in grads_and_vars
    ]
    require_names(variable for _, variable in pairs)
    _require_owner(variable for _, variable in pairs)
    return pairs


def _require_owner(variables: Iterable[Variable]) -> None:
    """Raise an error for a variable whose copies would get different updates."""
    strategy = get_strategy()
    for variable in variables:
        owner = variable.distribute_strategy
        # With one replica, a plain variable is allowed, because it has no other copies.
        if owner is strategy or (owner is None and strategy.num_replicas_in_sync == 1):
            continue
        if owner is None:
            raise ValueError(
                f"expected a variable made in the scope of {strategy!r}, found the "
                f"plain variable {variable.name!r}, of which each rank has its own; "
                "create it in the strategy's scope"
            )
        if not strategy.is_default:
            raise RuntimeError(
                f"expected apply_gradients of variable {variable.name!r} in the scope "
                f"of the strategy that it was made in, {owner!r}, "
                f"{second_strategy(strategy)}"
            )
        raise RuntimeError(
            f"expected apply_gradients of variable {variable.name!r} inside the "
            f"function that {owner!r} runs, found it outside; call it through "
            "strategy.run"
        )


def require_gradients(pairs: Pairs) -> None:
    """Raise ValueError if all gradients are None."""
    if all(gradient is None for gradient, _ in pairs):
        names = ", ".join(variable.name for _, variable in pairs)
        raise ValueError(
            f"expected at least one gradient, found None for all of {names}; check "
            "that the loss depends on the variables"
        )


class Filling:
    """Replaces missing gradients, so that all replicas reduce the same list."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    def filled(
        self,
        collectives: Any,
        pairs: Pairs,
        shares: Sequence[tuple[Array, bool]] | None = None,
        unclaimed: Mapping[str, bool] | None = None,
        *,
        only_restored: bool = False,
    ) -> list[tuple[Gradient | None, Variable]]:
        """Return the gradients, with zeros for gradients that only other replicas have.

        Collective over the strategy's replicas. ``shares``, if given, are this
        replica's gradients to use instead of zeros, each with a flag: whether a restore
        gave this replica a part of it. With ``only_restored``, gradients of which no
        replica has restored a part are left as they are. ``unclaimed`` maps the name of
        each known variable that is not in ``pairs`` to whether this replica has a
        gradient for it. A result is None if no replica has a gradient, and dense if any
        replica's gradient is dense. Raises ValueError on every replica if a replica has
        a gradient for an unclaimed variable.
        """
        others = unclaimed or {}
        # Row 0 marks dense gradients, row 1 sparse ones, row 2 those that were
        # restored; all are summed over replicas.
        kinds = np.zeros((3, len(pairs) + len(others)), np.int64)
        kinds[0, len(pairs) :] = list(others.values())
        kinds[2, : len(shares or ())] = [is_restored for _, is_restored in shares or ()]
        for index, (gradient, _) in enumerate(pairs):
            if gradient is not None:
                kinds[int(isinstance(gradient, IndexedSlices)), index] = 1
        names = ", ".join([*(variable.name for _, variable in pairs), *others])
        dense, sparse, restored = collectives.batch_reduce(
            ReduceOp.SUM, kinds, f"apply_gradients: which of {names} have one"
        )
        _require_claimed(others, dense[len(pairs) :])
        filled: list[tuple[Gradient | None, Variable]] = []
        for index, (gradient, variable) in enumerate(pairs):
            agreed = gradient
            if only_restored and not restored[index]:
                filled.append((gradient, variable))
                continue
            if isinstance(gradient, IndexedSlices) and dense[index]:
                # Another replica has a dense gradient of this variable.
                agreed = gradient.to_dense()
            elif gradient is None and dense[index] + sparse[index]:
                if shares is not None:
                    agreed = shares[index][0]
                else:
                    agreed = zero_gradient(variable, not dense[index])
                    self._note(variable.name)
            filled.append((agreed, variable))
        return filled

    def _note(self, name: str) -> None:
        # Warn once per variable: an unused layer has no gradient in any step.
        if name not in self._noted:
            self._noted.add(name)
            get_logger("optimizers").warning(
                "no gradient for variable %r on this replica; it counts as zeros", name
            )


def _require_claimed(names: Iterable[str], has: Any) -> None:
    lost = [name for name, count in zip(names, has, strict=True) if count]
    if lost:
        raise ValueError(
            f"expected all variables whose gradients were being accumulated when the "
            f"state was saved, found none of the name {', '.join(map(repr, lost))}; "
            "give every variable in each call, with None where it has no gradient"
        )
