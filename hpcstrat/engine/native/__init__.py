"""Compiled C modules of the library, and functions that load them if they were built.

``kernel.c`` sums inside a worker, ``reader.c`` reads rows of files, ``update_rules.c``
has the update rules of optimizers, ``last_line.c`` prints a line when a signal ends the
process, and ``hashed_copy.c`` copies and hashes bytes in one pass. The modules are
built when the package is installed, see ``packaging/build_kernel.py``. If there was no
compiler, NumPy and Python do the same work more slowly, with the same bits; only the
last line is missing.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

__all__ = [
    "VERSION",
    "load",
    "load_hashed_copy",
    "load_last_line",
    "load_reader",
    "load_update_rules",
    "type_codes",
]

VERSION = 11
"""Version of the kernel that this package can use; other versions are ignored."""

_READER_VERSION = 4
_RULES_VERSION = 1
_LAST_LINE_VERSION = 1
_HASHED_COPY_VERSION = 1

# Codes of dtypes, by kind and size: their indices in the table TYPES of elements.h.
_CODES = {"f4": 0, "f8": 1, "c8": 2, "c16": 3, "f2": 4, "bfloat16": 5}
_CODES |= {"i1": 6, "u1": 6, "i2": 7, "u2": 7, "i4": 8, "u4": 8, "i8": 9, "u8": 9}
# Codes for means of integers, whose results are float64.
_MEAN_CODES = {"i1": 10, "u1": 11, "i2": 12, "u2": 13}
_MEAN_CODES |= {"i4": 14, "u4": 15, "i8": 16, "u8": 17}
# Codes for MAX, and for ANY, which is the MAX of booleans; those for MIN and ALL follow
# in the same order.
_MOST_CODES = {"f4": 18, "f8": 19, "f2": 20, "bfloat16": 21}
_MOST_CODES |= {"i1": 22, "i2": 23, "i4": 24, "i8": 25}
_MOST_CODES |= {"b1": 26, "u1": 26, "u2": 27, "u4": 28, "u8": 29}
_LEAST_CODES = {name: code + 12 for name, code in _MOST_CODES.items()}
_OF_OPERATION = {
    "SUM": _CODES,
    "MEAN": _CODES | _MEAN_CODES,
    **dict.fromkeys(("MAX", "ANY"), _MOST_CODES),
    **dict.fromkeys(("MIN", "ALL"), _LEAST_CODES),
}


@functools.cache
def load() -> Any:
    """Return the kernel's module; None if not built, or built from another version.

    Not collective.
    """
    return _load("kernel", VERSION) if sys.byteorder == "little" else None


def load_reader() -> ModuleType | None:
    """Return the module that reads rows of files; None if it was not built.

    Not collective.
    """
    return _load("reader", _READER_VERSION)


@functools.cache
def load_update_rules() -> ModuleType | None:
    """Return the module of update rules; None if it was not built.

    Not collective.
    """
    return _load("update_rules", _RULES_VERSION)


def load_last_line() -> ModuleType | None:
    """Return the module that prints a last line; None if it was not built.

    Not collective.
    """
    return _load("last_line", _LAST_LINE_VERSION)


@functools.cache
def load_hashed_copy() -> ModuleType | None:
    """Return the module that copies and hashes bytes; None if it was not built.

    Not collective.
    """
    little = sys.byteorder == "little"
    return _load("hashed_copy", _HASHED_COPY_VERSION) if little else None


def _load(name: str, version: int) -> ModuleType | None:
    try:
        found = importlib.import_module(f"{__name__}.{name}")
    except ImportError:
        return None
    # After a failed build, the module of an earlier version may still be there.
    return found if getattr(found, "VERSION", None) == version else None


def type_codes(dtypes: Sequence[np.dtype[Any]], op: str) -> bytes | None:
    """Return the kernel's codes of dtypes; None if the kernel lacks one of the dtypes.

    A code says how the kernel combines values of a dtype by ``op``, such as ``SUM``.
    """
    codes, known = [], _OF_OPERATION[op]
    for dtype in dtypes:
        name = f"{dtype.kind}{dtype.itemsize}" if dtype.isnative else ""
        # Dtypes of other libraries, such as bfloat16, are identified by name.
        code = known.get(dtype.name if dtype.num >= 256 else name)
        if code is None:
            return None
        codes.append(code)
    return bytes(codes)
