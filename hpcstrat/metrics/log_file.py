"""The file of a log of metrics: JSON lines, truncated when a checkpoint is restored."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from hpcstrat.engine.logs import get_logger

_Record = dict[str, Any]

# NaN and infinity are written as strings, because JSON has no numbers for them.
_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _encoded(record: Mapping[str, Any]) -> bytes:
    """Return a record as one line of JSON."""
    known = dict(record)
    if "scalars" in known:
        known["scalars"] = {
            name: value if math.isfinite(value) else _name(value)
            for name, value in known["scalars"].items()
        }
    return json.dumps(known, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _name(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _decoded(data: bytes) -> Iterator[_Record]:
    """Yield the records of complete lines; skip an incomplete last line."""
    for line in data.split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            # A job was killed while it wrote this line; a later job added the line end.
            continue
        if not isinstance(record, dict):
            continue
        if "scalars" in record:
            record["scalars"] = {
                name: _NAMES.get(value, value) if isinstance(value, str) else value
                for name, value in record["scalars"].items()
            }
        yield record


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a log of metrics, even while a job writes it.

    Not collective.

    Parameters
    ----------
    path : str or path
        The folder of the log, or its file ``metrics.jsonl``.

    Returns
    -------
    list of dict
        One record for each call of a method of `Log`, in order: ``step``, ``time``
        (seconds since 1970), and one of ``scalars``, ``text`` and ``pictures``, which
        are dicts by name. Pictures are paths relative to the folder.
    """
    found = Path(path)
    file = found / LogFile.NAME if found.is_dir() else found
    return list(_decoded(file.read_bytes()))


class LogFile:
    """The file of a log, in the only process that writes it.

    ``position`` is the length, in bytes, of the lines that belong to this training. A
    write that fails raises OSError; the next call removes the part of its line that
    reached the file.
    """

    NAME = "metrics.jsonl"
    REMOVED = "metrics.removed.jsonl"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.position = 0
        self._hash = xxhash.xxh3_64()
        self._file: int | None = None
        self._is_dirty = False
        # Where an incomplete line begins, after a failed write.
        self._torn_at: int | None = None
        self._has_failed_fsync = False
        self._has_warned = False

    def _open(self) -> int:
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self.folder / self.NAME, flags, 0o666)
        if self._torn_at is not None:
            os.ftruncate(self._file, self._torn_at)
            self._torn_at = None
        return self._file

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record to the file, where it remains if this process is killed."""
        line, file = _encoded(record), self._open()
        self._is_dirty = True
        self._torn_at = os.fstat(file).st_size
        _write_all(file, line)
        self._torn_at = None
        self.position += len(line)
        self._hash.update(line)

    def place(self) -> tuple[int, int]:
        """Write the file to the disk (fsync); return its position and a hash of it."""
        if self._file is not None:
            file = self._open()
            if os.fstat(file).st_size != self.position:
                self._include_foreign_lines(file)
            if self._is_dirty:
                self._sync(file)
        return self.position, self._hash.intdigest()

    def _include_foreign_lines(self, file: int) -> None:
        """Let position and hash describe the file, which another program changed."""
        data = _read_all(file)
        if not self._has_warned:
            get_logger("metrics").warning(
                "expected the %d bytes that this log wrote to %s, found %d bytes; give "
                "each log a folder of its own",
                self.position,
                self.folder / self.NAME,
                len(data),
            )
        self._has_warned = self._is_dirty = True
        self.position = data.rfind(b"\n") + 1
        self._hash = xxhash.xxh3_64(data[: self.position])

    def _sync(self, file: int) -> None:
        if self._has_failed_fsync:
            # Linux drops data that it cannot write, and reports this only once, so
            # another fsync of the same file would succeed without writing them.
            data, path = _read_all(file), self.folder / self.NAME
            with open(f"{path}.new", "wb") as copy:
                copy.write(data)
                copy.flush()
                os.fsync(copy.fileno())
            os.replace(f"{path}.new", path)
            self.close()
            self._has_failed_fsync = False
        else:
            self._has_failed_fsync = True
            os.fsync(file)
            self._has_failed_fsync = False
        self._is_dirty = False

    def cut(self, position: int, digest: int) -> tuple[list[_Record], list[_Record]]:
        """Truncate the file at a position; return the kept and the removed records.

        Removed lines are appended to ``metrics.removed.jsonl``. If the data before the
        position do not have the hash ``digest``, the whole file is removed."""
        file = self._open()
        data, end = _read_all(file), position
        if end > len(data):
            end = data.rfind(b"\n") + 1
            _warn(self.folder, "a shorter log; new lines are appended to it")
        elif xxhash.xxh3_64_intdigest(data[:end]) != digest:
            end = 0
            _warn(self.folder, f"another log; its lines are now in {self.REMOVED}")
        if data[end:]:
            self._keep_removed(data[end:])
            os.ftruncate(file, end)
            os.fsync(file)
        self.position, self._hash = end, xxhash.xxh3_64(data[:end])
        return list(_decoded(data[:end])), list(_decoded(data[end:]))

    def _keep_removed(self, data: bytes) -> None:
        lines = data if data.endswith(b"\n") else data + b"\n"
        with open(self.folder / self.REMOVED, "ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                _write_all(file.fileno(), lines)
                os.fsync(file.fileno())
            except OSError:
                # The lines stay in the log, and the next attempt writes all of them.
                file.truncate(before)
                raise

    def close(self) -> None:
        """Close the file if it is open."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _write_all(file: int, data: bytes) -> None:
    """Write data at the end of a file; after an error, the file may have a part."""
    written = 0
    while written < len(data):
        written += os.write(file, data[written:])


def _read_all(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)


def _warn(folder: Path, found: str) -> None:
    get_logger("metrics").warning(
        "expected the log of metrics in %s that was there when the checkpoint was "
        "saved, found %s",
        folder,
        found,
    )
