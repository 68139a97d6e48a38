"""Reads and writes of whole buffers at offsets of files, with or without O_DIRECT."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable

__all__ = ["PAGE_BYTES", "is_direct", "read_exactly", "read_into", "write_all"]

PAGE_BYTES = 4096
"""Alignment of blocks, which direct reads and writes require."""

# Transfer at most 1 GiB in a system call, because Linux limits one to 2 GiB.
_MOST_BYTES = 1 << 30


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write a contiguous buffer at an offset of a file, in as many calls as necessary.

    With O_DIRECT, the buffer's address and length, and the offset, are page-aligned.
    """
    if _move(os.pwrite, file, data, offset) < data.nbytes:
        raise OSError(errno.EIO, "nothing was written")


def read_into(file: int, buffer: memoryview, offset: int) -> None:
    """Fill a buffer from an offset of a file; raise EOFError if the file is shorter."""

    def read(file: int, part: memoryview, place: int) -> int:
        return os.preadv(file, [part], place)

    done = _move(read, file, buffer, offset)
    if done < buffer.nbytes:
        raise EOFError(f"the file ends at {offset + done}")


def _move(
    call: Callable[[int, memoryview, int], int],
    file: int,
    data: memoryview,
    offset: int,
) -> int:
    """Repeat a read or write until ``data`` is done or a call moves 0 bytes.

    Returns the number of bytes moved.
    """
    done = 0
    while done < data.nbytes:
        part, direct = data[done : done + _MOST_BYTES], is_direct(file)
        try:
            count = call(file, part, offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            _stop_direct(file)
            continue
        if count == 0:
            break
        done += count
        if count % PAGE_BYTES and done < data.nbytes:
            # Direct I/O would refuse the next offset, which is not page-aligned.
            _stop_direct(file)
    return done


def is_direct(file: int) -> bool:
    """Return whether reads and writes of an open file now bypass the page cache."""
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def _stop_direct(file: int) -> None:
    """Use the page cache for an open file from now on; repeated calls do no harm."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def read_exactly(file: int, offset: int, nbytes: int) -> bytes:
    """Return ``nbytes`` of a file opened without O_DIRECT, or raise EOFError."""
    data = bytearray(nbytes)
    read_into(file, memoryview(data), offset)
    return bytes(data)
