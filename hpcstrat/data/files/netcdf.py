"""Fields of NetCDF-4 files (which are HDF5 files), and decoding of their stored values.

Missing values are those that the Python library netCDF4 masks, and scaled values are
those that it returns. Where it differs from CF 1.11 (sections 2.5.1 and 8.1), netCDF4
is followed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hpcstrat.data.files.columns import Column, DecodedColumn, PaddedColumn
from hpcstrat.engine.typing import Array

__all__ = ["NetcdfVariable", "is_netcdf", "variables_of"]

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
_NUMBERS = "biuf"
_NOT_A_VARIABLE = "This is a netCDF dimension but not a netCDF variable"


def is_netcdf(file: Any, path: str) -> bool:
    """Return whether an HDF5 file is to be read as NetCDF-4."""
    return path.endswith((".nc", ".nc4", ".cdf")) or "_NCProperties" in file.attrs


def _dimension_of(dataset: Any) -> Any:
    """Return the dimension scale of a dataset's first dimension, or None."""
    if dataset.is_scale:
        return dataset
    return dataset.dims[0][0] if len(dataset.dims[0]) else None


def _kind_of(dataset: Any) -> str:
    """Return the kind of a dataset's dtype; "" if NumPy has no such type."""
    try:
        return str(dataset.dtype.kind)
    except (TypeError, ValueError):
        return ""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def variables_of(
    found: dict[str, Any],
    dimension: str | None,
    path: str,
    wanted: Sequence[str] | None,
) -> dict[str, NetcdfVariable]:
    """Return the variables along the rows' dimension that may be columns.

    These are variables of numbers, but not coordinates or bounds, unless ``wanted`` has
    their names.
    """
    datasets = _datasets(found)
    scales = {name: _dimension_of(dataset) for name, dataset in datasets.items()}
    scales = {name: scale for name, scale in scales.items() if scale is not None}
    names = {name: scale.name.lstrip("/") for name, scale in scales.items()}
    named = [name for name in wanted or () if name in names]
    fields = [name for name in names if not datasets[name].is_scale]
    if dimension is None and named:
        dimension = names[named[0]]
    elif dimension is None:
        unlimited = [names[name] for name in fields if scales[name].maxshape[0] is None]
        ordered = Counter(unlimited or [names[name] for name in fields])
        dimension = ordered.most_common(1)[0][0] if ordered else None
    along = [name for name in (*fields, *named) if names[name] == dimension]
    for name in named:
        if name not in along:
            raise ValueError(
                f"expected columns along the dimension {dimension} of {path}, found "
                f"{name} along {names[name]}; leave it out of columns=, or change "
                "dimension="
            )
    if not along:
        raise ValueError(
            f"expected fields along the dimension {dimension or 'of the rows'} in "
            f"{path}, found those along {sorted({names[name] for name in fields})}; "
            "name one by dimension="
        )
    # An unlimited variable may have fewer rows than its dimension.
    length = max(
        max(int(datasets[name].shape[0]), int(scales[name].shape[0]))
        for name in names
        if names[name] == dimension
    )
    beside = _beside(datasets)
    return {
        name: NetcdfVariable(datasets[name], name, path, length)
        for name in along
        if name in named
        or (name not in beside and _kind_of(datasets[name]) in _NUMBERS)
    }


def _datasets(found: dict[str, Any]) -> dict[str, Any]:
    """Return the datasets that are variables, by the names of the variables."""
    datasets: dict[str, Any] = {}
    for name, dataset in found.items():
        # A dimension without a variable is a dataset of this name, without values.
        if not hasattr(dataset, "dims") or _text(
            dataset.attrs.get("NAME", "")
        ).startswith("This is a netCDF dimension but not a netCDF variable"):
            continue
        # A variable with a dimension's name that is not its coordinate has a prefix.
        *groups, last = name.split("/")
        datasets["/".join([*groups, last.removeprefix("_nc4_non_coord_")])] = dataset
    return datasets


def _beside(datasets: dict[str, Any]) -> set[str]:
    """Return the names of the variables that are coordinates or bounds of others."""
    beside: set[str] = set()
    for name, dataset in datasets.items():
        groups = name.split("/")[:-1]
        for attribute in ("bounds", "coordinates", "climatology"):
            for other in _text(dataset.attrs.get(attribute, "")).split():
                # The variable is in the same group, or in a group above it.
                beside.update(
                    "/".join([*groups[:depth], other.lstrip("/")])
                    for depth in range(len(groups) + 1)
                )
    return beside


