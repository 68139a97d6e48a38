"""Ways to write a file, tried on a file system to find the fastest.

One file for all, as checkpoints are written, and a file for each writer; past the page
cache and through it; in parts of the smallest size and of the size that a checkpoint
would have. All are written and read by the functions of real saves.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcstrat.checkpoint.bench.writers import Writers, together
from hpcstrat.checkpoint.disk import (
    create,
    flush,
    forget_pages,
    is_direct,
    open_to_read,
    open_to_write,
    read_into,
    write_all,
)
from hpcstrat.checkpoint.file.extents import FileLayout, choose_block_bytes, part_of
from hpcstrat.checkpoint.file.image import Image
from hpcstrat.checkpoint.save.part_writer import NUM_THREADS
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CheckpointError

__all__ = [
    "STRIPE_BYTES",
    "MeasuredWay",
    "Way",
    "compare",
]

STRIPE_BYTES = 1 << 20
"""Least size of a part: the usual stripe of parallel file systems."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way of writing.

    All write into one ``shared`` file, or each has its own; ``direct`` goes past the
    page cache; ``piece_bytes`` are written by one call.
    """

    shared: bool
    direct: bool
    piece_bytes: int


@dataclass(slots=True)
class MeasuredWay:
    """The measured speed of a way of writing.

    ``nbytes`` were written, and read, in each round, by all together. The way was
    ``refused`` where the page cache was used after all.
    """

    way: Way
    nbytes: int
    write_seconds: list[float] = field(default_factory=list)
    read_seconds: list[float] = field(default_factory=list)
    refused: bool = False

    @property
    def write_bytes_per_second(self) -> float:
        """The median of the rounds."""
        return self.nbytes / statistics.median(self.write_seconds)

    @property
    def read_bytes_per_second(self) -> float:
        return self.nbytes / statistics.median(self.read_seconds)


def compare(
    group: Writers,
    folder: str,
    nbytes: int,
    rounds: int,
    tick: Callable[[int], None],
) -> list[MeasuredWay]:
    """Write and read files in all ways, in a new folder; the caller removes it.

    Collective over ``group``. ``folder`` is what rank 0 gives; ``nbytes`` are for all
    together, a multiple of `STRIPE_BYTES`, and at least that for each. ``tick`` is told
    now and then how many bytes all have written or read. Times are those of rank 0.
    Raises CheckpointError on every rank where the folder cannot be made or written, or
    has no room.
    """

    folder = group.allgather(folder)[0]

    def _begin() -> None:
        if group.rank == 0:
            _check(os.path.dirname(folder), nbytes, group.size)
            os.mkdir(folder)

    together(group, f"to make {folder}", _begin)
    comparison = _Comparison(group, folder, nbytes)
    # The first time takes longer.
    comparison.measure(
        MeasuredWay(next(iter(comparison.results)), nbytes), lambda _: None
    )
    # One round of all, then the next: what disturbs for a while disturbs all of them.
    for way in itertools.cycle(comparison.results):
        measured = comparison.results[way]
        if len(measured.write_seconds) == rounds:
            break
        comparison.measure(measured, tick)
    return list(comparison.results.values())


def _check(directory: str, nbytes: int, num_writers: int) -> None:
    """Check folder, size and free space before anything is written."""
    if not os.path.isdir(directory):
        raise CheckpointError(
            f"expected a folder, found none at {directory}; make it first"
        )
    if nbytes < num_writers * STRIPE_BYTES:
        raise CheckpointError(
            f"expected a size of 1 MiB or more for each of {num_writers} writers, "
            f"found {nbytes >> 20} MiB; give a size of {num_writers} MiB or more"
        )
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    if space.f_blocks and free < nbytes:
        raise CheckpointError(
            f"expected room for {nbytes:,} bytes in {directory}, found {free:,} bytes; "
            "give a smaller size or another folder"
        )


class _Comparison:
    """The files of one comparison, and what came of it."""

    def __init__(self, group: Writers, folder: str, total_bytes: int) -> None:
        self.group, self.folder = group, folder
        usual = choose_block_bytes(total_bytes, group.size)
        sizes = sorted({STRIPE_BYTES, usual})
        kinds = itertools.product((True, False), (True, False), sizes)
        ways = [Way(shared, direct, nbytes) for shared, direct, nbytes in kinds]
        self.results = {way: MeasuredWay(way, total_bytes) for way in ways}
        self._image = Image(NUM_THREADS, usual)
        # Nothing that a file system could make smaller.
        for number in range(NUM_THREADS):
            slot = self._image.slot(number)
            slot[:] = np.frombuffer(np.random.default_rng().bytes(usual), np.uint8)

    def measure(self, measured: MeasuredWay, tick: Callable[[int], None]) -> None:
        """Write and read once."""
        way, nbytes = measured.way, measured.nbytes
        plan = FileLayout(0, 0, nbytes, way.piece_bytes)
        part = part_of(plan.num_blocks, self.group.rank, self.group.size)
        # The caches of this rank do not hold what another has written.
        reader = (self.group.rank + 1) % self.group.size
        other = part_of(plan.num_blocks, reader, self.group.size)
        self._do("create a file", lambda: self._create(plan, way))
        # All are done with a step before one begins the next, and fail together: the
        # files go only when nobody has them open.
        try:
            seconds = self._timed("write", lambda: self._write(plan, way, part))
            tick(nbytes)
            self._do("open a file", lambda: self._forget(plan, way, part))
            held = self._timed("read", lambda: self._read(plan, way, other))
            tick(nbytes)
        finally:
            if self.group.rank == 0:
                self._unlink()
        measured.write_seconds.append(seconds[0])
        measured.read_seconds.append(held[0])
        measured.refused |= way.direct and not all(seconds[1:] + held[1:])

    def _do(self, what: str, action: Callable[[], Any]) -> Any:
        return together(self.group, f"to {what} in {self.folder}", action)

    def _timed(self, what: str, action: Callable[[], bool]) -> list[Any]:
        """Return how long all took on rank 0, and what the action returned on each."""
        # A barrier: none begins before the others are there.
        self.group.allgather(None)
        begin = time.perf_counter()
        result = self._do(what, action)
        seconds = time.perf_counter() - begin
        return [self.group.allgather(seconds)[0], *self.group.allgather(result)]

    def _path(self, way: Way, rank: int) -> str:
        name = "shared" if way.shared else f"part-{rank}"
        return os.path.join(self.folder, name)

    def _create(self, plan: FileLayout, way: Way) -> None:
        if self.group.rank:
            return
        if way.shared:
            create(self._path(way, 0), plan.data_end)
            return
        for rank in range(self.group.size):
            part = part_of(plan.num_blocks, rank, self.group.size)
            start, stop = plan.span(part[0])[0], plan.span(part[-1])[1]
            create(self._path(way, rank), stop - start)

    def _unlink(self) -> None:
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                os.unlink(entry)

    def _write(self, plan: FileLayout, way: Way, part: range) -> bool:
        shift = 0 if way.shared else plan.span(part[0])[0]
        path = self._path(way, self.group.rank)
        with _closed(open_to_write(path, way.direct)) as file:

            def write(block: int, slot: Array) -> None:
                start, stop = plan.span(block)
                # Each block differs, so that none is found again in place of another.
                slot[:8].view(np.int64)[0] = block
                write_all(file, slot[: stop - start].data, start - shift)

            self._each(part, write)
            # A save has ended when its data are on the disk.
            flush(file)
            return is_direct(file)

    def _forget(self, plan: FileLayout, way: Way, part: range) -> None:
        path = self._path(way, self.group.rank)
        with _closed(open_to_read(path, False)) as file:
            shift = 0 if way.shared else plan.span(part[0])[0]
            start, stop = plan.span(part[0])[0], plan.span(part[-1])[1]
            # Or a reader on this host would measure memory, not the file system.
            forget_pages(file, start - shift, stop - shift)

    def _read(self, plan: FileLayout, way: Way, part: range) -> bool:
        shift = 0 if way.shared else plan.span(part[0])[0]
        path = self._path(way, (self.group.rank + 1) % self.group.size)
        with _closed(open_to_read(path, way.direct)) as file:

            def read(block: int, slot: Array) -> None:
                start, stop = plan.span(block)
                read_into(file, slot[: stop - start].data, start - shift)
                if slot[:8].view(np.int64)[0] != block:
                    raise OSError(errno.EIO, "what was read is not what was written")

            self._each(part, read)
            return is_direct(file)

    def _each(self, part: range, work: Callable[[int, Array], None]) -> None:
        """Do the parts of a file in as many threads as a save does."""

        def run(number: int) -> None:
            for block in part[number::NUM_THREADS]:
                work(block, self._image.slot(number))

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(run, range(NUM_THREADS)))


@contextlib.contextmanager
def _closed(file: int) -> Iterator[int]:
    try:
        yield file
    finally:
        os.close(file)
