"""The copy of an environment to all nodes: read once, and sent along a tree.

One rank of each node takes part. The first of them reads the source, or unpacks an
archive on its node; the others receive its bytes by `broadcast_into`.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.typing import Array
from hpcstrat.tools.staging.environment_files import (
    EnvironmentFile,
    allocated,
    digest_of_files,
    list_files,
)
from hpcstrat.tools.staging.node_copy import FilePart, FreeSpace, NodeCopy, parts_of

__all__ = ["Staged", "copy_to_nodes", "is_archive"]

_PIECE_BYTES = 16 << 20
# Opening a file of a parallel file system takes long, and many can be opened at once.
_READERS = 16
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


@dataclass(frozen=True, slots=True)
class Staged:
    """The result: numbers of files and bytes, and of nodes that have a new copy.

    ``read_bytes`` were read from the source, by one rank.
    """

    num_files: int
    num_bytes: int
    read_bytes: int
    num_nodes: int
    num_new: int


def is_archive(source: str) -> bool:
    """Return whether the source is an archive, by its name."""
    return source.endswith(_ARCHIVES) and not os.path.isdir(source)


def copy_to_nodes(
    collectives: Collectives, source: str, place: str, *, replaces: bool
) -> Staged:
    """Copy an environment to ``place`` on the nodes of all ranks of ``collectives``.

    Collective over these ranks, one for each node. An error on one node is raised on
    all, and no node then has a new copy.
    """
    is_first = collectives.rank == 0
    copy: NodeCopy | None = None
    try:
        with collectives.section("preparation of the nodes"):
            copy = NodeCopy(place)
            free = copy.free()
        nodes: list[FreeSpace] = collectives.all_gather_object(free, "free space")
        with collectives.section("listing of the environment"):
            made = _StagingPlan.of(source, copy, nodes) if is_first else None
        plan: _StagingPlan = collectives.broadcast_object(made, 0, "files")
        with collectives.section("comparison with the copies on the nodes"):
            has = copy.record.get("files") == plan.digest and copy.is_whole
            if not has:
                copy.require_no_other(plan.digest, replaces=replaces)
        present: list[bool] = collectives.all_gather_object(has, "copies")
        if not all(present):
            with collectives.section("comparison of the free space"):
                missing = [n for n, had in zip(nodes, present, strict=True) if not had]
                _require_space(plan.files, missing, source)
            _send(collectives, plan, None if has else copy)
        return Staged(
            num_files=sum(file.kind == "file" for file in plan.files),
            num_bytes=sum(file.size for file in plan.files),
            read_bytes=0 if all(present) else plan.read_bytes,
            num_nodes=len(present),
            num_new=present.count(False),
        )
    finally:
        if copy is not None:
            copy.discard()


@dataclass(frozen=True, slots=True)
class _StagingPlan:
    """The files of a copy, and the folder from which the first rank reads them.

    ``is_unpacked`` is True if this folder is the partial copy of the first rank's node.
    """

    source: str
    folder: str
    files: list[EnvironmentFile]
    digest: str
    read_bytes: int
    is_unpacked: bool = False

    @classmethod
    def of(
        cls, source: str, copy: NodeCopy, nodes: Sequence[FreeSpace]
    ) -> _StagingPlan:
        """List the files; unpack an archive, unless this node has its copy."""
        is_unpacked, folder = False, source
        read_bytes = None
        if is_archive(source):
            info = os.stat(source)
            source = f"{source} of {info.st_size} bytes and time {info.st_mtime_ns}"
            read_bytes = info.st_size
            if copy.record.get("source") == source and copy.is_whole:
                folder, read_bytes = copy.place, 0
            else:
                _unpack(folder, copy.partial, nodes)
                folder, is_unpacked = copy.partial, True
        if os.path.isfile(folder):
            raise ValueError(
                f"expected a folder, or an archive ({', '.join(_ARCHIVES)}), found "
                f"the file {folder}; pass the folder of an environment"
            )
        files = list_files(folder, copy.place)
        digest = digest_of_files(files)
        if read_bytes is None:
            read_bytes = sum(each.size for each in files)
            if copy.record.get("files") == digest and copy.is_whole:
                folder, read_bytes = copy.place, 0
        return cls(source, folder, files, digest, read_bytes, is_unpacked)


def _require_space(
    files: Sequence[EnvironmentFile], nodes: Sequence[FreeSpace], source: str
) -> None:
    num_bytes, inodes = allocated(files)
    for node in nodes:
        if node.num_bytes < num_bytes or node.inodes < inodes:
            raise ValueError(
                f"expected room for {num_bytes:,} bytes and {inodes:,} files of "
                f"{source} on each node, found {max(node.num_bytes, 0):,} bytes and "
                f"{node.inodes:,} files free on {node.host}; pass a folder on a disk "
                "of the nodes by --to, or stage a smaller environment"
            )


class _SourceReader:
    """Reads the pieces of an environment, and the digest of their bytes."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._digest = xxhash.xxh3_64()
        self._pool = ThreadPoolExecutor(_READERS)

    def fill(self, piece: Array, parts: Sequence[FilePart]) -> None:
        """Read parts of files into a piece.

        Raises ValueError if a file has changed since it was listed.
        """
        for _ in self._pool.map(lambda part: self._read(piece, part), parts):
            pass
        for part in parts:
            if "__pycache__" not in part.file.path.split("/"):
                self._digest.update(piece[part.place : part.place + part.size].data)

    def _read(self, piece: Array, part: FilePart) -> None:
        out = piece[part.place : part.place + part.size]
        if part.file.content is not None:
            end = part.start + part.size
            out[:] = np.frombuffer(part.file.content[part.start : end], np.uint8)
            return
        path = os.path.join(self._folder, part.file.path)
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(part.start)
            done = 0
            while size == part.file.size and done < part.size:
                count = file.readinto(out[done:].data)
                if not count:
                    break
                done += count
        if done < part.size:
            raise ValueError(
                f"expected {part.file.size:,} bytes in {path}, found that the file has "
                "changed; stage while no program writes into the environment"
            )

    def content(self) -> str:
        """Return the digest of all bytes that were read."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _send(collectives: Collectives, plan: _StagingPlan, copy: NodeCopy | None) -> None:
    """Send all pieces of the environment; ``copy`` is None on a node that has it.

    Collective over the ranks of ``collectives``. The first rank reads the next piece
    while the ranks send and write a piece.
    """
    is_first = collectives.rank == 0
    # The first rank of an archive has unpacked it into its node's copy.
    writer = None if is_first and plan.is_unpacked else copy
    reader = _SourceReader(plan.folder)
    pieces = [np.empty(_PIECE_BYTES, np.uint8) for _ in range(2)]
    parts = list(parts_of(plan.files, _PIECE_BYTES))
    with contextlib.closing(reader), ThreadPoolExecutor(1) as ahead:

        def fill(number: int) -> Any:
            if not is_first or number >= len(parts):
                return None
            return ahead.submit(reader.fill, pieces[number % 2], parts[number])

        with collectives.section("start of the copy"):
            if writer is not None:
                writer.begin(plan.files)
            elif copy is not None:
                copy.adopt(plan.files)
            filled = fill(0)
        for number, inside in enumerate(parts):
            with collectives.section("reading of the environment"):
                if filled is not None:
                    filled.result()
            filled = fill(number + 1)
            last = inside[-1]
            piece = pieces[number % 2][: last.place + last.size]
            collectives.moves.broadcast_into(piece, 0, "bytes of the environment")
            with collectives.section("writing of the environment"):
                if writer is not None:
                    writer.write(piece, inside)
        content = collectives.broadcast_object(reader.content(), 0, "digest")
        record = {"source": plan.source, "files": plan.digest, "content": content}
        with collectives.section("end of the copy"):
            if copy is not None:
                copy.finish(plan.files, record)
        # All copies are whole: only now do they get their names.
        with collectives.section("naming of the copy"):
            if copy is not None:
                copy.publish(record)


def _unpack(archive: str, folder: str, nodes: Sequence[FreeSpace]) -> None:
    """Unpack an archive into a new folder, while it has room on all nodes.

    Raises ValueError if the archive is damaged, or has a name outside of itself.
    """
    os.mkdir(folder, 0o700)
    try:
        with _open_archive(archive) as tar:
            _extract(tar, archive, folder, nodes)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(
            f"expected an archive that can be unpacked, found {archive}: {error}; "
            "write it again"
        ) from error
    names = os.listdir(folder)
    if len(names) == 1 and os.path.isdir(os.path.join(folder, names[0])):
        # The archive has the environment's folder: use what is inside.
        inner = f"{folder}-inner"
        os.rename(os.path.join(folder, names[0]), inner)
        os.rmdir(folder)
        os.rename(inner, folder)


@contextlib.contextmanager
def _open_archive(archive: str) -> Iterator[Any]:
    """Open an archive to be read once from its begin to its end."""
    if not archive.endswith(".zst"):
        with tarfile.open(archive, "r|*", bufsize=1 << 20) as tar:
            yield tar
        return
    if shutil.which("zstd") is None:
        raise ValueError(
            f"expected the command zstd, which unpacks {archive}, found none; install "
            "zstd, or write an archive .tar.gz"
        )
    command = ["zstd", "-dcq", archive]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as tar,
    ):
        yield tar
    if process.returncode:
        raise EOFError("zstd could not unpack it")


def _extract(tar: Any, archive: str, folder: str, nodes: Sequence[FreeSpace]) -> None:
    # Keep rights as they are; owners are those of this process.
    tar.extraction_filter = lambda member, _: member
    tar.chown = lambda *_: None
    num_bytes = 0
    for inodes, member in enumerate(tar, 1):
        if member.name.startswith("/") or ".." in member.name.split("/"):
            raise ValueError(
                f"expected relative names in {archive}, found {member.name}; write "
                "the archive again: tar -C FOLDER -cf ARCHIVE ."
            )
        num_bytes += -(-member.size // 4096) * 4096
        for node in nodes:
            if node.num_bytes < num_bytes or node.inodes < inodes:
                raise ValueError(
                    f"expected room for the files of {archive} on each node, found "
                    f"{max(node.num_bytes, 0):,} bytes and {node.inodes:,} files free "
                    f"on {node.host}, and {num_bytes:,} bytes or more in the archive; "
                    "pass a folder on a disk of the nodes by --to"
                )
        tar.extract(member, folder)
