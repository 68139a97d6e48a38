"""The compiled kernel for sums inside one worker, where it has been built.

``kernel.c`` is built when the package is installed, see ``packaging/build_kernel.py``.
Without a compiler there is none, and NumPy does the same: slower, with the same bits.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["VERSION", "load", "type_codes"]

VERSION = 1
"""Of the kernel that this package knows: one built from another version is not used."""

# By kind and size of a type; as in the table of kernel.c.
_CODES = {
    "f4": 0,
    "f8": 1,
    "c8": 2,
    "c16": 3,
    "f2": 4,
    "bfloat16": 5,
    "i1": 6,
    "u1": 7,
    "i2": 8,
    "u2": 9,
    "i4": 10,
    "u4": 11,
    "i8": 12,
    "u8": 13,
}


def load() -> ModuleType | None:
    """Return the kernel's module; None where it was not built, or from other sources.

    Not collective.
    """
    try:
        found = importlib.import_module(f"{__name__}.kernel")
    except ImportError:
        return None
    # A build that has failed leaves the one before.
    if getattr(found, "VERSION", None) != VERSION or sys.byteorder != "little":
        return None
    return found


def type_codes(dtypes: Sequence[np.dtype[Any]]) -> bytes | None:
    """Return the kernel's numbers of types; None where it does not know one."""
    codes = []
    for dtype in dtypes:
        name = f"{dtype.kind}{dtype.itemsize}" if dtype.isnative else ""
        # Types of other libraries have names only.
        code = _CODES.get(dtype.name if dtype.num >= 256 else name)
        if code is None:
            return None
        codes.append(code)
    return bytes(codes)
