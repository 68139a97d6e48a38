"""One rank's part of a save: threads copy, hash and write its blocks.

Threads hash and write blocks without Python's global lock, and make no MPI calls. In a
synchronous save, the threads also copy the blocks; but the caller of `start` copies,
one after the other, blocks with values on parameter servers, or with bytes that other
ranks send. In an asynchronous save, the caller copies all blocks before `start`
returns; for values on a GPU, it only starts the copies, and the threads wait for them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np

from hpcstrat.checkpoint.disk import flush, forget_pages, open_to_write
from hpcstrat.checkpoint.file.commit_record import block_hash
from hpcstrat.checkpoint.file.extents import FileLayout
from hpcstrat.checkpoint.file.image import Image, Source, fill, is_elsewhere
from hpcstrat.engine.file_bytes import write_all
from hpcstrat.engine.gpu.transfers import Arrival, Downloads
from hpcstrat.engine.typing import Array
from hpcstrat.errors import UnavailableError

__all__ = ["KINDS_OF_WORK", "NUM_THREADS", "RING_SLOTS", "PartWriter"]

KINDS_OF_WORK = ("copy", "hash", "write", "flush")

NUM_THREADS = 2
_MOST_COPIERS = 4
RING_SLOTS = 4
"""Number of threads, and of places for blocks, if the caller waits for the threads."""


class PartWriter:
    """Writes this rank's blocks to an existing file.

    ``image`` has a place for each block if all blocks are copied ahead, or else
    `RING_SLOTS` places. The last thread calls ``then`` at its end. Writes of blocks
    copied ahead are spread over ``spread_seconds``; `join` ends the delays.
    """

    def __init__(
        self,
        path: str,
        plan: FileLayout,
        blocks: Sequence[int],
        image: Image,
        *,
        direct: bool,
        then: Callable[[PartWriter], None] | None,
        spread_seconds: float = 0.0,
        num_cores: int = 1,
        downloads: Downloads | None = None,
    ) -> None:
        self.path = path
        self.plan = plan
        self.blocks = blocks
        self.hashes: Array = np.zeros(len(blocks), np.uint64)
        self.error: BaseException | None = None
        self.seconds = dict.fromkeys(KINDS_OF_WORK, 0.0)
        # Processor time of the threads.
        self.cpu_seconds = 0.0
        self.done = threading.Event()
        self._image = image
        self._direct = direct
        self._then = then
        self._spread = spread_seconds
        # Use few copying threads: one core uses much of the memory bandwidth.
        self._copiers = min(num_cores, _MOST_COPIERS)
        # Limits the threads that copy and hash, so that one can soon start to write.
        self._cores = threading.Semaphore(num_cores)
        self._hurry = threading.Event()
        self._file = -1
        self._downloads = downloads
        # Copies that a GPU may not have finished, by the index of the block.
        self._arrivals: dict[int, Arrival] = {}
        self._values: Mapping[str, Source] = {}
        self._ahead = False
        # Items: the index of a block, and the place of its copy, or None if the thread
        # must copy the block to a free place. A thread ends when it gets None.
        self._todo: SimpleQueue[tuple[int, int | None] | None] = SimpleQueue()
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(RING_SLOTS):
            self._free.put(slot)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._left = 0
        self._began = 0.0

    def start(
        self,
        values: Mapping[str, Source],
        *,
        ahead: bool,
        rounds: Iterable[Sequence[int]] | None = None,
    ) -> None:
        """Start threads that write all blocks.

        If ``ahead``, all blocks are copied first, and the program may change values
        after the return (values on a GPU: by later work in its current stream).
        Otherwise the program may change values only after `join`. ``rounds`` yields
        blocks that the caller's thread must copy before the next round. All ranks make
        all rounds, even after an error.
        """
        self._ahead, self._values = ahead, values
        asks = any(map(is_elsewhere, values.values()))
        if asks and not ahead:
            rounds = [self.blocks]
        with self._telling():
            if self.blocks:
                self._file = open_to_write(self.path, self._direct)
        try:
            if ahead:
                with self._timed("copy"):
                    self._copy_all(rounds or (), asks)
        finally:
            if ahead:
                # Drop copied values, so that their memory can be freed.
                self._values = {}
            feeds = rounds is not None and not ahead
            wanted = NUM_THREADS if ahead or asks else RING_SLOTS
            if not feeds:
                # Fill the queue first, or an interrupt could leave threads that wait.
                self._enqueue(range(len(self.blocks)), wanted)
            try:
                self._start_threads(wanted)
            except BaseException:
                if feeds:
                    self._enqueue((), wanted)
                raise
        if feeds:
            assert rounds is not None
            self._feed(rounds, wanted)

    def _enqueue(self, indices: Iterable[int], num_threads: int) -> None:
        """Let the threads write these blocks, and then end."""
        for index in indices:
            self._todo.put((index, index if self._ahead else None))
        for _ in range(num_threads):
            self._todo.put(None)

    def _feed(self, rounds: Iterable[Sequence[int]], num_threads: int) -> None:
        """Copy the blocks of all rounds in the caller's thread, each to a free place.

        The threads copy the other blocks."""
        fed = set()
        try:
            for index in self._of_rounds(rounds):
                fed.add(index)
                slot = self._free.get()
                with self._telling():
                    self._copy(self.blocks[index], slot)
                self._todo.put((index, slot))
        finally:
            # These follow the copied blocks, because their copies need free places.
            rest = [index for index in range(len(self.blocks)) if index not in fed]
            self._enqueue(rest, num_threads)

    def _of_rounds(self, rounds: Iterable[Sequence[int]]) -> Iterator[int]:
        """Make all rounds; yield the indices of their blocks, if there is no error."""
        places = {block: index for index, block in enumerate(self.blocks)}
        for blocks in rounds:
            for block in blocks:
                if self.error is None:
                    yield places[block]

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Record an error of this replica; at the end of the save, all replicas raise.

        Raise it here, too, if a server is lost or the exception ends the program.
        """
        try:
            yield
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception) or isinstance(error, UnavailableError):
                raise

    def _copy_all(self, rounds: Iterable[Sequence[int]], asks: bool) -> None:
        def copy(index: int) -> list[tuple[Array, Array]]:
            slot, block = self._image.slot(index), self.blocks[index]
            return fill(slot, self.plan, block, self._values)

        missing = {}
        for index in self._of_rounds(rounds):
            with self._telling():
                missing[index] = copy(index)
        if self.error is None:
            with self._telling():
                rest = [i for i in range(len(self.blocks)) if i not in missing]
                self._copy_rest(copy, rest, asks, missing)

    def _copy_rest(
        self,
        copy: Callable[[int], list[tuple[Array, Array]]],
        indices: Sequence[int],
        asks: bool,
        missing: dict[int, list[tuple[Array, Array]]],
    ) -> None:
        """Copy blocks by several threads, and start all copies from a GPU."""
        with ThreadPoolExecutor(self._copiers, "hpcstrat-copy") as pool:
            try:
                found = list((map if asks else pool.map)(copy, indices))
            except RuntimeError:
                # The system refuses threads, or the program ends: copy in this thread.
                found = list(map(copy, indices))
        missing.update(zip(indices, found, strict=True))
        if self._downloads is not None:
            for index, pairs in sorted(missing.items()):
                if pairs:
                    # While the GPU copies to one place, lock the next place.
                    locked = self._image.lock(index)
                    self._arrivals[index] = self._downloads.fetch(pairs, locked)
            self._downloads.end()

    def _start_threads(self, wanted: int) -> None:
        self._began = time.perf_counter()
        self._left = wanted
        for number in range(wanted):
            thread = threading.Thread(
                target=self._work,
                name=f"hpcstrat-save-{number}",
                daemon=True,
            )
            try:
                thread.start()
                self._threads.append(thread)
            except BaseException as error:
                # If the system refuses a thread, all replicas raise the error later.
                self._fail(error)
                self._leave(wanted - number)
                if not isinstance(error, RuntimeError):
                    raise
                return

    def _work(self) -> None:
        while (item := self._todo.get()) is not None:
            index, copied = item
            slot = self._free.get() if copied is None else copied
            try:
                if self.error is None:
                    self._write(index, self._made(index, slot, copied is None))
            except BaseException as error:
                self._fail(error)
            finally:
                self._free.put(slot)
        with self._lock:
            self.cpu_seconds += time.thread_time()
        self._leave(1)

    def _made(self, index: int, slot: int, copies: bool) -> memoryview:
        """Hash a block in ``slot``; if ``copies``, copy it there before."""
        if self._ahead:
            self._await_turn(index)
            self._await_copy(index)
        with self._cores:
            if copies:
                self._copy(self.blocks[index], slot)
            return self._hashed(index, slot)

    def _await_turn(self, index: int) -> None:
        turn = self._began + self._spread * index / len(self.blocks)
        delay = turn - time.perf_counter()
        if delay > 0:
            self._hurry.wait(delay)

    def _await_copy(self, index: int) -> None:
        arrival = self._arrivals.get(index)
        if arrival is not None:
            with self._timed("copy"):
                arrival.wait()

    def _leave(self, count: int) -> None:
        """Count ``count`` more threads as ended; after the last one, close the file."""
        with self._lock:
            self._left -= count
            last = self._left == 0
        if last:
            self._end()

    def _copy(self, block: int, slot: int) -> None:
        with self._timed("copy"):
            missing = fill(self._image.slot(slot), self.plan, block, self._values)
            if missing:
                assert self._downloads is not None
                self._downloads.fetch(missing, self._image.lock(slot)).wait()

    def _hashed(self, index: int, slot: int) -> memoryview:
        start, stop = self.plan.span(self.blocks[index])
        data = self._image.slot(slot)[: stop - start].data
        with self._timed("hash"):
            self.hashes[index] = block_hash(data)
        return data

    def _write(self, index: int, data: memoryview) -> None:
        with self._timed("write"):
            write_all(self._file, data, self.plan.span(self.blocks[index])[0])

    @contextlib.contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[kind] += time.perf_counter() - begin

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error
        self._hurry.set()

    def _end(self) -> None:
        try:
            if self._file >= 0:
                self._flush()
            if self._downloads is not None and self.error is not None:
                # Wait for the GPU, which may still write to memory of the next save.
                self._downloads.wait()
        except BaseException as error:
            self._fail(error)
        self._values, self._downloads = {}, None
        self._arrivals.clear()
        # Break the reference cycle with the `PendingSave`, so that both are freed soon.
        then, self._then = self._then, None
        self.done.set()
        if then is not None:
            then(self)

    def _flush(self) -> None:
        try:
            with self._timed("flush"):
                if self.error is None:
                    flush(self._file)
                    if not self._direct:
                        first, last = self.blocks[0], self.blocks[-1]
                        start, stop = self.plan.span(first)[0], self.plan.span(last)[1]
                        forget_pages(self._file, start, stop)
        finally:
            os.close(self._file)
            self._file = -1

    def ended(self) -> bool:
        """Return whether all threads have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the threads, without delays of writes; return if all have ended."""
        self._hurry.set()
        for thread in self._threads:
            thread.join(seconds)
        return self.ended()
