"""Writing the values of a checkpoint for other programs."""

from __future__ import annotations

import os
from collections.abc import Iterable

import h5py
import numpy as np

from hpcstrat.engine.typing import Array

__all__ = ["export_values"]


def export_values(output: str, values: Iterable[tuple[str, Array]]) -> None:
    """Write values, by name, to a file that must not exist: .npz, or else plain HDF5.

    Groups in names are separated by ``/``. HDF5 takes bfloat16 as float32. On an error
    nothing is left behind.
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
