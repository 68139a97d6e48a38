"""Casts of values to a dtype, by one rule and without floating-point warnings.

A value is cast only if it is a plain Python number or the caller requested the dtype,
and only if the dtype can hold the value. Integers stay integers of the same value, text
stays text, finite numbers stay finite, and fractions do not become integers. Rounding
is allowed.
"""

from __future__ import annotations

import contextvars
import operator
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import optree

from hpcstrat.engine.call_sites import pass_over
from hpcstrat.engine.typing import Array

__all__ = [
    "FIRST_FOREIGN_TYPE",
    "PLAIN",
    "assign",
    "call_without_fp_warnings",
    "cast",
    "from_python",
    "is_half",
    "make_quiet",
    "rounded",
    "unmasked",
    "without_fp_warnings",
]

PLAIN = (bool, int, float, complex)
# NumPy's own types have a ``dtype.num`` below this number; ml_dtypes' types do not.
FIRST_FOREIGN_TYPE = 256
# A number may be cast to a kind with the same or a higher value in this table.
_KINDS = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}
_DEFAULTS = (
    ("integers", np.dtype(np.int32), "int64"),
    ("floats", np.dtype(np.float32), "float64"),
)


without_fp_warnings = np.errstate(all="ignore")
"""Decorator of functions; it suppresses floating-point warnings of their arithmetic.

A sum that overflows to infinity is a valid result. If its warning became an error, by a
warnings filter or by numpy.seterr, one rank would leave a call in which the other ranks
wait. A decorated function must not call functions of the program, because the program's
own settings must apply to them.
"""
# NumPy's frames call functions that numpy.errstate decorates: do not report these
# frames as the program's call site.
pass_over(os.path.dirname(np.__file__))


def make_quiet() -> Callable[..., Any]:
    """Return a 3 times faster `call_without_fp_warnings` for one thread only."""
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run


class _Quiet(threading.local):
    """One context per thread, in which NumPy calls give no floating-point warnings."""

    def __init__(self) -> None:
        self.run = make_quiet()


_quiet = _Quiet()


def call_without_fp_warnings(
    function: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    """Call a NumPy function without floating-point warnings; for the hot path.

    The function must not call Python code, for which the strategy's context variables
    would not be set.
    """
    # ``run`` costs less than half as much as entering and leaving numpy.errstate.
    return _quiet.run(function, *args, **named)


assign: Any = operator.setitem
"""Assignment for `call_without_fp_warnings`; it is faster than ``numpy.copyto``."""


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return whether a type is a half-precision float: float16 or bfloat16."""
    if dtype.num < FIRST_FOREIGN_TYPE:
        return dtype.char == "e"
    # Reading dtype.name is slow: test NumPy's own types first.
    return dtype.name == "bfloat16"


def cast(array: Array, dtype: np.dtype[Any]) -> Array:
    """Cast an array to a dtype; raise ValueError if the dtype cannot hold its values.

    Returns the array itself if it already has the dtype. Values on a GPU are not
    checked, because the host would have to wait for the GPU.
    """
    if array.dtype == dtype:
        return array
    source, wanted = _kind(array.dtype), _kind(dtype)
    if source and wanted:
        fits = _KINDS[source] <= _KINDS[wanted]
    else:
        fits = np.can_cast(array.dtype, dtype, "same_kind")
    on_host = isinstance(array, np.ndarray)
    if fits or (on_host and not array.size):
        result = rounded(array, dtype)
        if not on_host or np.can_cast(array.dtype, dtype, "safe"):
            return result
        if _holds(result, array, wanted):
            return result
    raise ValueError(
        f"expected values that {dtype} can represent, found {array.dtype} "
        f"{array!r:.80}; cast them with astype, if the loss is intended"
    )


def rounded(array: Array, dtype: np.dtype[Any]) -> Array:
    """Cast an array to a dtype, even if that changes its values.

    Returns the array itself if it already has the dtype.
    """
    if array.dtype == dtype:
        return array
    convert: Any = array.astype
    # Call CuPy's astype directly: it calls Python code, and gives no warnings.
    on_host = isinstance(array, np.ndarray)
    result: Array = (
        call_without_fp_warnings(convert, dtype) if on_host else convert(dtype)
    )
    return result


def _kind(dtype: np.dtype[Any]) -> str:
    return "f" if is_half(dtype) else dtype.kind if dtype.kind in _KINDS else ""


def _holds(result: Array, array: Array, kind: str) -> bool:
    if kind in ("f", "c"):
        return bool((np.isfinite(result) == np.isfinite(array)).all())
    # Do not check dtypes of other libraries, whose limits are unknown.
    foreign = result.dtype.num >= FIRST_FOREIGN_TYPE
    return foreign or bool((result == array).all())


def unmasked(value: Any) -> Any:
    """Return the value; raise ValueError if it is an array with a mask."""
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            "expected an array without a mask, found a masked array, whose mask would "
            "not be sent to other replicas; fill it first, or pass its data and its "
            "mask"
        )
    return value


def from_python(value: Any, dtype: np.dtype[Any] | None) -> Array:
    """Convert Python numbers, or nested sequences of numbers, to an array.

    By default, floats become float32 and integers int32; if arrays are among the
    numbers, the result has NumPy's common dtype. Raises ValueError if the default dtype
    cannot hold a number. Raises TypeError or OverflowError if the given dtype cannot
    hold a number, or a value is not a number.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TypeError(str(error)) from error
    typed = False
    if not isinstance(value, PLAIN):
        leaves: Any = optree.tree_leaves(value)
        for leaf in leaves:
            typed = typed or hasattr(unmasked(leaf), "dtype")
        if array.dtype.kind == "f" and leaves and all(type(n) is int for n in leaves):
            # NumPy converts integers to floats if some do not fit int64.
            array = np.asarray(value, object)
    if dtype is not None:
        try:
            return cast(array, dtype)
        except ValueError as error:
            raise TypeError(str(error)) from error
    if array.dtype.kind == "O" and not all(type(n) is int for n in array.flat):
        raise TypeError("no numbers")
    if array.dtype.kind not in "iufO" or typed:
        return array
    name, default, wide = _DEFAULTS[array.dtype.kind == "f"]
    try:
        return cast(array, default)
    except ValueError as error:
        raise ValueError(
            f"expected Python {name} that fit {default}, the default, found "
            f"{value!r:.80}; pass dtype={wide!r}, or an array"
        ) from error
