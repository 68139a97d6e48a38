"""A function that opens HDF5 files for reading, even if they are open already."""

from __future__ import annotations

from typing import Any

__all__ = ["open_for_reading"]


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
