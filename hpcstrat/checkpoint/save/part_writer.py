"""One replica's part of a save: threads copy, hash and write its blocks.

Threads hash and write blocks without Python's global lock, and make no MPI calls. In a
synchronous save, the threads also copy the blocks; but if values are on parameter
servers, the caller of `start` copies one block after the other. In an asynchronous
save, the caller copies all blocks before `start` returns; for values on a GPU, it only
starts the copies, and the threads wait for them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np

from hpcstrat.checkpoint.disk import flush, forget_pages, open_to_write, write_all
from hpcstrat.checkpoint.file.commit_record import block_hash
from hpcstrat.checkpoint.file.extents import FileLayout
from hpcstrat.checkpoint.file.image import Image, Source, fill, is_elsewhere
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
    """Writes this replica's blocks to an existing file.

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
        # must copy the block. A thread ends when it gets an item that is None.
        self._todo: SimpleQueue[tuple[int, int | None] | None] = SimpleQueue()
        self._free: SimpleQueue[int] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._left = 0
        self._began = 0.0

    def start(self, values: Mapping[str, Source], *, ahead: bool) -> None:
        """Start threads that write all blocks.

        If ``ahead``, all blocks are copied first, and the program may change values
        after the return (values on a GPU: by later work in its current stream).
        Otherwise the program may change values only after `join`.
        """
        self._ahead = ahead
        asks = any(map(is_elsewhere, values.values()))
        try:
            with self._telling():
                if self.blocks:
                    self._file = open_to_write(self.path, self._direct)
                if ahead:
                    with self._timed("copy"):
                        self._copy_all(values, asks)
        finally:
            # Drop values that are copied already, so that their memory can be freed.
            self._values = {} if ahead else values
            feeds = asks and not ahead and self.error is None
            wanted = NUM_THREADS if ahead or feeds else RING_SLOTS
            if not feeds:
                # Fill the queue first, or an interrupt could leave threads that wait.
                for index in range(len(self.blocks)):
                    self._todo.put((index, index if ahead else None))
                for _ in range(wanted):
                    self._todo.put(None)
            try:
                self._start_threads(wanted)
                if feeds:
                    self._feed()
            finally:
                if feeds:
                    for _ in range(wanted):
                        self._todo.put(None)

    def _feed(self) -> None:
        """Copy all blocks in the caller's thread, each to the next free place."""
        for slot in range(RING_SLOTS):
            self._free.put(slot)
        with self._telling():
            for index, block in enumerate(self.blocks):
                slot = self._free.get()
                if self.error is not None:
                    return
                self._copy(block, slot)
                self._todo.put((index, slot))

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

    def _copy_all(self, values: Mapping[str, Source], asks: bool) -> None:
        def copy(index: int) -> list[tuple[Array, Array]]:
            return fill(self._image.slot(index), self.plan, self.blocks[index], values)

        indices = range(len(self.blocks))
        with ThreadPoolExecutor(self._copiers, "hpcstrat-copy") as pool:
            try:
                missing = list((map if asks else pool.map)(copy, indices))
            except RuntimeError:
                # The system refuses threads, or the program ends: copy in this thread.
                missing = list(map(copy, indices))
        if self._downloads is not None:
            for index, pairs in enumerate(missing):
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
                args=(number,),
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

    def _work(self, number: int) -> None:
        while (item := self._todo.get()) is not None:
            index, slot = item
            try:
                if self.error is None:
                    self._write(index, self._made(index, slot, number))
            except BaseException as error:
                self._fail(error)
            finally:
                if slot is not None:
                    self._free.put(slot)
        self._leave(1)

    def _made(self, index: int, slot: int | None, number: int) -> memoryview:
        """Copy a block (unless ``slot`` has it) and hash it, in thread ``number``."""
        if self._ahead:
            self._await_turn(index)
            self._await_copy(index)
        with self._cores:
            if slot is None:
                slot = number
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
