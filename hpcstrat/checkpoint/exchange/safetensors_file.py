"""The format safetensors, one value after the other: no file has to fit in memory.

Its specification is short (huggingface.co/docs/safetensors): the length of a header in
8 bytes, the header in JSON, the values. The library of that name holds all of them in
memory when it writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hpcstrat.checkpoint.file.schema import named_dtype
from hpcstrat.engine.typing import Array

__all__ = ["read_safetensors", "write_safetensors"]

_TYPES = {
    "BOOL": "bool",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
_NAMES = {name: letter for letter, name in _TYPES.items()}
_METADATA = "__metadata__"
# The library refuses longer headers.
_MOST_HEADER_BYTES = 100_000_000
_CHUNK_BYTES = 16 << 20


def write_safetensors(
    path: str, values: Mapping[str, Array], tick: Callable[[int], None]
) -> None:
    """Write values, which may be maps of another file."""
    header, end = dict[str, Any](), 0
    # Wider types first, so that each value is aligned, as the library has it.
    ordered = sorted(values, key=lambda name: (-values[name].dtype.itemsize, name))
    for name in ordered:
        value = values[name]
        letter = _NAMES.get(value.dtype.name)
        if letter is None or name == _METADATA:
            raise ValueError(
                f"expected values of types that safetensors has, found {name!r} of "
                f"{value.dtype.name}; choose another format, or leave it out by --part"
            )
        begin, end = end, end + value.nbytes
        offsets = [begin, end]
        header[name] = {"dtype": letter, "shape": value.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            raw = values[name].reshape(-1).view(np.uint8)
            for start in range(0, raw.size, _CHUNK_BYTES):
                chunk = raw[start : start + _CHUNK_BYTES]
                file.write(chunk.data)
                tick(chunk.size)


def read_safetensors(path: str) -> dict[str, Array]:
    """Return the values of a file, as maps of it, by name.

    Raises ValueError where it is no such file.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError(f"its header of {length} bytes does not fit in the file")
        header = json.loads(file.read(length))
    found = {}
    for name, about in header.items():
        if name != _METADATA:
            found[name] = _value(path, about, 8 + length, size)
    return found


def _value(path: str, about: dict[str, Any], base: int, size: int) -> Array:
    dtype = named_dtype(_TYPES[about["dtype"]])
    shape = tuple(map(int, about["shape"]))
    begin, end = (base + int(offset) for offset in about["data_offsets"])
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if (
        min(shape, default=0) < 0
        or end - begin != nbytes
        or not base <= begin <= end <= size
    ):
        raise ValueError(f"its values of shape {shape} do not fit in the file")
    if not nbytes:
        return np.zeros(shape, dtype)
    # Bytes first: values need not be aligned in the file.
    return np.memmap(path, np.uint8, "c", begin, (nbytes,)).view(dtype).reshape(shape)
