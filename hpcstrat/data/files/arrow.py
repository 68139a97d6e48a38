"""Arrow's types and arrays as rows of NumPy arrays.

Numbers, text, dates and times have one value in a row. Lists of one length, and binary
values of a fixed size, become further dimensions. All other types are refused, because
NumPy has no array that keeps all of their values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.engine.typing import Array

__all__ = ["ArrowLayout"]

# Advice for types that cannot be read, by the first word of their names.
_ADVICE = {
    "decimal": "cast it to float64, or to integers of its last digit",
    "struct": "write its fields as columns (Table.flatten)",
    "binary": "write it as fixed_size_binary, or as lists of uint8",
    "time": "write it as a duration or a timestamp",
    "map": "write its keys and values as columns",
}


class ArrowLayout:
    """Shape and dtype of a column's rows, whose values `rows` returns.

    ``first`` is the column's first row as an Arrow array, or None if there is none: its
    lists set the length of lists whose type has no length. ``place`` names the column
    and its file in errors. Raises ValueError if a type cannot be read.
    """

    def __init__(self, kind: Any, place: str, first: Any) -> None:
        from pyarrow import types

        self.place = place
        self._kind, shape = kind, []
        while True:
            if types.is_dictionary(kind):
                kind, first = kind.value_type, _decoded(first)
            elif types.is_fixed_size_list(kind):
                shape.append(kind.list_size)
                kind, first = kind.value_type, _first_list(first)
            elif types.is_list(kind) or types.is_large_list(kind):
                kind, first = kind.value_type, _first_list(first)
                shape.append(len(first or ()))
            else:
                break
        if types.is_fixed_size_binary(kind):
            shape.append(kind.byte_width)
        self.shape = tuple(shape)
        self.dtype = self._dtype_of(kind)

    def _dtype_of(self, kind: Any) -> Any:
        """Return the dtype of single values; ValueError if the type cannot be read."""
        from pyarrow import types

        if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
            return np.dtype(kind.to_pandas_dtype())
        if types.is_timestamp(kind) or types.is_duration(kind):
            return np.dtype(f"{'M' if types.is_timestamp(kind) else 'm'}8[{kind.unit}]")
        if types.is_date32(kind):
            return np.dtype("M8[D]")
        if _is_text(kind):
            return np.dtype(object)
        if types.is_fixed_size_binary(kind):
            return np.dtype(np.uint8)
        word = str(kind).removeprefix("large_")
        advice = "convert it to numbers, text or dates"
        advice = next((a for w, a in _ADVICE.items() if word.startswith(w)), advice)
        raise ValueError(
            f"expected numbers, text, dates, or lists of these in {self.place}, found "
            f"the type {self._kind}; {advice}, or choose other columns="
        )

    def rows(self, values: Any, group: int) -> Array:
        """Return the values of an Arrow array of row group ``group``."""
        return self._converted(values, self.shape, f"{self.place}, row group {group}")

    def _converted(self, values: Any, shape: tuple[int, ...], place: str) -> Array:
        from pyarrow import types

        kind = values.type
        if values.null_count:
            raise ValueError(
                f"expected a value in each row and list of {place}, of the type "
                f"{self._kind}, found {values.null_count} nulls; fill them (fill_null),"
                " or choose other columns="
            )
        if types.is_dictionary(kind):
            return self._converted(_decoded(values), shape, place)
        if types.is_fixed_size_binary(kind):
            start, size = values.offset * shape[0], len(values) * shape[0]
            data = np.frombuffer(values.buffers()[1] or b"", np.uint8, size, start)
            return data.reshape(len(values), shape[0])
        if shape:
            self._check_lengths(values, shape[0], place)
            inner = self._converted(values.flatten(), shape[1:], place)
            return inner.reshape(len(values), *shape)
        found: Array = values.to_numpy(zero_copy_only=False)
        if _is_text(kind) and any(map(_ends_with_zero, found)):
            raise ValueError(
                f"expected text that NumPy can store in {place}, found text that ends "
                "with a zero character, which NumPy removes; remove it, or choose "
                "other columns="
            )
        return found

    def _check_lengths(self, values: Any, length: int, place: str) -> None:
        from pyarrow import compute

        lengths = compute.list_value_length(values).to_numpy(zero_copy_only=False)
        others = lengths[lengths != length]
        if others.size:
            raise ValueError(
                f"expected lists of one length in {place}, of the type {self._kind}, "
                f"found lists of {length} values, as in the first row, and of "
                f"{others[0]}; pad them when they are written, or choose other columns="
            )


def _decoded(values: Any) -> Any:
    return None if values is None else values.dictionary_decode()


def _first_list(lists: Any) -> Any:
    """Return the values of the first of some lists; None if ``lists`` is None."""
    return None if lists is None else lists[:1].flatten()


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return any(
        check(kind)
        for check in (types.is_string, types.is_large_string, types.is_string_view)
    )


def _ends_with_zero(text: str) -> bool:
    return text[-1:] == "\0"