class NetcdfVariable:
    """A variable of a NetCDF-4 file: its missing values, and its scaling."""

    def __init__(self, dataset: Any, name: str, path: str, length: int) -> None:
        self.dataset = dataset
        self._where = f"{name} of {path}"
        # Number of rows of its first dimension.
        self._length = length

    @property
    def time_units(self) -> str:
        """Units and calendar of times; "" for other variables."""
        units, calendar = map(self._text, ("units", "calendar"))
        return f"{units} {calendar}".strip() if " since " in units else ""

    def column(self, stored: Column, decode: bool) -> Column:
        """Return a column as long as the dimension, from a column of stored values.

        If ``decode``, it has scaled values, with NaN for missing or invalid values and
        for the rows that the variable lacks: integers of up to 16 bits become float32,
        larger ones float64. Integers without such attributes and rows stay integers; to
        read a missing value among them is an error.
        """
        if stored.dtype.kind not in _NUMBERS:
            return self._padded(stored, "" if stored.dtype.kind == "O" else b"")
        if not decode:
            return self._padded(stored, self._own_fill())
        return self._padded(self._decoded(stored), np.nan)

    def _padded(self, column: Column, value: Any) -> Column:
        if column.num_rows >= self._length:
            return column
        return PaddedColumn(column, self._length, value)

    def _own_fill(self) -> Any:
        fill = self._fitting("_FillValue")
        return self._default_fill() if fill is None else fill[0]

    def _default_fill(self) -> Any:
        return _DEFAULT_FILLS.get(self._dtype.str[1:], 0)

    @property
    def _dtype(self) -> Any:
        return self.dataset.dtype.newbyteorder("=")

    def _text(self, name: str) -> str:
        return _text(self.dataset.attrs.get(name, ""))

    def _decoded(self, column: Column) -> Column:
        is_unsigned = self._text("_Unsigned") in {"true", "True"}
        is_unsigned = is_unsigned and self._dtype.kind == "i"
        stored = np.dtype(f"u{self._dtype.itemsize}") if is_unsigned else self._dtype
        fill, missing = self._fitting("_FillValue"), self._fitting("missing_value")
        least, most = self._limits()
        scale, offset = self._number("scale_factor"), self._number("add_offset")
        found = (fill, missing, least, most, scale, offset)
        is_kept = stored.kind in "biu" and all(value is None for value in found)
        is_kept = is_kept and column.num_rows >= self._length
        gone = [*(() if fill is None else fill), *(() if missing is None else missing)]
        if fill is None and not is_unsigned and self._has_default_fill(is_kept):
            gone.append(self._dtype.type(self._default_fill()))
        if is_kept:
            keep = partial(_keep, stored=stored, gone=gone, where=self._where)
            is_same = stored == column.dtype and not gone
            return column if is_same else DecodedColumn(column, stored, keep)
        is_wide = stored.itemsize > (4 if stored.kind == "f" else 2)
        limits = [None if x is None else x.view(stored)[0] for x in (least, most)]
        decode = partial(
            _decode,
            stored=stored,
            gone=[np.asarray(value).view(stored) for value in gone],
            limits=limits,
            scale=scale,
            offset=offset,
        )
        return DecodedColumn(column, np.float64 if is_wide else np.float32, decode)

    def _has_default_fill(self, is_kept: bool) -> bool:
        """Return whether the type's default fill value stands for a missing value."""
        from h5py import h5d

        if self._dtype.str[1:] not in {"i1", "u1"}:
            return self._dtype.str[1:] in _DEFAULT_FILLS
        # The values of bytes are too few for a default, says NetCDF; netCDF4 masks it.
        properties = self.dataset.id.get_create_plist()
        has_fill = properties.fill_value_defined() == h5d.FILL_VALUE_USER_DEFINED
        return has_fill and not is_kept

    def _limits(self) -> tuple[Array | None, Array | None]:
        valid = self._fitting("valid_range")
        if valid is not None and valid.size == 2:
            return valid[:1], valid[1:]
        return self._fitting("valid_min"), self._fitting("valid_max")

    def _fitting(self, name: str) -> Array | None:
        """Return an attribute in the type of the stored values.

        The result is None if that changes its value: netCDF4 ignores such attributes.
        """
        given = np.asarray(self.dataset.attrs.get(name, ""))
        if given.dtype.kind not in _NUMBERS or not given.size:
            return None
        given = given.reshape(-1)
        with np.errstate(all="ignore"):
            fitting = given.astype(self._dtype)
        is_equal = (fitting == given) | (np.isnan(fitting) & np.isnan(given))
        return fitting if is_equal.all() else None

    def _number(self, name: str) -> Any:
        value = self.dataset.attrs.get(name)
        if value is None:
            return None
        given = np.asarray(value)
        if given.dtype.kind not in _NUMBERS or given.size != 1:
            raise ValueError(
                f"expected a number as {name} of {self._where}, found {value!r}; "
                "correct the attribute, or read the values as stored by decode=False"
            )
        return given.reshape(-1)[0]


def _keep(
    values: Array, out: Array, *, stored: Any, gone: list[Any], where: str
) -> None:
    """Copy integers; raise ValueError if a value is missing."""
    for value in gone:
        if count := int((values == value).sum()):
            raise ValueError(
                f"expected integers in {where}, found {count} missing values (NetCDF's "
                f"fill value {value}); give the variable a _FillValue, so that it is "
                "read as floats, or read the values as stored by decode=False"
            )
    out[...] = values.view(stored)


def _decode(
    values: Array,
    out: Array,
    *,
    stored: Any,
    gone: list[Any],
    limits: list[Any],
    scale: Any,
    offset: Any,
) -> None:
    values = values.view(stored)
    # Compare before scaling, because the attributes refer to stored values.
    is_gone = np.zeros(values.shape, bool)
    for value in gone:
        is_gone |= values == value
    least, most = limits
    if least is not None:
        is_gone |= values < least
    if most is not None:
        is_gone |= values > most
    # Compute in the types of the attributes, as netCDF4 does, and round once.
    with np.errstate(over="ignore", invalid="ignore"):
        if scale is not None and scale != 1:
            values = values * scale
        if offset is not None and offset != 0:
            values = values + offset
        out[...] = values
    out[is_gone] = np.nan
