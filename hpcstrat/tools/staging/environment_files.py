"""The files of an environment, and their changes when the environment moves.

Scripts in ``bin``, ``pyvenv.cfg`` and links have paths of the environment itself. In a
copy they get the paths of the copy, so that its scripts run its own interpreter.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import xxhash

__all__ = ["RECORD", "EnvironmentFile", "allocated", "digest_of_files", "list_files"]

RECORD = ".hpcstrat-stage.json"
"""Name of the file in a staged folder that says what the folder is a copy of."""

_MOST_SCRIPT_BYTES = 1 << 20
_PAGE = 4096
# Folder and name of the interpreter in a script's first line; in its second line if the
# path is long.
_SHEBANG = r"""#!(?:/bin/sh\n'''exec' "?)?(/[^"\n]*)/bin/([^\s"/]+)"""


@dataclass(frozen=True, slots=True)
class EnvironmentFile:
    """A file, folder or link of an environment; ``path`` is inside of it.

    ``kind`` is "folder", "file", "link", or "hard link" to an earlier path. ``target``
    is a link's target. ``content`` is the new content of a file with paths of the
    environment, whose length is ``size``. ``stored`` is less than ``size`` if the file
    has holes.
    """

    path: str
    kind: str
    mode: int = 0
    mtime: int = 0
    size: int = 0
    stored: int = 0
    target: str = ""
    content: bytes | None = None


def list_files(folder: str, place: str) -> list[EnvironmentFile]:
    """List all files of an environment as they are to be in a copy at ``place``.

    Folders come before their files. Raises OSError if a folder cannot be read, and
    ValueError if it has a socket, a pipe or a device.
    """
    folder = os.path.abspath(folder)
    known: dict[tuple[int, int], str] = {}
    found = [_entry(folder, path, known) for path in _walk(folder, "")]
    former = _former_places(folder, found)
    return [_moved(each, folder, former, place) for each in found]


def _walk(folder: str, inside: str) -> Iterator[str]:
    with os.scandir(os.path.join(folder, inside)) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        path = os.path.join(inside, entry.name)
        if path == RECORD:
            continue
        yield path
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder, path)


def _entry(
    folder: str, path: str, known: dict[tuple[int, int], str]
) -> EnvironmentFile:
    full = os.path.join(folder, path)
    info = os.lstat(full)
    mode = stat.S_IMODE(info.st_mode)
    if stat.S_ISDIR(info.st_mode):
        return EnvironmentFile(path, "folder", mode)
    if stat.S_ISLNK(info.st_mode):
        return EnvironmentFile(path, "link", target=os.readlink(full))
    if not stat.S_ISREG(info.st_mode):
        raise ValueError(
            f"expected files, folders and links in {folder}, found {path}, which is a "
            "socket, a pipe or a device; remove it"
        )
    first = known.setdefault((info.st_dev, info.st_ino), path)
    if first != path:
        return EnvironmentFile(path, "hard link", target=first)
    stored = min(info.st_size, 512 * info.st_blocks)
    times = info.st_mtime_ns
    return EnvironmentFile(path, "file", mode, times, info.st_size, stored)


def _former_places(folder: str, found: Sequence[EnvironmentFile]) -> list[str]:
    """Return the folders in which the environment was made or is, longest first.

    An archive is unpacked elsewhere: the interpreter in the first lines of its scripts
    is the one of the environment, if it has an interpreter of this name.
    """
    places = {folder, os.path.realpath(folder)}
    own = {each.path for each in found if each.path.startswith("bin/")}
    for path in own:
        full = os.path.join(folder, path)
        if os.path.isfile(full) and os.path.getsize(full) <= _MOST_SCRIPT_BYTES:
            with open(full, "rb") as file:
                line = os.fsdecode(file.read(1024))
            shebang = re.match(_SHEBANG, line)
            if shebang and f"bin/{shebang.group(2)}" in own:
                places.add(shebang.group(1))
    return sorted(places - {"/usr", "/usr/local"}, key=len, reverse=True)


def _moved(
    each: EnvironmentFile, folder: str, former: Sequence[str], place: str
) -> EnvironmentFile:
    """Return a file with the paths of a copy at ``place``."""
    if each.kind == "link":
        target = each.target
        parent = os.path.join(folder, os.path.dirname(each.path))
        whole = os.path.normpath(os.path.join(parent, target))
        inside = next((f for f in former if _is_inside(whole, f)), None)
        if os.path.isabs(target) and inside is not None:
            target = place + target[len(inside) :]
        elif not os.path.isabs(target) and not _is_inside(whole, folder):
            # A relative link to a place outside would lead elsewhere from the copy.
            target = whole
        return replace(each, target=target)
    is_script = each.path.startswith("bin/") or each.path == "pyvenv.cfg"
    if each.kind != "file" or not is_script or each.size > _MOST_SCRIPT_BYTES:
        return each
    with open(os.path.join(folder, each.path), "rb") as file:
        content = file.read()
    if b"\0" in content:
        return each
    places = b"|".join(re.escape(os.fsencode(one)) for one in former)
    pattern = rb"(?<![\w.-])(?:" + places + rb")(?=[/'\"\s:;]|$)"
    content = re.sub(pattern, lambda _: os.fsencode(place), content)
    return replace(each, content=content, size=len(content), stored=len(content))


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def allocated(files: Sequence[EnvironmentFile]) -> tuple[int, int]:
    """Return the bytes, in whole pages, and the inodes that a copy needs."""
    num_bytes = sum(-(-each.stored // _PAGE) * _PAGE for each in files)
    return num_bytes, sum(each.kind != "hard link" for each in files) + 1


def digest_of_files(files: Sequence[EnvironmentFile]) -> str:
    """Return a digest of the files' names, kinds, sizes, times, rights and targets.

    Compiled modules are left out: programs write them into both folders.
    """
    digest = xxhash.xxh3_128()
    for each in files:
        if "__pycache__" not in each.path.split("/"):
            about = (each.path, each.kind, each.mode, each.mtime, each.size)
            digest.update(repr((*about, each.target)).encode())
    return digest.hexdigest()
