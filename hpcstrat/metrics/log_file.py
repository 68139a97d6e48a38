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

    ``position`` is the length, in bytes, of the lines that belong to this training.
    """

    NAME = "metrics.jsonl"
    REMOVED = "metrics.removed.jsonl"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.position = 0
        self._hash = xxhash.xxh3_64()
        self._file: int | None = None
        self._is_dirty = False

    def _open(self) -> int:
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self.folder / self.NAME, flags, 0o666)
        return self._file

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record to the file, where it remains if this process is killed."""
        line, file = _encoded(record), self._open()
        self._is_dirty = True
        written = 0
        while written < len(line):
            written += os.write(file, line[written:])
        self.position += len(line)
        self._hash.update(line)

    def place(self) -> tuple[int, int]:
        """Write the file to the disk (fsync); return its position and a hash of it."""
        if self._file is not None and self._is_dirty:
            os.fsync(self._file)
            self._is_dirty = False
        return self.position, self._hash.intdigest()

    def cut(self, position: int, digest: int) -> tuple[list[_Record], list[_Record]]:
        """Truncate the file at a position; return the kept and the removed records.

        Removed lines are appended to ``metrics.removed.jsonl``. If the data before the
        position do not have the hash ``digest``, the whole file is removed."""
        file = self._open()
        data, end = os.pread(file, os.fstat(file).st_size, 0), position
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
        with open(self.folder / self.REMOVED, "ab") as file:
            file.write(data if data.endswith(b"\n") else data + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close the file if it is open."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _warn(folder: Path, found: str) -> None:
    get_logger("metrics").warning(
        "expected the log of metrics in %s that was there when the checkpoint was "
        "saved, found %s",
        folder,
        found,
    )
