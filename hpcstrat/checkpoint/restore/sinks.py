"""Destinations of a checkpoint's bytes when they are restored."""

from __future__ import annotations

import sys

import numpy as np

from hpcstrat.checkpoint.file.extents import Extent
from hpcstrat.checkpoint.file.image import Elsewhere, is_elsewhere
from hpcstrat.checkpoint.file.schema import dtype_name, named_dtype, saved_dtype
from hpcstrat.checkpoint.objects import pieces_of
from hpcstrat.checkpoint.restore.entry_matching import Match
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.gpu.transfers import Uploads
from hpcstrat.engine.typing import Array, Replicas

__all__ = ["Sink", "live_bytes", "value_of"]


class Sink:
    """A destination of the bytes of a dataset.

    To ``live``, the variable's own bytes, here or elsewhere, else to a buffer that is
    assigned when full.
    """

    def __init__(
        self, match: Match, extent: Extent, live: Array | Elsewhere | None = None
    ) -> None:
        self.match, self.extent = match, extent
        self.on_device = is_device(live)
        self.elsewhere = live if is_elsewhere(live) else None
        self._live = None if is_elsewhere(live) else live
        self._collected: Array | None = None
        self._left = extent.nbytes

    def put(
        self,
        start: int,
        data: Array,
        strategy: Replicas,
        uploads: Uploads | None = None,
    ) -> None:
        """Take bytes that begin at ``start`` in the file, within the extent.

        ``uploads`` copies to a GPU; needed if this is ``on_device``.
        """
        place = start - self.extent.offset
        if self.elsewhere is not None:
            self.elsewhere.write_bytes(place, data)
            return
        if self._live is None and self._collected is None:
            # Allocated with its first bytes: not all values need memory at once.
            self._collected = np.empty(self.extent.nbytes, np.uint8)
        target = self._collected if self._live is None else self._live
        assert target is not None
        part = target[place : place + data.size]
        if self.on_device:
            assert uploads is not None
            uploads.put(data, part)
        else:
            part[:] = data
        self._left -= data.size
        if self._left == 0 and self._live is None:
            self.match.assign(value_of(self.match, self._collected), strategy)
            self._collected = None


def value_of(match: Match, data: Array | None, rows: bool = False) -> Array:
    """Return bytes as the saved value, or a row of it, in native byte order."""
    dtype = named_dtype(match.entry.dtype)
    stored = saved_dtype(dtype)
    raw = np.empty(0, np.uint8) if data is None else data
    native = raw.view(stored).astype(stored.newbyteorder("="), copy=False)
    shape = match.entry.shape
    return native.view(dtype).reshape(shape[1:] if rows else shape)


def live_bytes(match: Match) -> Array | Elsewhere | None:
    """Return the bytes of a variable into which a value can be read as it is.

    None where it has to be converted, or is not there yet.
    """
    variable = match.variable
    if variable is None or match.divides or sys.byteorder != "little":
        return None
    if variable.is_remote:
        same = dtype_name(variable.dtype) == match.entry.dtype
        found: Elsewhere | None = pieces_of(variable) if same else None
        return found
    component = variable.component
    fits = (
        dtype_name(component.dtype) == match.entry.dtype
        and component.dtype.isnative
        and component.flags.c_contiguous
    )
    return component.reshape(-1).view(np.uint8) if fits else None
