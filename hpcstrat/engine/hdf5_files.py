"""Functions that open HDF5 files for reading, and list the datasets of a group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["datasets_of", "open_for_reading"]


def open_for_reading(path: str) -> Any:
    """Return an open ``h5py.File``; raise the errors of h5py.

    The file is opened without locks, because many file systems of clusters do not
    support locks. If the program has the file open with locks, it is opened with locks,
    because HDF5 opens a file twice only with the same flag for locks.
    """
    import h5py

    for locking in (False, None):
        try:
            return h5py.File(path, "r", locking=locking)
        except OSError as error:
            if "flag values don't match" not in str(error):
                raise
    return h5py.File(path, "r", locking=True)


def datasets_of(
    group: Any, prefix: str = "", above: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield path and dataset of each dataset in a group and its subgroups.

    A link that leads to nothing is yielded as h5py's link. A link to a group that
    contains the link is not followed. Scalars, empty dataspaces and committed types are
    left out: they describe the file, and are not columns of examples.
    """
    import h5py

    above = (*above, group)
    for name in group:
        item = group.get(name)
        if item is None:
            yield prefix + name, group.get(name, getlink=True)
        elif isinstance(item, h5py.Group):
            if not any(item == each for each in above):
                yield from datasets_of(item, f"{prefix}{name}/", above)
        elif isinstance(item, h5py.Dataset) and item.ndim:
            yield prefix + name, item
