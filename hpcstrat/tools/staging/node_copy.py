"""The copy of an environment on one node, which appears whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from hpcstrat.engine.typing import Array
from hpcstrat.tools.staging.environment_files import (
    RECORD,
    EnvironmentFile,
    digest_of_files,
    list_files,
)

__all__ = ["FilePart", "FreeSpace", "NodeCopy", "parts_of"]

_PAGE = 4096
_PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file, ``size`` bytes from ``start``, at ``place`` in a piece."""

    file: EnvironmentFile
    start: int
    size: int
    place: int


def parts_of(files: Sequence[EnvironmentFile], most: int) -> Iterator[list[FilePart]]:
    """Yield the parts of each piece of at most ``most`` bytes of all files' bytes."""
    piece: list[FilePart] = []
    place = 0
    for file in files:
        start = 0
        while start < file.size and file.kind == "file":
            size = min(file.size - start, most - place)
            piece.append(FilePart(file, start, size, place))
            start, place = start + size, place + size
            if place == most:
                yield piece
                piece, place = [], 0
    if piece:
        yield piece


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """The bytes and inodes that a node has for a copy, and the copy's record."""

    host: str
    num_bytes: int
    inodes: int
    record: dict[str, Any]


class NodeCopy:
    """An environment's copy at ``place``, written by one rank of a node.

    It is written beside ``place``, and gets its name when it is whole.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        parent, name = os.path.split(place)
        os.makedirs(parent, exist_ok=True)
        self.partial = os.path.join(parent, f".{name}{_PARTIAL}{os.getpid()}")
        for other in os.listdir(parent):
            # Remove what a killed process of this node has left.
            front, _, pid = other.partition(_PARTIAL)
            if front == f".{name}" and not os.path.exists(f"/proc/{pid}"):
                _remove(os.path.join(parent, other))
        self.record: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            self.record = json.loads(_text(os.path.join(place, RECORD)))

    def free(self) -> FreeSpace:
        """Return the space of this node for the copy."""
        parent = os.path.dirname(self.place)
        space = os.statvfs(parent)
        # A file system without a limit of inodes reports 0 of them.
        inodes = space.f_favail if space.f_files else 1 << 62
        num_bytes = space.f_bavail * space.f_frsize
        if _file_system(parent) in {"tmpfs", "ramfs"}:
            num_bytes = min(num_bytes, *_free_memory())
        return FreeSpace(platform.node(), num_bytes, inodes, self.record)

    @functools.cached_property
    def is_whole(self) -> bool:
        """Return whether the folder at ``place`` still is what its record says."""
        return bool(self.record) and self._found(self.place) == (
            self.record.get("files"),
            self.record.get("content"),
        )

    def require_no_other(self, digest: str, *, replaces: bool) -> None:
        """Raise ValueError if a folder at ``place`` may not be replaced.

        A damaged copy of the same files may always be replaced.
        """
        may = bool(self.record) and (replaces or self.record.get("files") == digest)
        if may or not os.path.lexists(self.place):
            return
        found, advice = "files that are no copy of hpcstrat stage", "remove them"
        if self.record:
            found = f"a copy of {self.record.get('source')} with other files"
            advice = "pass --replace if no program uses it"
        raise ValueError(
            f"expected no files at {self.place} of {platform.node()}, found {found}; "
            f"{advice}, or pass another folder by --to"
        )

    def begin(self, files: Sequence[EnvironmentFile]) -> None:
        """Make the folders of the copy."""
        os.mkdir(self.partial, 0o700)
        for each in files:
            if each.kind == "folder":
                os.mkdir(self._path(each), 0o700)

    def write(self, piece: Array, parts: Sequence[FilePart]) -> None:
        """Write the parts of files that a piece has."""
        for part in parts:
            data = piece[part.place : part.place + part.size]
            with open(self._path(part.file), "r+b" if part.start else "xb") as file:
                if part.file.stored == part.file.size:
                    file.seek(part.start)
                    file.write(data.data)
                    continue
                # Leave out pages without values, which may be holes of the source.
                first = -part.start % _PAGE
                edges = sorted({0, *range(first, part.size, _PAGE), part.size})
                for begin, end in itertools.pairwise(edges):
                    page = data[begin:end]
                    if page.any():
                        file.seek(part.start + begin)
                        file.write(page.data)
                file.truncate(part.file.size)

    def adopt(self, files: Sequence[EnvironmentFile]) -> None:
        """Change the scripts and links of an unpacked archive into the copy's."""
        for each in files:
            if each.content is not None:
                with open(self._path(each), "wb") as file:
                    file.write(each.content)
            elif each.kind == "link" and os.readlink(self._path(each)) != each.target:
                os.unlink(self._path(each))

    def finish(self, files: Sequence[EnvironmentFile], record: dict[str, Any]) -> None:
        """Complete the copy, and compare it with its record.

        Raises OSError if the copy's files or bytes differ from the record.
        """
        for each in files:
            path = self._path(each)
            if each.kind == "hard link" and not os.path.lexists(path):
                os.link(os.path.join(self.partial, each.target), path)
            elif each.kind == "link" and not os.path.lexists(path):
                os.symlink(each.target, path)
            elif each.kind == "file" and not each.size:
                open(path, "ab").close()
        for each in reversed(files):
            if each.kind == "file":
                os.utime(self._path(each), ns=(each.mtime, each.mtime))
            if each.kind in {"file", "folder"}:
                os.chmod(self._path(each), each.mode)
        found = self._found(self.partial)
        if found != (record["files"], record["content"]):
            raise OSError(
                f"expected files of digests {record['files']} and {record['content']} "
                f"in {self.partial} of {platform.node()}, found {found}; check the "
                "memory of this node, and stage again"
            )
        with open(os.path.join(self.partial, RECORD), "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.chmod(self.partial, 0o755)

    def publish(self, record: dict[str, Any]) -> None:
        """Give the copy its name, in place of a former copy."""
        if self.record:
            # The folder must be empty for the new one to take its name.
            old = f"{self.partial}-old"
            os.rename(self.place, old)
            _remove(old)
        try:
            os.rename(self.partial, self.place)
        except OSError:
            # Another job may have staged the same environment in the meantime.
            other = NodeCopy(self.place)
            if other.record.get("content") != record["content"]:
                raise
            self.discard()

    def discard(self) -> None:
        """Remove what has been written, unless the copy has its name."""
        _remove(self.partial)

    def _path(self, each: EnvironmentFile) -> str:
        return os.path.join(self.partial, each.path)

    def _found(self, folder: str) -> tuple[str, str]:
        """Return the digests of a folder's files and of their bytes."""
        files = list_files(folder, self.place)
        digest, buffer = xxhash.xxh3_64(), np.empty(1 << 22, np.uint8)
        for each in files:
            if each.kind == "file" and "__pycache__" not in each.path.split("/"):
                with open(os.path.join(folder, each.path), "rb", buffering=0) as file:
                    while count := file.readinto(buffer.data):
                        digest.update(buffer[:count].data)
        return digest_of_files(files), digest.hexdigest()


def _remove(folder: str) -> None:
    """Remove a folder, also one whose own folders may not be written."""
    for path, names, _ in os.walk(folder):
        for name in names:
            full = os.path.join(path, name)
            if not os.path.islink(full):
                os.chmod(full, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _file_system(folder: str) -> str:
    """Return the kind of the file system of a folder, such as tmpfs."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            front, _, rest = line.partition(" - ")
            if front.split()[2] == number:
                return rest.split()[0]
    return ""


def _free_memory() -> Iterator[int]:
    """Yield the free memory of this node, and of each control group of this process."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                yield 1024 * int(line.split()[1])
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        inside = next((x.strip()[3:] for x in file if x.startswith("0::")), "/")
    group = "/sys/fs/cgroup" + inside.rstrip("/")
    while group.startswith("/sys/fs/cgroup"):
        with contextlib.suppress(OSError, ValueError):
            limit, used = (
                int(_text(os.path.join(group, f"memory.{name}")))
                for name in ("max", "current")
            )
            yield limit - used
        group = os.path.dirname(group)


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
