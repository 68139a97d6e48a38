"""Numbers in half precision, made of float32 by instructions that take many at once.

NumPy converts them one by one, which takes longer than they save on a wire of 1 Gbit/s.
A float32 is multiplied by a power of two, so that its exponent has the bias of the
narrow type. Its bits are then those of the narrow number and some more digits, by which
it is rounded to nearest, ties to even; this holds for subnormal numbers, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.engine.typing import Array

__all__ = ["narrowed", "widened"]

# For each type by name: how many fewer digits it has, and how much smaller the bias of
# its exponents is.
_KINDS = {"float16": (13, 112), "bfloat16": (16, 0)}
_SIGN, _REST = np.uint32(0x8000), np.uint32(0x7FFF)


def narrowed(
    magnitudes: Array, values: Array, exponent: int, dtype: np.dtype[Any]
) -> Array:
    """Return the bits of ``values * 2**exponent`` as uint16.

    The values are float32, all finite, and their products are less than the largest of
    ``dtype``, which is float16 or bfloat16. ``magnitudes``, the values without signs,
    are overwritten.
    """
    digits, bias = _KINDS[dtype.name]
    _scale(magnitudes, exponent - bias)
    bits = magnitudes.view(np.uint32)
    odd = (bits >> np.uint32(digits)) & np.uint32(1)
    bits += np.uint32((1 << (digits - 1)) - 1)
    bits += odd
    bits >>= np.uint32(digits)
    signs = np.right_shift(values.view(np.uint32), np.uint32(16), out=odd)
    signs &= _SIGN
    bits |= signs
    return bits.astype(np.uint16)


def widened(bits: Array, exponent: int, dtype: np.dtype[Any]) -> Array:
    """Return the float32 values that `narrowed` was given, rounded.

    Numbers that were not finite become wrong ones.
    """
    digits, bias = _KINDS[dtype.name]
    wide = bits.astype(np.uint32)
    signs = (wide & _SIGN) << np.uint32(16)
    wide &= _REST
    wide <<= np.uint32(digits)
    values: Array = wide.view(np.float32)
    _scale(values, bias - exponent)
    wide |= signs
    return values


def _scale(values: Array, exponent: int) -> None:
    """Multiply by a power of two, in two factors, each of which float32 has."""
    for part in (exponent // 2, exponent - exponent // 2):
        values *= np.float32(2.0**part)
