"""Writing the values of a checkpoint for other programs."""

from __future__ import annotations

import os
from collections.abc import Iterable

import h5py
import numpy as np

from hpcstrat.typing import Array

__all__ = ["export_values"]


def export_values(output: str, values: Iterable[tuple[str, Array]]) -> None:
    """Write values to a file that does not exist yet.

    Not collective.

    Parameters
    ----------
    output : str
        Ends in ``.npz``, or else is written as HDF5, with a dataset for each value.
    values : iterable of (str, ndarray)
        Names, with groups separated by ``/``, and values. HDF5 takes bfloat16 as
        float32.

    Raises
    ------
    OSError
        If the file exists, or cannot be written. Nothing is left behind then.
    """
    # Exclusively: never a file that somebody else has just made.
    os.close(os.open(output, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        if output.endswith(".npz"):
            np.savez(output, **dict(values))  # type: ignore[arg-type]
            return
        with h5py.File(output, "w") as plain:
            for name, value in values:
                is_half = value.dtype.name == "bfloat16"
                plain[name] = value.astype(np.float32) if is_half else value
    except BaseException:
        os.unlink(output)
        raise
