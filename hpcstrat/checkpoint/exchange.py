"""Conversion of checkpoints to and from files of other programs.

The formats are NumPy's (.npz), plain HDF5 and safetensors. Values are converted one
after the other, so that a file need not fit in memory. The safetensors library is not
used, because its writer needs all values in memory. A safetensors file consists of the
header's length in 8 bytes, the header in JSON, and the values; see
huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import h5py
import numpy as np
from numpy.lib import format as npy_format

from hpcstrat.checkpoint.file.schema import named_dtype
from hpcstrat.engine.typing import Array

__all__ = [
    "read_hdf5",
    "read_npz",
    "read_safetensors",
    "write_hdf5",
    "write_npz",
    "write_safetensors",
]

# HDF5 has no bfloat16: store such values as float32, and "bfloat16" in this attribute.
_TYPE = "hpcstrat_dtype"
_BFLOAT16 = "bfloat16"
_CHUNK_BYTES = 16 << 20
# Place of two lengths in a member's ZIP header: of its name, and of its extra field.
_LENGTHS = slice(26, 30)
_HEADER_BYTES = 30


def write_npz(
    path: str, values: Mapping[str, Array], tick: Callable[[int], None]
) -> None:
    """Write values to an .npz file; the values may be memory-mapped."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, value in values.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy_format.write_array(member, value, allow_pickle=False)
            tick(value.nbytes)


def read_npz(path: str) -> dict[str, Array]:
    """Return an .npz file's values by name, memory-mapped if they are uncompressed."""
    found = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            with archive.open(info) as member:
                if info.compress_type == zipfile.ZIP_STORED:
                    found[name] = _mapped(file, info, member)
                else:
                    found[name] = npy_format.read_array(member, allow_pickle=False)
            if found[name].dtype == np.dtype("V2"):
                # NumPy has no bfloat16, and writes such values as plain bytes.
                found[name] = found[name].view(named_dtype(_BFLOAT16))
    return found


def _mapped(file: Any, info: zipfile.ZipInfo, member: Any) -> Array:
    """Return an uncompressed member of a ZIP archive as a memory-mapped array."""
    version = npy_format.read_magic(member)
    read = getattr(npy_format, f"read_array_header_{version[0]}_0")
    shape, is_fortran, dtype = read(member)
    if dtype.hasobject:
        raise ValueError(f"{info.filename} holds objects of Python")
    file.seek(info.header_offset)
    lengths = np.frombuffer(file.read(_HEADER_BYTES)[_LENGTHS], "<u2")
    begin = info.header_offset + _HEADER_BYTES + int(lengths.sum()) + member.tell()
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if not nbytes:
        return np.zeros(shape, dtype)
    raw: Array = np.memmap(file, np.uint8, "c", begin, (nbytes,)).view(dtype)
    return raw.reshape(shape, order="F" if is_fortran else "C")


def write_hdf5(
    path: str, values: Mapping[str, Array], tick: Callable[[int], None]
) -> None:
    """Write values to an HDF5 file; each ``/`` in a name makes a group."""
    with h5py.File(path, "w") as plain:
        for name, value in values.items():
            if value.dtype.name == _BFLOAT16:
                _write_half(plain.create_dataset(name, value.shape, "<f4"), value)
            else:
                plain[name] = value
            tick(value.nbytes)


def _write_half(dataset: Any, value: Array) -> None:
    """Write bfloat16 as float32 by shifting bits, because a cast changes some NaN."""
    dataset.attrs[_TYPE] = _BFLOAT16
    bits = value.view(np.uint16)
    rows = max(1, _CHUNK_BYTES // max(1, bits[:1].nbytes)) if bits.ndim else 0
    starts = range(0, len(bits), rows) if bits.ndim else ()
    places: list[Any] = [slice(start, start + rows) for start in starts]
    for place in places if bits.ndim else [()]:
        wide = bits[place].astype(np.uint32) << np.uint32(16)
        dataset[place] = wide.view(np.float32)


def read_hdf5(path: str) -> dict[str, Array]:
    """Return an HDF5 file's values by path, memory-mapped if stored contiguously."""
    found = {}
    with h5py.File(path) as plain:

        def visit(name: str, value: Any) -> None:
            if isinstance(value, h5py.Dataset):
                found[name] = _of_dataset(path, name, value)

        plain.visititems(visit)
    return found


def _of_dataset(path: str, name: str, dataset: Any) -> Array:
    if dataset.dtype.kind not in "biufc":
        raise ValueError(f"{name} is of {dataset.dtype}, which is no number")
    offset = dataset.id.get_offset()
    if offset is None or not dataset.size:
        value = dataset[()]
    else:
        raw = np.memmap(path, np.uint8, "c", offset, (dataset.nbytes,))
        value = raw.view(dataset.dtype).reshape(dataset.shape)
    value = np.asarray(value)
    if dataset.attrs.get(_TYPE) == _BFLOAT16:
        bits = (value.astype("<f4", copy=False).view(np.uint32) >> 16).astype(np.uint16)
        return bits.view(named_dtype(_BFLOAT16))
    return value


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
# The safetensors library refuses longer headers.
_MOST_HEADER_BYTES = 100_000_000


def write_safetensors(
    path: str, values: Mapping[str, Array], tick: Callable[[int], None]
) -> None:
    """Write values to a safetensors file; the values may be memory-mapped."""
    header, end = dict[str, Any](), 0
    # Write wider types first, as safetensors does, so that each value is aligned.
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
    """Return the values of a safetensors file by name, as memory-mapped arrays.

    Raises ValueError if the file is not a safetensors file.
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
    # Map the values as bytes, because they may be unaligned in the file.
    return np.memmap(path, np.uint8, "c", begin, (nbytes,)).view(dtype).reshape(shape)
