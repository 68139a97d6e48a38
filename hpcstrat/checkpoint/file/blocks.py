"""Reading a checkpoint's blocks, each checked against its hash."""

from __future__ import annotations

import contextlib
import os
from types import TracebackType
from typing import Self

from hpcstrat.checkpoint.disk import PASSING, open_to_read, read_into
from hpcstrat.checkpoint.file.commit_record import Vouched, block_hash
from hpcstrat.checkpoint.file.image import Image
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CorruptCheckpointError

__all__ = ["Blocks"]


class Blocks:
    """The data of a file, read past the page cache where ``direct`` asks for it.

    Several threads may call `read` at a time, each with a slot of its own; not `part`.
    """

    def __init__(self, path: str, vouched: Vouched, direct: bool) -> None:
        self.path = path
        self.vouched = vouched
        self._file = open_to_read(path, direct)
        # For `part`: small parts lie side by side, mostly in the block read before.
        self._image: Image | None = None
        self._kept = -1

    def read(self, block: int, slot: Array) -> Array:
        """Read a block into a slot that is long enough, and return it, checked.

        A CorruptCheckpointError says that the file is damaged; an OSError, which says
        nothing of the file, that it cannot be read now.
        """
        start, stop = self.vouched.plan.span(block)
        data = slot[: stop - start]
        try:
            read_into(self._file, data.data, start)
        except (OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno in PASSING:
                # Not damage: the file may be whole, and another try may succeed.
                raise
            raise CorruptCheckpointError(
                f"expected readable data in {self.path}, found: {error}; restore an "
                "older checkpoint"
            ) from error
        if block_hash(data.data) != int(self.vouched.hashes[block]):
            raise CorruptCheckpointError(
                f"expected the data of {self.path} as they were written, found other "
                f"ones in bytes {start} to {stop}; restore an older checkpoint"
            )
        return data

    def part(self, start: int, stop: int) -> bytes:
        """Return a part of the data, checked; for small ones: it reads whole blocks."""
        plan, found = self.vouched.plan, bytearray()
        if self._image is None:
            self._image = Image(1, plan.block_bytes)
        slot = self._image.slot(0)
        for block in plan.blocks_of(start, stop):
            begin, end = plan.span(block)
            if self._kept != block:
                # A read that fails may have written over the slot.
                self._kept = -1
                self.read(block, slot)
                self._kept = block
            found += slot[max(start, begin) - begin : min(stop, end) - begin].data
        return bytes(found)

    def close(self) -> None:
        # All that was read is there; what is wrong with the file was raised before.
        with contextlib.suppress(OSError):
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
