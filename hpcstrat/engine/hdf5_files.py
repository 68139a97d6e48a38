"""Opens HDF5 files for reading, also those that this process has open already."""

from __future__ import annotations

from typing import Any

__all__ = ["open_for_reading"]


def open_for_reading(path: str) -> Any:
    """Return an open ``h5py.File``; raise the errors of h5py.

    It takes no locks, which file systems of clusters lack, unless the program has the
    file open with locks: HDF5 opens a file twice only with the same flag for locks.
    """
    import h5py

    for locking in (False, None):
        try:
            return h5py.File(path, "r", locking=locking)
        except OSError as error:
            if "flag values don't match" not in str(error):
                raise
    return h5py.File(path, "r", locking=True)
