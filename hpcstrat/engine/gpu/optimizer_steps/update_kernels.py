"""The kernels of `updates.cu`, compiled by NVRTC for a type when it is first used.

All launches go to the program's current stream, and none waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import is_half

__all__ = [
    "CHUNK",
    "LANES",
    "MOST_BLOCKS",
    "OPTIONS",
    "PARTS",
    "THREADS",
    "fold",
    "is_fused",
    "kernel",
    "kind_of",
    "launch_small",
    "prepare",
    "source",
]

# What one block does at a time, in elements; into how many sums it divides them; and
# into how many those of all chunks of an array.
CHUNK, LANES, PARTS = 8192, 256, 64
THREADS = 256
MOST_BLOCKS = 1 << 14

_KINDS = {"e": "F16", "f": "F32", "d": "F64"}

# Of the compiler: without fused multiply-add each operation rounds, as on the host.
OPTIONS = ("--fmad=false",)


def is_fused(dtype: np.dtype[Any]) -> bool:
    """Whether there are kernels for a type: float16, bfloat16, float32 and float64."""
    return kind_of(dtype) is not None


def kind_of(dtype: np.dtype[Any]) -> str | None:
    """Return the name that the source has for a type; None without kernels."""
    if dtype.kind == "f" and dtype.char in _KINDS:
        return _KINDS[dtype.char]
    return "BF16" if is_half(dtype) else None


def source(kind: str) -> str:
    """Return the CUDA source of the kernels of one type, without any ``#include``."""
    named = {"TYPE": kind, "CHUNK": CHUNK, "LANES": LANES, "PARTS": PARTS}
    parts = [f"#define {name} {value}\n" for name, value in named.items()]
    here = Path(__file__).parent
    for file in (here.parent / "singles.cu", here / "updates.cu"):
        parts.append(file.read_text(encoding="ascii"))
    return "".join(parts)


@functools.cache
def _module(kind: str) -> Any:
    import cupy

    return cupy.RawModule(code=source(kind), options=OPTIONS)


@functools.cache
def kernel(kind: str, name: str) -> Any:
    """Return a kernel, called with blocks, threads and arguments.

    Compiles all of its type the first time.
    """
    return _module(kind).get_function(name)


@functools.cache
def _compile(kind: str) -> None:
    _module(kind).compile()


def prepare(dtypes: Iterable[np.dtype[Any]]) -> None:
    """Compile the kernels for types, as their first launch would do."""
    for kind in {kind_of(dtype) for dtype in dtypes}:
        if kind is not None:
            _compile(kind)


def launch_small(kind: str, name: str, threads: int, *arguments: Any) -> None:
    """Launch a kernel that goes through its results, one for each thread."""
    blocks = min(-(-threads // THREADS), MOST_BLOCKS)
    kernel(kind, name)((blocks,), (THREADS,), arguments)


def fold(kind: str, sums: Sequence[Any], firsts: Any, count: int) -> None:
    """Add up the lanes of chunks, then the chunks of arrays to PARTS numbers each.

    ``sums`` are float64 of lanes, as the kernels leave them, of chunks and of parts;
    ``firsts`` has the first chunk of each array, and the number of chunks.
    """
    lanes, chunks, parts = sums
    columns = chunks.size
    launch_small(kind, "fold_lanes", columns, lanes, np.int32(columns), chunks)
    threads = count * PARTS
    launch_small(kind, "fold_chunks", threads, chunks, firsts, np.int32(count), parts)
