"""Benchmark that finds the fastest way to write checkpoints on a file system.

The ways are: one file for all ranks, as in checkpoints, or one file per rank; with or
without the page cache; in blocks of the smallest size or of a checkpoint's usual size.
The benchmark writes and reads the files with the functions of real saves.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hpcstrat.checkpoint.agreement import explained
from hpcstrat.checkpoint.disk import (
    closing,
    create,
    flush,
    forget_pages,
    open_to_read,
    open_to_write,
)
from hpcstrat.checkpoint.file.extents import FileLayout, choose_block_bytes, part_of
from hpcstrat.checkpoint.file.image import Image
from hpcstrat.checkpoint.save.part_writer import NUM_THREADS
from hpcstrat.engine.file_bytes import is_direct, read_into, write_all
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CheckpointError

__all__ = [
    "STRIPE_BYTES",
    "MeasuredWay",
    "Way",
    "Writers",
    "compare",
    "run_in_threads",
    "scratch",
    "together",
]

# Shell script: remove the folder $0 when the benchmark closes the pipe, or dies.
_GUARD = 'trap "" HUP INT TERM; cat > /dev/null; rm -rf -- "$0"'


@contextlib.contextmanager
def scratch(directory: str) -> Iterator[str]:
    """Yield a new path in ``directory`` for a folder, and remove the folder at the end.

    Call this on one rank, before MPI starts. The caller makes the folder. A separate
    process removes it, even if this process is killed.
    """
    name = f".hpcstrat-bench-{secrets.token_hex(8)}"
    folder = os.path.join(os.path.abspath(directory), name)
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # In a separate session, the shell survives Ctrl-C and a launcher's kill.
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        guard.communicate()


class Writers(Protocol):
    """The ranks that write together: an mpi4py communicator, or a `_WritingThread`."""

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all ranks, in order of rank; collective."""


def together(group: Writers, what: str, action: Callable[[], Any]) -> Any:
    """Run an action on all ranks; if it fails on a rank, raise CheckpointError on all.

    Collective over ``group``; the action must not make collective calls.
    """
    # Exchange all errors, so that no rank continues after another rank has failed.
    text, result = "", None
    try:
        result = action()
    except CheckpointError as error:
        text = str(error)
    except Exception as error:
        text = explained(what, error)
    for said in group.allgather(text):
        if said:
            raise CheckpointError(said)
    return result


class _WritingThread:
    """A thread of `run_in_threads`, which acts as a rank: implements `Writers`."""

    def __init__(
        self, rank: int, values: list[Any], barrier: threading.Barrier
    ) -> None:
        self.rank, self.size = rank, len(values)
        self._values, self._barrier = values, barrier

    def allgather(self, sendobj: Any) -> list[Any]:
        self._values[self.rank] = sendobj
        self._barrier.wait()
        values = list(self._values)
        # Wait until all threads have copied the list: the next call overwrites it.
        self._barrier.wait()
        return values


def run_in_threads(size: int, action: Callable[[Writers], Any]) -> Any:
    """Run an action in ``size`` threads that act as ranks; return the result of rank 0.

    The calling thread is rank 0. The action must raise on all ranks or on none.
    """
    values: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    members = [_WritingThread(rank, values, barrier) for rank in range(size)]

    def _run(member: _WritingThread) -> None:
        # All threads raise the same CheckpointError; that of rank 0 reaches the caller.
        try:
            action(member)
        except (CheckpointError, threading.BrokenBarrierError):
            return
        except BaseException:
            # Abort the barrier, or other threads would wait for this thread forever.
            barrier.abort()
            raise

    threads = [
        threading.Thread(target=_run, args=(member,), daemon=True)
        for member in members[1:]
    ]
    try:
        for thread in threads:
            thread.start()
        return action(members[0])
    finally:
        # If this thread has failed, the other threads would wait forever.
        barrier.abort()
        for thread in threads:
            thread.join()


STRIPE_BYTES = 1 << 20
"""Least size of a part: the usual stripe size of parallel file systems."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way of writing: one ``shared`` file, or one file for each rank.

    ``direct`` bypasses the page cache; each system call writes ``piece_bytes``.
    """

    shared: bool
    direct: bool
    piece_bytes: int


