"""Descriptions of collective calls, as text and as a hash that ranks compare."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.typing import Array

__all__ = ["Call", "describe_call", "dtype_text", "signature_text"]

_SHOWN_ARRAYS = 8


@dataclass(frozen=True, slots=True)
class Call:
    """The description of a collective call."""

    # The operation, and shape and dtype of each array, as text.
    text: str
    # 63 bits of a hash of all details that must be equal on all ranks.
    digest: int
    # Bytes that this rank contributes, or 0 if not known; for timelines.
    nbytes: int = 0
    # The name of the algorithm, if there are several; for timelines.
    how: str = ""
    # A hash of the arrays' lengths on all ranks, as this rank expects them, which is
    # combined with ``digest``; 0 if it expects none.
    lengths: int = 0

    def with_lengths(self, lengths: Any) -> Call:
        """Return a copy of this call with the lengths on all ranks, for its header."""
        text = repr(lengths).encode()
        found = hashlib.blake2b(text, digest_size=8).digest()
        mark = int.from_bytes(found, "little") >> 1
        return replace(self, digest=self.digest ^ mark, lengths=mark)


@functools.lru_cache(maxsize=4096)
def describe_call(what: str, details: str = "", nbytes: int = 0) -> Call:
    """Return the description of a call, with a hash of ``what`` and ``details``.

    Ranks must agree on ``what`` and ``details``, but not on ``nbytes``.
    """
    digest = hashlib.blake2b(f"{what}\0{details}".encode(), digest_size=8).digest()
    text = f"{what} of {details}" if details else what
    if len(text) > 400:
        text = f"{text[:360]} ... ({len(text)} characters in all)"
    return Call(text, int.from_bytes(digest, "little") >> 1, nbytes)


_kept_text = functools.lru_cache(maxsize=512)(str)


def dtype_text(dtype: Any) -> str:
    """Return ``str(dtype)``; NumPy takes 2 us to make a text, so texts are kept."""
    # Structured dtypes may be equal, and yet have different texts.
    return str(dtype) if dtype.names else _kept_text(dtype)


def signature_text(structure: Any, arrays: Sequence[Array]) -> str:
    """Return a text for arrays and their tree, such as ``float32[4, 2] on a GPU``.

    ``structure`` is the tree structure, or None for a single array.
    """
    shown = [
        f"{a.dtype}{list(a.shape)}{' on a GPU' if is_device(a) else ''}"
        for a in arrays[:_SHOWN_ARRAYS]
    ]
    shapes = ", ".join(shown)
    if len(arrays) > _SHOWN_ARRAYS:
        rest = "".join(f"{a.dtype}{a.shape}" for a in arrays[_SHOWN_ARRAYS:])
        mark = hashlib.blake2b(rest.encode(), digest_size=4).hexdigest()
        shapes += f" and {len(arrays) - _SHOWN_ARRAYS} more arrays ({mark})"
    if structure is None:
        return shapes or "no arrays"
    text = str(structure).removeprefix("PyTreeSpec(").removesuffix(", NoneIsLeaf)")
    return (shapes or "no arrays") + ("" if text == "*" else f" in {text}")
