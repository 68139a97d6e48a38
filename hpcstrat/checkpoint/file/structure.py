"""Safe reading of HDF5 files that may be forged; unusual features raise ValueError.

Only the HDF5 features that checkpoints use are read. By other features, a forged file
could make HDF5 open other files or pipes, or allocate more memory than its own size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5l, h5o, h5t

from hpcstrat.checkpoint.file.schema import stored_dtype

__all__ = [
    "attribute",
    "attributes",
    "datasets",
    "member",
    "place_of",
    "require_stored_as",
]

_MOST_ATTRIBUTE_BYTES = 1 << 16
_MOST_DEPTH = 1000
# Cache of `_dtype_of`: NumPy's types by the properties of HDF5's types.
_DTYPES: dict[Any, np.dtype[Any]] = {}
_MOST_DTYPES = 256
_KINDS = (h5t.TypeIntegerID, h5t.TypeFloatID, h5t.TypeStringID)


def datasets(group: h5py.Group) -> Iterator[tuple[str, h5py.Dataset]]:
    """Yield the path and the dataset for all datasets in a group and its subgroups.

    Raises ValueError for a soft or external link, and if a group contains itself.
    """
    seen: set[int] = set()
    todo: list[tuple[str, Any, bytes]] = [(group.name.strip("/"), group.id, b".")]
    # Do not use HDF5's own walk: it is recursive, so that deep nesting would crash.
    while todo:
        path, group, name = todo.pop()
        found = h5o.open(group, name)
        if isinstance(found, h5d.DatasetID):
            yield path, h5py.Dataset(found)
            continue
        address = h5o.get_info(found).addr
        if address in seen or path.count("/") > _MOST_DEPTH:
            raise ValueError(
                f"groups contain themselves, or are nested more than {_MOST_DEPTH} deep"
            )
        seen.add(address)
        links = found.links
        for member_name in sorted(found, reverse=True):
            text = _decoded(member_name)
            inner = f"{path}/{text}" if path else text
            if links.get_info(member_name).type != h5l.TYPE_HARD:
                raise ValueError(_elsewhere(inner))
            todo.append((inner, found, member_name))


def _decoded(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise ValueError(f"the name {name!r} is no UTF-8") from None


def _elsewhere(name: str) -> str:
    return f"{name} is a link to something else"


def member(group: Any, name: str) -> Any:
    """Return a member of a group, or None; raise ValueError unless its link is hard."""
    link = group.get(name, getlink=True)
    if link is not None and not isinstance(link, h5py.HardLink):
        raise ValueError(_elsewhere(name))
    return None if link is None else group[name]


def attribute(item: Any, name: str) -> Any:
    """Return an attribute (a number or short text); raise KeyError if it is missing."""
    place = item["/"] if isinstance(item, h5py.File) else item
    return _read(h5a.open(place.id, name.encode()), name)


def attributes(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of all attributes of an object of h5py."""
    for index in range(h5a.get_num_attrs(item.id)):
        found = h5a.open(item.id, index=index)
        name = found.name
        name = _decoded(name) if isinstance(name, bytes) else str(name)
        yield name, _read(found, name)


def _read(found: Any, name: str) -> Any:
    kind = found.get_type()
    varies = isinstance(kind, h5t.TypeStringID) and kind.is_variable_str()
    if (
        not isinstance(kind, _KINDS)
        or varies
        or kind.get_size() > _MOST_ATTRIBUTE_BYTES
        # The attribute has more than one value.
        or found.get_storage_size() != kind.get_size()
    ):
        raise ValueError(f"the attribute {name!r} is no number and no short text")
    # This memory is small, because the size of the type was checked above.
    value = np.empty((), _dtype_of(kind))
    found.read(value)
    return value[()]


def _dtype_of(kind: Any) -> np.dtype[Any]:
    """Return NumPy's type for an HDF5 type; cached, because computing it is slow."""
    if isinstance(kind, h5t.TypeStringID):
        key: Any = "S", kind.get_size(), kind.get_cset(), kind.get_strpad()
    elif isinstance(kind, h5t.TypeIntegerID):
        key = "i", kind.get_size(), kind.get_order(), kind.get_sign()
    else:
        key = "f", kind.get_size(), kind.get_order(), kind.get_fields()
    if key not in _DTYPES:
        if len(_DTYPES) >= _MOST_DTYPES:
            _DTYPES.clear()
        _DTYPES[key] = kind.dtype
    return _DTYPES[key]


def place_of(dataset: Any, start: int, stop: int) -> tuple[int, int]:
    """Return the offset in the file, and the size in bytes, of a dataset's values.

    Raises ValueError unless the values are uncompressed, in one piece, and between the
    offsets ``start`` and ``stop`` of the file.
    """
    made = dataset.id.get_create_plist()
    if (
        made.get_layout() != h5d.CONTIGUOUS
        or made.get_external_count()
        or made.get_nfilters()
    ):
        raise ValueError(
            f"{dataset.name} is compressed, in pieces, or in another file, which "
            "checkpoints are not"
        )
    shape = dataset.shape
    if shape is None:
        raise ValueError(f"{dataset.name} has no shape")
    nbytes = math.prod(shape) * dataset.id.get_type().get_size()
    offset = dataset.id.get_offset()
    # HDF5 allocates no space for an empty dataset.
    if not nbytes:
        return start, 0
    if offset is None or not start <= offset <= stop - nbytes:
        raise ValueError(
            f"{dataset.name} has {nbytes:,} bytes, which are not in the file"
        )
    return int(offset), nbytes


def require_stored_as(dataset: Any, name: str) -> None:
    """Raise ValueError unless a dataset is stored as files store type ``name``."""
    found = dataset.dtype
    stored = stored_dtype(name, found.itemsize)
    if stored is None or found != stored:
        raise ValueError(f"{dataset.name} is {found}, not {name}")