@dataclass(slots=True)
class MeasuredWay:
    """The measured speed of a `Way`: the seconds of each round.

    In a round, all ranks together write and read ``nbytes``. ``refused`` is True if the
    file system used the page cache although the way is ``direct``.
    """

    way: Way
    nbytes: int
    write_seconds: list[float] = field(default_factory=list)
    read_seconds: list[float] = field(default_factory=list)
    refused: bool = False

    @property
    def write_bytes_per_second(self) -> float:
        """Median write rate of all rounds, in bytes per second."""
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
    """Measure writing and reading files in every `Way`, in a new folder.

    Collective over ``group``; raises CheckpointError on every rank. The caller removes
    the folder. Only rank 0's ``folder`` counts. All ranks together write ``nbytes``: a
    multiple of `STRIPE_BYTES`, at least one stripe per rank. After all ranks have
    written or read the files, ``tick`` is called with ``nbytes``. Times are rank 0's.
    """

    folder = group.allgather(folder)[0]

    def _begin() -> None:
        if group.rank == 0:
            _check(os.path.dirname(folder), nbytes, group.size)
            os.mkdir(folder)

    together(group, f"to make {folder}", _begin)
    comparison = _Comparison(group, folder, nbytes)
    # Warm up with a discarded measurement, because the first write is slower.
    comparison.measure(
        MeasuredWay(next(iter(comparison.results)), nbytes), lambda _: None
    )
    # Measure each way once per round, so that other jobs slow down all ways alike.
    for way in itertools.cycle(comparison.results):
        measured = comparison.results[way]
        if len(measured.write_seconds) == rounds:
            break
        comparison.measure(measured, tick)
    return list(comparison.results.values())


def _check(directory: str, nbytes: int, num_writers: int) -> None:
    """Raise CheckpointError for a missing or full folder, or for too small a size."""
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
    """One run of `compare`: writes and reads the files, and has the results by way."""

    def __init__(self, group: Writers, folder: str, total_bytes: int) -> None:
        self.group, self.folder = group, folder
        usual = choose_block_bytes(total_bytes, group.size)
        sizes = sorted({STRIPE_BYTES, usual})
        kinds = itertools.product((True, False), (True, False), sizes)
        ways = [Way(shared, direct, nbytes) for shared, direct, nbytes in kinds]
        self.results = {way: MeasuredWay(way, total_bytes) for way in ways}
        self._image = Image(NUM_THREADS, usual)
        # Fill the buffers with random bytes, which a file system cannot compress.
        for number in range(NUM_THREADS):
            slot = self._image.slot(number)
            slot[:] = np.frombuffer(np.random.default_rng().bytes(usual), np.uint8)

    def measure(self, measured: MeasuredWay, tick: Callable[[int], None]) -> None:
        """Write and read files once in the way of ``measured``; add the times to it."""
        way, nbytes = measured.way, measured.nbytes
        plan = FileLayout(0, 0, nbytes, way.piece_bytes)
        part = part_of(plan.num_blocks, self.group.rank, self.group.size)
        # Read the next rank's blocks, which another host may have written: then they
        # are not in this host's page cache.
        reader = (self.group.rank + 1) % self.group.size
        other = part_of(plan.num_blocks, reader, self.group.size)
        self._do("create a file", lambda: self._create(plan, way))
        # `together` ends each step on all ranks, also if it fails. So no rank has a
        # file open when rank 0 removes the files.
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
        """Run an action; return rank 0's seconds, then the results of all ranks."""
        # Use this exchange as a barrier, so that all ranks start at the same time.
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
        with closing(open_to_write(path, way.direct)) as file:

            def write(block: int, slot: Array) -> None:
                start, stop = plan.span(block)
                # Write the block's number into it, so that a reader can check it.
                slot[:8].view(np.int64)[0] = block
                write_all(file, slot[: stop - start].data, start - shift)

            self._each(part, write)
            # A real save also ends with a flush.
            flush(file)
            return is_direct(file)

    def _forget(self, plan: FileLayout, way: Way, part: range) -> None:
        path = self._path(way, self.group.rank)
        with closing(open_to_read(path, False)) as file:
            shift = 0 if way.shared else plan.span(part[0])[0]
            start, stop = plan.span(part[0])[0], plan.span(part[-1])[1]
            # Drop the pages, so that a reader on this host reads from the disk.
            forget_pages(file, start - shift, stop - shift)

    def _read(self, plan: FileLayout, way: Way, part: range) -> bool:
        shift = 0 if way.shared else plan.span(part[0])[0]
        path = self._path(way, (self.group.rank + 1) % self.group.size)
        with closing(open_to_read(path, way.direct)) as file:

            def read(block: int, slot: Array) -> None:
                start, stop = plan.span(block)
                read_into(file, slot[: stop - start].data, start - shift)
                if slot[:8].view(np.int64)[0] != block:
                    raise OSError(errno.EIO, "what was read is not what was written")

            self._each(part, read)
            return is_direct(file)

    def _each(self, part: range, work: Callable[[int, Array], None]) -> None:
        """Call ``work`` for each block of a part, in as many threads as a save uses."""

        def run(number: int) -> None:
            for block in part[number::NUM_THREADS]:
                work(block, self._image.slot(number))

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(run, range(NUM_THREADS)))
