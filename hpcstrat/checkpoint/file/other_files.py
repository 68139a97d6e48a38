"""Names the kind of a file that is no checkpoint, as a name may be mistyped."""

from __future__ import annotations

import codecs
import contextlib
import os
import stat

from hpcstrat.checkpoint.file.commit_record import has_record
from hpcstrat.checkpoint.file.schema import FORMAT, step_of
from hpcstrat.checkpoint.file.structure import attribute
from hpcstrat.engine.hdf5_files import open_for_reading
from hpcstrat.errors import CorruptCheckpointError

__all__ = ["NoCheckpointError", "other_file"]

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_FIRST_BYTES = 4096
_MOST_NAMES = 3
_BEGINNINGS = {
    b"PK\x03\x04": "a ZIP archive, such as numpy.savez and torch.save write",
    b"\x93NUMPY": "an array of numpy.save",
    b"\x1f\x8b": "a file compressed by gzip",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
}


class NoCheckpointError(CorruptCheckpointError):
    """A file is something else than a checkpoint, as far as one can see."""


def other_file(path: str) -> str:
    """Return what a file is that cannot be read as a checkpoint.

    Empty for what may be a checkpoint that is damaged, and for what cannot be read.
    """
    named = step_of(path) is not None
    try:
        # Without O_NONBLOCK, a pipe would wait for somebody who writes.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode) or has_record(file):
            return ""
        first = os.pread(file, _FIRST_BYTES, 0)
    except OSError:
        return ""
    finally:
        os.close(file)
    if first.startswith(_SIGNATURE):
        return _other_hdf5(path)
    known = (what for begin, what in _BEGINNINGS.items() if first.startswith(begin))
    unknown = "" if named else "a file of another kind" if first else "an empty file"
    return next(known, "a text file" if _is_text(first) else unknown)


def _other_hdf5(path: str) -> str:
    # One that HDF5 cannot open may be a checkpoint.
    with contextlib.suppress(Exception), open_for_reading(path) as file:
        with contextlib.suppress(LookupError, ValueError):
            if attribute(file, "hpcstrat_format") == FORMAT.encode():
                return ""
        names = sorted(file)[:_MOST_NAMES]
        holds = f", which holds {', '.join(names)}" if names else ", which is empty"
        return f"an HDF5 file of another program{holds}"
    return ""


def _is_text(first: bytes) -> bool:
    # The last character may be cut.
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(first)
    except UnicodeDecodeError:
        return False
    return bool(text) and all(c.isprintable() or c in "\t\n\r\f" for c in text)
