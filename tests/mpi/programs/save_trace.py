"""A trace of a save's system calls, with the part of the file that each call writes."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

# Size of the commit record at the end of the file: see docs/checkpoint-format.md.
_RECORD_BYTES = 4096
_EXTENT = struct.Struct("<2Q")
_EXTENT_OFFSET = 48

_NAMES = ("open", "pwrite", "ftruncate", "fsync", "link", "replace", "unlink")
KINDS = (
    *("create", "open", "write block", "flush block", "write verdict", "flush verdict"),
    *("write table", "write record", "cut", "flush record"),
    *("link", "replace", "remove name", "flush folder", "remove old"),
)
"""What is told apart, in about the order of a save."""


class Calls:
    """A classifier that returns the purpose of each system call.

    ``folder`` is the folder of the checkpoints, and contains a checkpoint of the same
    variables.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        newest = max(folder.glob("ckpt-*.h5"))
        with newest.open("rb") as file:
            file.seek(-_RECORD_BYTES, os.SEEK_END)
            extent = file.read(_RECORD_BYTES)[_EXTENT_OFFSET:]
        self.data_start, self.data_end = _EXTENT.unpack_from(extent)
        # The part that was last written through each file descriptor.
        self._written: dict[int, str] = {}

    def kind(self, name: str, *words: Any) -> str:
        """Return one of `KINDS`, or an empty text for a call that is of no interest."""
        first = words[0]
        opened = isinstance(first, int)
        path = os.readlink(f"/proc/self/fd/{first}") if opened else os.fspath(first)
        if not str(path).startswith(self.folder):
            return ""
        if opened:
            return self._of_descriptor(name, path, *words)
        hidden = os.path.basename(path).startswith(".")
        if name == "unlink":
            return "remove name" if hidden else "remove old"
        if name == "open":
            return self._of_open(hidden, words[1])
        return name

    def _of_open(self, hidden: bool, flags: int) -> str:
        if not hidden or flags & os.O_ACCMODE == os.O_RDONLY:
            return ""
        return "create" if flags & os.O_CREAT else "open"

    def _of_descriptor(self, name: str, path: str, first: int, *words: Any) -> str:
        if name == "pwrite":
            found = self._written[first] = self._part(words[1])
            return f"write {found}"
        last = self._written.get(first, "")
        if name == "fsync":
            return f"flush {'folder' if os.path.isdir(path) else last}"
        return "cut" if last in ("record", "table") else ""

    def _part(self, offset: int) -> str:
        if offset < self.data_start:
            return "table"
        if offset < self.data_end:
            return "block"
        return "record" if offset == self.data_end else "verdict"


@contextmanager
def around_calls(
    folder: Path, seam: Callable[[str, Callable[[], Any], tuple[Any, ...]], Any]
) -> Iterator[None]:
    """Call ``seam(kind, call, arguments)`` instead of each system call of a save."""
    calls = Calls(folder)

    def replaced(name: str, real: Any, *words: Any, **options: Any) -> Any:
        act = functools.partial(real, *words, **options)
        kind = calls.kind(name, *words)
        return seam(kind, act, words) if kind else act()

    with ExitStack() as stack:
        for name in _NAMES:
            new = functools.partial(replaced, name, getattr(os, name))
            stack.enter_context(mock.patch.object(os, name, new))
        yield
