"""Files of a data set: their descriptors, and the detection of changes."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from hpcstrat.engine.hdf5_files import open_for_reading

__all__ = ["OpenFiles", "OpenHdf5"]

_MOST_OPEN = 128


class _Fingerprint(NamedTuple):
    """The attributes of a file or folder that differ after a change."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Fingerprint:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def change_to(self, found: _Fingerprint) -> str:
        """Return a change in words."""
        if found.size < self.size:
            return f"it was shortened from {self.size} to {found.size} bytes"
        if found.size > self.size:
            return f"it has grown from {self.size} to {found.size} bytes"
        if found[:2] != self[:2]:
            return "it was replaced by another file"
        return f"it was written again, with {found.size} bytes as before"


def _removed(path: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"expected the file {path}, whose rows are to be read, found that it was "
        "removed; restore the file, and make the data set again"
    )


class _Descriptor:
    """A file descriptor, which is closed when nothing refers to this object anymore."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def close(self) -> None:
        """Do nothing: another thread may read, and the last reference closes it."""

    def __del__(self) -> None:
        number = getattr(self, "number", None)
        if number is not None:
            os.close(number)


class OpenHdf5:
    """A file that is open in h5py, until nothing refers to this object anymore."""

    def __init__(self, path: str) -> None:
        self.file = open_for_reading(path)
        self.number = int(self.file.id.get_vfd_handle())

    def close(self) -> None:
        """Close the file, even if others refer to it, as the traceback of an error.

        HDF5 would not read a changed file again as long as it is open.
        """
        self.file.close()


_Kind = TypeVar("_Kind", _Descriptor, OpenHdf5)


class OpenFiles:
    """The open files of a data set; the most recently used ones stay open."""

    def __init__(self) -> None:
        # Leave most of the descriptors that the process may have to the program.
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = _MOST_OPEN if limit < 0 else min(_MOST_OPEN, limit // 4)
        self._open: OrderedDict[Any, Any] = OrderedDict()
        self._seen: dict[str, _Fingerprint] = {}
        self._lock = threading.Lock()

    def note(self, path: str) -> None:
        """Store a file's or folder's state, unless known, to detect later changes."""
        if path not in self._seen:
            self._seen[path] = _Fingerprint.of(os.stat(path))

    def size(self, path: str) -> int:
        """Return the number of bytes that a file had at its `note`."""
        return self._seen[path].size

    def get(self, path: str) -> _Descriptor:
        """Return the open file, which stays open as long as the caller refers to it."""
        return self._get(path, _Descriptor)

    def get_hdf5(self, path: str) -> OpenHdf5:
        """Do the same as `get` for a file that h5py reads."""
        return self._get(path, OpenHdf5)

    def _get(self, path: str, open_file: Callable[[str], _Kind]) -> _Kind:
        with self._lock:
            found: _Kind | None = self._open.get((path, open_file))
            if found is None:
                try:
                    found = open_file(path)
                except FileNotFoundError as error:
                    raise _removed(path) from error
                self._require(path, _Fingerprint.of(os.fstat(found.number)))
                self._open[path, open_file] = found
            self._open.move_to_end((path, open_file))
            while len(self._open) > self._most:
                self._open.popitem(last=False)
        return found

    def check(self, paths: Iterable[str]) -> None:
        """Raise an error if a file or folder was removed or changed since its `note`.

        Afterwards, files are opened again before more of them is read.
        """
        try:
            for path in paths:
                try:
                    status = os.stat(path)
                except (FileNotFoundError, NotADirectoryError) as error:
                    raise _removed(path) from error
                self._require(path, _Fingerprint.of(status))
        except (OSError, ValueError):
            with self._lock:
                for opened in self._open.values():
                    opened.close()
                self._open.clear()
            raise

    def _require(self, path: str, found: _Fingerprint) -> None:
        seen = self._seen[path]
        if found != seen:
            raise ValueError(
                f"expected {path} as it was when the data set was made, found that it "
                f"has changed: {seen.change_to(found)}; make the data set again"
            )
