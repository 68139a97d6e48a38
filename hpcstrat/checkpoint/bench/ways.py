"""Which way of writing is fastest on a file system: several are tried there.

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
from hpcstrat.checkpoint.disk.disk import (
    create,
    flush,
    forget_pages,
    is_direct,
    open_to_read,
    open_to_write,
    read_into,
    write_all,
)
from hpcstrat.checkpoint.file.extents import Plan, choose_block_bytes, part_of
from hpcstrat.checkpoint.file.image import Image
from hpcstrat.checkpoint.save.writing import NUM_THREADS
from hpcstrat.errors import CheckpointError
from hpcstrat.typing import Array

__all__ = [
    "STRIPE_BYTES",
    "Measured",
    "Way",
    "compare",
]

STRIPE_BYTES = 1 << 20
"""Least size of a part: the usual stripe of parallel file systems."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way of writing.

    Parameters
    ----------
    shared : bool
        Whether all write into one file; otherwise each has its own.
    direct : bool
        Whether to go past the page cache.
    piece_bytes : int
        How much is written by one call.
    """

    shared: bool
    direct: bool
    piece_bytes: int


@dataclass(slots=True)
class Measured:
    """How fast a layout is.

    Parameters
    ----------
    layout : Way
        Which.
    nbytes : int
        How much was written, and read, in each round.
    write_seconds, read_seconds : list of float
        How long it took, for each round.
    refused : bool
        Whether the page cache was used after all, as the file system does not do
        without it.
    """

    layout: Way
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
        """The median of the rounds."""
        return self.nbytes / statistics.median(self.read_seconds)


def compare(
    group: Writers,
    folder: str,
    nbytes: int,
    rounds: int,
    tick: Callable[[int], None],
) -> list[Measured]:
    """Write and read files in all layouts, in a new folder.

    Collective over ``group``.

    Parameters
    ----------
    group : Writers
        Those who write.
    folder : str
        Path of the folder, as rank 0 gives it; to be removed by the caller.
    nbytes : int
        How much all write together: a multiple of `STRIPE_BYTES`, and at least that
        for each.
    rounds : int
        How many times.
    tick : callable
        Called now and then with a number of bytes that were written or read by all.

    Returns
    -------
    list of Measured
        Of each layout; times are those of rank 0.

    Raises
    ------
    CheckpointError
        If the folder cannot be made or written, or there is not enough room. Raised on
        every rank.
    """

    folder = group.allgather(folder)[0]

    def _begin() -> None:
        if group.rank == 0:
            _check(os.path.dirname(folder), nbytes, group.size)
            os.mkdir(folder)

    together(group, f"to make {folder}", _begin)
    trial = _Trial(group, folder, nbytes)
    # The first time takes longer.
    trial.measure(Measured(next(iter(trial.results)), nbytes), lambda _: None)
    for layout in itertools.cycle(trial.results):
        measured = trial.results[layout]
        if len(measured.write_seconds) == rounds:
            break
        trial.measure(measured, tick)
    return list(trial.results.values())


def _check(directory: str, nbytes: int, num_writers: int) -> None:
    """Raise what can be said before anything is written."""
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


class _Trial:
    """The files of one comparison, and what came of it."""

    def __init__(self, group: Writers, folder: str, nbytes: int) -> None:
        self.group, self.folder = group, folder
        usual = choose_block_bytes(nbytes, group.size)
        ways = itertools.product(
            (True, False), (True, False), sorted({STRIPE_BYTES, usual})
        )
        layouts = [Way(*way) for way in ways]
        self.results = {layout: Measured(layout, nbytes) for layout in layouts}
        self._image = Image(NUM_THREADS, usual)
        # Nothing that a file system could make smaller.
        for number in range(NUM_THREADS):
            slot = self._image.slot(number)
            slot[:] = np.frombuffer(np.random.default_rng().bytes(usual), np.uint8)

    def measure(self, measured: Measured, tick: Callable[[int], None]) -> None:
        """Write and read once."""
        layout, nbytes = measured.layout, measured.nbytes
        plan = Plan(0, 0, nbytes, layout.piece_bytes)
        part = part_of(plan.num_blocks, self.group.rank, self.group.size)
        # What another has written is not in one's own caches.
        reader = (self.group.rank + 1) % self.group.size
        other = part_of(plan.num_blocks, reader, self.group.size)
        self._do("create a file", lambda: self._create(plan, layout))
        try:
            seconds = self._timed("write", lambda: self._write(plan, layout, part))
            tick(nbytes)
            self._do("open a file", lambda: self._forget(plan, layout, part))
            held = self._timed("read", lambda: self._read(plan, layout, other))
            tick(nbytes)
        finally:
            if self.group.rank == 0:
                self._unlink()
        measured.write_seconds.append(seconds[0])
        measured.read_seconds.append(held[0])
        measured.refused |= layout.direct and not all(seconds[1:] + held[1:])

    def _do(self, what: str, action: Callable[[], Any]) -> Any:
        return together(self.group, f"to {what} in {self.folder}", action)

    def _timed(self, what: str, action: Callable[[], bool]) -> list[Any]:
        """Return how long all took on rank 0, and what the action returned on each."""
        self.group.allgather(None)
        begin = time.perf_counter()
        result = self._do(what, action)
        seconds = time.perf_counter() - begin
        return [self.group.allgather(seconds)[0], *self.group.allgather(result)]

    def _path(self, layout: Way, rank: int) -> str:
        name = "shared" if layout.shared else f"part-{rank}"
        return os.path.join(self.folder, name)

    def _create(self, plan: Plan, layout: Way) -> None:
        if self.group.rank:
            return
        if layout.shared:
            create(self._path(layout, 0), plan.data_end)
            return
        for rank in range(self.group.size):
            part = part_of(plan.num_blocks, rank, self.group.size)
            start, stop = plan.span(part[0])[0], plan.span(part[-1])[1]
            create(self._path(layout, rank), stop - start)

    def _unlink(self) -> None:
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                os.unlink(entry)

    def _write(self, plan: Plan, layout: Way, part: range) -> bool:
        shift = 0 if layout.shared else plan.span(part[0])[0]
        path = self._path(layout, self.group.rank)
        with _closed(open_to_write(path, layout.direct)) as file:

            def write(block: int, slot: Array) -> None:
                start, stop = plan.span(block)
                slot[:8].view(np.int64)[0] = block
                write_all(file, slot[: stop - start].data, start - shift)

            self._each(part, write)
            flush(file)
            return is_direct(file)

    def _forget(self, plan: Plan, layout: Way, part: range) -> None:
        path = self._path(layout, self.group.rank)
        with _closed(open_to_read(path, False)) as file:
            shift = 0 if layout.shared else plan.span(part[0])[0]
            start, stop = plan.span(part[0])[0], plan.span(part[-1])[1]
            forget_pages(file, start - shift, stop - shift)

    def _read(self, plan: Plan, layout: Way, part: range) -> bool:
        shift = 0 if layout.shared else plan.span(part[0])[0]
        path = self._path(layout, (self.group.rank + 1) % self.group.size)
        with _closed(open_to_read(path, layout.direct)) as file:

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
