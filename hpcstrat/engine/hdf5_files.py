"""Opens HDF5 files for reading, whoever else in this process has them open."""

from __future__ import annotations

from typing import Any

__all__ = ["open_for_reading"]


def open_for_reading(path: str) -> Any:
    """Return an open ``h5py.File``; raise what h5py raises.

    Without locks, which file systems of clusters lack. But HDF5 opens a file that the
    program has open, such as a notebook, only with the same flag for locks.
    """
    import h5py

    for locking in (False, None):
        try:
            return h5py.File(path, "r", locking=locking)
        except OSError as error:
            if "flag values don't match" not in str(error):
                raise
    return h5py.File(path, "r", locking=True)
