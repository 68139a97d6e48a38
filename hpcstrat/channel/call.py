"""What a rank is about to do, in words and as a digest that ranks compare."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from hpcstrat.arrays.kinds import is_device
from hpcstrat.typing import Array

__all__ = [
    "Call",
    "call_site",
    "describe_call",
    "is_of_program",
    "pass_over",
    "signature_text",
]

# Folders whose frames are no part of the program.
_passed_over: tuple[str, ...] = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
)
_SHOWN_ARRAYS = 8


@dataclass(frozen=True, slots=True)
class Call:
    """A collective call."""

    # For people: the operation, and shape and dtype of each array.
    text: str
    # 63 bits of a hash of all that ranks must agree on; the same in every process.
    digest: int
    # How much data this rank brings, where that is known; for timelines.
    nbytes: int = 0


@functools.lru_cache(maxsize=4096)
def describe_call(what: str, details: str = "", nbytes: int = 0) -> Call:
    """Return the call for a text, equal on ranks that give equal texts.

    ``details`` are more that ranks must agree on, shown shortened; ``nbytes``, how much
    data this rank brings, need not be the same on all.
    """
    digest = hashlib.blake2b(f"{what}\0{details}".encode(), digest_size=8).digest()
    text = f"{what} of {details}" if details else what
    if len(text) > 400:
        text = f"{text[:360]} ... ({len(text)} characters in all)"
    return Call(text, int.from_bytes(digest, "little") >> 1, nbytes)


def signature_text(structure: Any, arrays: Sequence[Array]) -> str:
    """Describe arrays, and what holds them, such as ``float32[4, 2] on a GPU``.

    ``structure`` is None for a single array.
    """
    shapes = ", ".join(
        f"{a.dtype}{list(a.shape)}{' on a GPU' if is_device(a) else ''}"
        for a in arrays[:_SHOWN_ARRAYS]
    )
    if len(arrays) > _SHOWN_ARRAYS:
        rest = "".join(f"{a.dtype}{a.shape}" for a in arrays[_SHOWN_ARRAYS:])
        mark = hashlib.blake2b(rest.encode(), digest_size=4).hexdigest()
        shapes += f" and {len(arrays) - _SHOWN_ARRAYS} more arrays ({mark})"
    if structure is None:
        return shapes or "no arrays"
    text = str(structure).removeprefix("PyTreeSpec(").removesuffix(", NoneIsLeaf)")
    return f"{shapes or 'no arrays'}" + ("" if text == "*" else f" in {text}")


def pass_over(folder: str) -> None:
    """Take a library that calls this one for no part of the program, in places."""
    global _passed_over  # noqa: PLW0603 - read in every search
    _passed_over = *_passed_over, os.path.abspath(folder) + os.sep


def is_of_program(file: str) -> bool:
    """Whether a file is the program's, and not a library's that only calls for it."""
    return not file.startswith(_passed_over)


def call_site() -> str:
    """Return file and line of the innermost frame of the program.

    Such as ``train.py:41``; empty where there is no such frame.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_of_program(name):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
