"""Fields of NetCDF-4 files (which are HDF5 files), and decoding of their stored values.

Decoding follows CF 1.11 (sections 2.5.1, 4, 7.1 and 8.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hpcstrat.data.files.columns import Column, DecodedColumn, PaddedColumn
from hpcstrat.engine.typing import Array

__all__ = ["decoded", "fields_of", "is_netcdf", "padded"]

# Values that the NetCDF library returns for data that were never written, by type.
_DEFAULT_FILLS = {
    "i1": -127,
    "u1": 255,
    "i2": -32767,
    "u2": 65535,
    "i4": -2147483647,
    "u4": 4294967295,
    "i8": -9223372036854775806,
    "u8": 18446744073709551614,
    "f4": 9.969209968386869e36,
    "f8": 9.969209968386869e36,
}


def is_netcdf(file: Any, path: str) -> bool:
    """Return whether an HDF5 file is to be read as NetCDF-4."""
    return path.endswith((".nc", ".nc4", ".cdf")) or "_NCProperties" in file.attrs


def _scale_of(dataset: Any) -> Any:
    """Return the dimension scale of a dataset's first dimension, or None."""
    if not dataset.ndim or not len(dataset.dims[0]):
        return None
    return dataset.dims[0][0]


def fields_of(
    datasets: dict[str, Any], dimension: str | None, path: str
) -> tuple[dict[str, Any], int]:
    """Return the fields along the rows' dimension, and the length of this dimension.

    Fields are datasets of numbers, but not coordinates or bounds.
    """
    scales = {name: _scale_of(dataset) for name, dataset in datasets.items()}
    fields = {
        name: scale
        for name, scale in scales.items()
        if scale is not None and not datasets[name].is_scale
    }
    names = Counter(scale.name.lstrip("/") for scale in fields.values())
    if dimension is None:
        unlimited = [
            scale.name.lstrip("/")
            for scale in fields.values()
            if scale.maxshape[0] is None
        ]
        ordered = Counter(unlimited) or names
        dimension = ordered.most_common(1)[0][0] if ordered else None
    if dimension is None or dimension not in names:
        raise ValueError(
            f"expected fields along the dimension {dimension or 'of the rows'} in "
            f"{path}, found those along {sorted(names)}; name one by dimension="
        )
    beside: set[str] = set()
    for dataset in datasets.values():
        for attribute in ("bounds", "coordinates", "climatology"):
            beside.update(_text(dataset.attrs.get(attribute, "")).split())
    rows = next(s for s in fields.values() if s.name.lstrip("/") == dimension)
    found = {
        name: datasets[name]
        for name, scale in fields.items()
        if scale.name.lstrip("/") == dimension
        and name not in beside
        and datasets[name].dtype.kind in "biuf"
    }
    # An unlimited variable may have fewer rows than its dimension.
    length = max(int(rows.shape[0]), *(int(d.shape[0]) for d in found.values()), 0)
    return found, length


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _scalar(dataset: Any, name: str) -> Any:
    value = dataset.attrs.get(name)
    if value is None:
        return None
    flat = np.asarray(value).reshape(-1)
    return flat[0] if flat.size else None


def _stored_type(dataset: Any) -> Any:
    dtype = dataset.dtype.newbyteorder("=")
    if _text(dataset.attrs.get("_Unsigned", "")).lower() == "true":
        return np.dtype(f"u{dtype.itemsize}")
    return dtype


def padded(column: Column, dataset: Any, length: int) -> Column:
    """Return a column as long as its dimension; the added rows have the fill value."""
    if column.num_rows >= length:
        return column
    fill = _scalar(dataset, "_FillValue")
    if fill is None:
        key = dataset.dtype.newbyteorder("=").str[1:]
        fill = _DEFAULT_FILLS.get(key, 0)
    return PaddedColumn(column, length, fill)


def decoded(column: Column, dataset: Any) -> Column:
    """Return a column of scaled values, with NaN for missing or invalid values.

    Integers of up to 16 bits become float32, larger ones float64. A dataset without
    fill value, valid range, scale or offset keeps its values; but rows that `padded`
    has added to floats become NaN.
    """
    fill, missing = _scalar(dataset, "_FillValue"), dataset.attrs.get("missing_value")
    scale, offset = _scalar(dataset, "scale_factor"), _scalar(dataset, "add_offset")
    least, most = _scalar(dataset, "valid_min"), _scalar(dataset, "valid_max")
    valid = dataset.attrs.get("valid_range")
    if valid is not None and np.size(valid) == 2:
        least, most = np.asarray(valid).reshape(-1)
    stored = _stored_type(dataset)
    if fill is None and stored.kind == "f" and isinstance(column, PaddedColumn):
        fill = column.value
    gone = [
        value for value in (fill, *np.atleast_1d(missing or [])) if value is not None
    ]
    is_scaled = scale is not None or offset is not None
    if not (gone or is_scaled or least is not None or most is not None):
        if stored == column.dtype:
            return column
        return DecodedColumn(column, stored, partial(_as_unsigned, stored))
    wide = stored.kind == "f" and stored.itemsize > 4
    wide = wide or (stored.kind in "iu" and stored.itemsize > 2)
    dtype = np.dtype(np.float64 if wide else np.float32)
    decode = partial(
        _decode,
        stored=stored,
        gone=tuple(gone),
        limits=(least, most),
        scale=1.0 if scale is None else float(scale),
        offset=0.0 if offset is None else float(offset),
    )
    made: Callable[[Array, Array], None] = decode
    return DecodedColumn(column, dtype, made)


def _as_unsigned(stored: Any, values: Array, out: Array) -> None:
    out[...] = values.view(stored)


def _decode(
    values: Array,
    out: Array,
    *,
    stored: Any,
    gone: tuple[Any, ...],
    limits: tuple[Any, Any],
    scale: float,
    offset: float,
) -> None:
    values = values.view(stored)
    # Compare before scaling, because the attributes refer to stored values.
    is_gone = np.zeros(values.shape, bool)
    for value in gone:
        is_gone |= values == np.asarray(value).astype(stored)
    least, most = limits
    if least is not None:
        is_gone |= values < np.asarray(least).astype(stored)
    if most is not None:
        is_gone |= values > np.asarray(most).astype(stored)
    out[...] = values
    if scale != 1.0:
        out *= out.dtype.type(scale)
    if offset != 0.0:
        out += out.dtype.type(offset)
    out[is_gone] = np.nan
