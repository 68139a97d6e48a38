"""Compiled modules, where they have been built.

``kernel.c`` sums in a worker, ``reader.c`` reads rows of files, ``update_rules.c`` has
the update rules of optimizers. They are built when the package is installed, see
``packaging/build_kernel.py``. Without a compiler there are none, and NumPy and Python
do the same: slower, with the same bits.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["VERSION", "load", "load_reader", "load_update_rules", "type_codes"]

VERSION = 4
"""Of the kernel that this package knows: one built from another version is not used."""

_READER_VERSION = 2
_RULES_VERSION = 1

# Codes of types by kind and size, as in the table of kernel.c.
_CODES = {"f4": 0, "f8": 1, "c8": 2, "c16": 3, "f2": 4, "bfloat16": 5}
_CODES |= {"i1": 6, "u1": 6, "i2": 7, "u2": 7, "i4": 8, "u4": 8, "i8": 9, "u8": 9}
# Codes of means of integers, which are float64.
_MEAN_CODES = {"i1": 10, "u1": 11, "i2": 12, "u2": 13}
_MEAN_CODES |= {"i4": 14, "u4": 15, "i8": 16, "u8": 17}


@functools.cache
def load() -> Any:
    """Return the kernel's module; None where it was not built, or from other sources.

    Not collective.
    """
    return _load("kernel", VERSION) if sys.byteorder == "little" else None


def load_reader() -> ModuleType | None:
    """Return the module that reads rows of files; None where it was not built.

    Not collective.
    """
    return _load("reader", _READER_VERSION)


@functools.cache
def load_update_rules() -> ModuleType | None:
    """Return the module of update rules; None where it was not built.

    Not collective.
    """
    return _load("update_rules", _RULES_VERSION)


def _load(name: str, version: int) -> ModuleType | None:
    try:
        found = importlib.import_module(f"{__name__}.{name}")
    except ImportError:
        return None
    # A build that has failed leaves the one before.
    return found if getattr(found, "VERSION", None) == version else None


def type_codes(dtypes: Sequence[np.dtype[Any]], *, means: bool) -> bytes | None:
    """Return the kernel's numbers of types; None where it does not know one.

    ``means`` says whether sums are divided.
    """
    codes, known = [], _CODES | _MEAN_CODES if means else _CODES
    for dtype in dtypes:
        name = f"{dtype.kind}{dtype.itemsize}" if dtype.isnative else ""
        # Types of other libraries have names only.
        code = known.get(dtype.name if dtype.num >= 256 else name)
        if code is None:
            return None
        codes.append(code)
    return bytes(codes)
