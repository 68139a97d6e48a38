"""Conversion from float32 to half precision and back, by vectorized arithmetic.

NumPy converts one number at a time, which takes longer than half precision saves on a
network of 1 Gbit/s. This module multiplies a float32 by a power of two, so that its
exponent has the bias of the narrow type. The leading bits of the float32 are then the
bits of the narrow number; the remaining bits round that number to nearest, ties to
even. The result is correct for subnormal numbers, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.engine.typing import Array

__all__ = ["narrowed", "widened"]

# For each narrow type: how many bits fewer its significand has than float32's, and how
# much smaller its exponent bias is.
_KINDS = {"float16": (13, 112), "bfloat16": (16, 0)}
_SIGN, _REST = np.uint32(0x8000), np.uint32(0x7FFF)


def narrowed(
    magnitudes: Array, values: Array, exponent: int, dtype: np.dtype[Any]
) -> Array:
    """Return the bits of ``values * 2**exponent`` as uint16.

    The bits encode numbers of ``dtype``, which is float16 or bfloat16. The values are
    finite float32 numbers, and ``values * 2**exponent`` is less than the largest number
    of ``dtype``. ``magnitudes`` has the absolute values, and is overwritten.
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
    """Return float32 values from the bits that `narrowed` returned.

    Bits of infinities and NaNs give wrong numbers.
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
    """Multiply by a power of two, in two factors that float32 can represent."""
    for part in (exponent // 2, exponent - exponent // 2):
        values *= np.float32(2.0**part)
