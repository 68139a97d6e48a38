"""Reading values back: each replica reads and checks a part, and sends it to all.

Nothing changes before all parts have been checked. A replica keeps what it has read, up
to a limit; what is beyond is read again when its turn comes.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np

from hpcstrat.checkpoint.disk import (
    NO_DESCRIPTORS,
    PASSING,
    goes_direct,
    require_descriptors,
)
from hpcstrat.checkpoint.file.blocks import Blocks
from hpcstrat.checkpoint.file.extents import Extent
from hpcstrat.checkpoint.file.image import Image, ImageMemory
from hpcstrat.checkpoint.file.reader import CheckpointFile, read_values
from hpcstrat.checkpoint.file.schema import named_dtype
from hpcstrat.checkpoint.restore.block_sharing import BlockDeal, Shared
from hpcstrat.checkpoint.restore.entry_matching import Match
from hpcstrat.checkpoint.restore.sinks import Sink, live_bytes, value_of
from hpcstrat.checkpoint.save.part_writer import NUM_THREADS
from hpcstrat.engine.gpu.transfers import Uploads
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.errors import CheckpointError, CorruptCheckpointError

__all__ = ["restore_values"]

# A replica reads so many bytes once only, and the rest twice.
_KEPT_BYTES = 1 << 30
# The same where values go elsewhere, whose memory may be all that they fit into.
_KEPT_ON_THE_WAY_BYTES = 64 << 20


def restore_values(
    file: CheckpointFile,
    matches: Sequence[Match],
    strategy: Replicas,
    memory: ImageMemory,
) -> tuple[int, float]:
    """Give all variables their values; return what this replica has read, and how long.

    Collective over the strategy's replicas, with the matches in the same order on each.
    Returned are bytes, and the seconds until what was read first had been checked. On
    every rank CorruptCheckpointError, if any part cannot be read or is damaged, or
    CheckpointError, if there is no memory or a part cannot be read now: nothing has
    changed then.
    """
    if file.vouched is None:
        return _restore_unchecked(file, matches, strategy)
    parallel = _ParallelRead(file, matches, strategy, memory)
    error: Exception | None = None
    began = time.perf_counter()
    try:
        try:
            parallel.read()
        except CorruptCheckpointError as problem:
            error = problem
        except Exception as problem:
            error = _unreadable(file.path, problem)
        seconds = time.perf_counter() - began
        _raise_together(strategy, error, file.path)
        return parallel.give_out(), seconds
    finally:
        parallel.close()


def _unreadable(path: str, problem: Exception) -> CheckpointError:
    """Return what is raised for a problem that may be the file's, or this process's."""
    found = f"expected {path} to be readable, found {type(problem).__name__}: {problem}"
    if isinstance(problem, OSError) and problem.errno not in PASSING:
        return CorruptCheckpointError(f"{found}; restore an older checkpoint")
    advice = "free memory"
    if isinstance(problem, OSError) and problem.errno in NO_DESCRIPTORS:
        advice = "close files, or raise their number (ulimit -n)"
    return CheckpointError(f"{found}; it may be whole: {advice}, and try again")


def _raise_together(strategy: Replicas, error: Exception | None, path: str) -> None:
    # As class and text: not every error can be pickled, nor needs its traceback.
    mine = error and (type(error), str(error))
    found = strategy.collectives.all_gather_object(mine, f"verdict on {path}")
    bad = sorted(filter(None, found), key=lambda each: each[0] is CheckpointError)
    if bad:
        # A file that is damaged for one is damaged for all.
        kind, text = bad[0]
        raise kind(text)


def _restore_unchecked(
    file: CheckpointFile, matches: Sequence[Match], strategy: Replicas
) -> tuple[int, float]:
    """Read a file of format version 1: every replica all of it."""
    wanted = {m.entry.path: named_dtype(m.entry.dtype) for m in matches}
    values: dict[str, Array] = {}
    error: Exception | None = None
    began = time.perf_counter()
    try:
        values = read_values(file.path, wanted)
    except CorruptCheckpointError as problem:
        error = problem
    except Exception as problem:
        error = _unreadable(file.path, problem)
    seconds = time.perf_counter() - began
    _raise_together(strategy, error, file.path)
    for match in matches:
        match.assign(values[match.entry.path], strategy)
    return sum(value.nbytes for value in values.values()), seconds


class _ParallelRead:
    """One restore: which blocks this replica reads, and what it makes of all."""

    def __init__(
        self,
        file: CheckpointFile,
        matches: Sequence[Match],
        strategy: Replicas,
        memory: ImageMemory,
    ) -> None:
        assert file.vouched is not None
        self._file, self._strategy, self._memory = file, strategy, memory
        self._vouched = file.vouched
        self._plan = file.vouched.plan
        self._sinks: list[Sink] = []
        self._empty: list[Match] = []
        self._rows: list[tuple[Match, Extent]] = []
        self._row_values: list[tuple[Match, Array]] = []
        for match in matches:
            self._sort(match)
        # In the order of the file, so that a block finds its values by bisection.
        self._sinks.sort(key=lambda sink: sink.extent.offset)
        self._starts = [sink.extent.offset for sink in self._sinks]
        self._stops = [sink.extent.stop for sink in self._sinks]
        needed = {
            block
            for sink in self._sinks
            for block in self._plan.blocks_of(sink.extent.offset, sink.extent.stop)
        }
        passes = any(sink.elsewhere is not None for sink in self._sinks)
        kept_bytes = _KEPT_ON_THE_WAY_BYTES if passes else _KEPT_BYTES
        most_kept = max(1, kept_bytes // self._plan.block_bytes)
        # A restore of some objects does not read the blocks of others.
        self._deal = BlockDeal(sorted(needed), most_kept, strategy)
        self._own = self._deal.own
        self._kept: dict[int, Array] = {}
        self._image: Image | None = None
        self._blocks: Blocks | None = None
        self._uploads: Uploads | None = None
        self._threads: list[threading.Thread] = []
        self._nbytes = 0

    def _sort(self, match: Match) -> None:
        """Find out how a value comes: to all, this replica's row alone, or not."""
        extent = self._file.extents.get(match.entry.path)
        if extent is None:
            self._empty.append(match)
        elif (
            match.takes_one_row(self._strategy)
            and match.variable is not None
            and extent.nbytes > self._plan.block_bytes
        ):
            # Too much for all: each replica reads its own row.
            [row] = match.rows(self._strategy)
            if row is not None:
                each = extent.nbytes // match.entry.shape[0]
                place = extent.offset + row * each
                self._rows.append((match, Extent(extent.path, place, each)))
        else:
            self._sinks.append(Sink(match, extent, live_bytes(match)))

    def read(self) -> None:
        """Read and check this replica's part; nothing changes, nobody is waited for."""
        # Kept blocks are not read again; each thread needs a place more, and one is for
        # blocks that are read again.
        num_kept = min(len(self._own), self._deal.most_kept)
        slots = num_kept + NUM_THREADS + 1
        self._image = self._memory.image(slots, self._plan.block_bytes)
        direct = goes_direct(self._strategy.settings.direct_io, self._file.path)
        self._blocks = Blocks(self._file.path, self._vouched, direct)
        todo: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        for index, block in enumerate(self._own):
            todo.put((block, index if index < num_kept else -1))
        errors: list[BaseException] = []
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(todo, num_kept + k, errors),
                name=f"hpcstrat-restore-{k}",
                # Not waited for at the end of a program that is interrupted in a read.
                daemon=True,
            )
            for k in range(min(NUM_THREADS, len(self._own)))
        ]
        try:
            for thread in self._threads:
                todo.put(None)
                thread.start()
            for thread in self._threads:
                thread.join()
        except BaseException as interrupt:
            errors.append(interrupt)
            raise
        if errors:
            raise errors[0]
        spans = (self._plan.span(block) for block in self._own)
        self._nbytes += sum(stop - start for start, stop in spans)
        for match, extent in self._rows:
            self._row_values.append((match, self._row(match, extent)))
        if self._deal.size > 1:
            # For the memory that a worker shares: MPI ends the process without one.
            require_descriptors()
        if any(sink.on_device for sink in self._sinks):
            # Memory runs out here, if it does.
            self._uploads = Uploads()

    def _work(
        self,
        todo: SimpleQueue[tuple[int, int] | None],
        scratch: int,
        errors: list[BaseException],
    ) -> None:
        assert self._image is not None
        assert self._blocks is not None
        while (item := todo.get()) is not None:
            block, index = item
            if errors:
                # The queue is emptied, so that every thread finds its end.
                continue
            slot = self._image.slot(scratch if index < 0 else index)
            try:
                data = self._blocks.read(block, slot)
            except BaseException as error:
                # Raised by the main thread, which alone can tell the other replicas.
                errors.append(error)
                continue
            if index >= 0:
                self._kept[block] = data

    def _row(self, match: Match, extent: Extent) -> Array:
        """Read this replica's row of a value, block by block."""
        assert self._image is not None
        assert self._blocks is not None
        found = np.empty(extent.nbytes, np.uint8)
        slot = self._image.slot(self._image.num_slots - 1)
        for block in self._plan.blocks_of(extent.offset, extent.stop):
            data = self._blocks.read(block, slot)
            self._nbytes += data.size
            begin, end = self._plan.span(block)
            low, high = max(begin, extent.offset), min(end, extent.stop)
            place = slice(low - extent.offset, high - extent.offset)
            found[place] = data[low - begin : high - begin]
        return value_of(match, found, rows=True)

    def give_out(self) -> int:
        """Show every block to all, and put what is in it where it goes.

        Collective over the strategy's replicas.
        """
        what = f"values of {self._file.path}"
        # From here on variables change: all replicas have read and checked their part.
        self._strategy.collectives.barrier(what)
        shared: Shared | None = None
        try:
            for group in self._deal.rounds():
                self._read_again(group)
                parts = [self._trimmed(block) for block, _ in group]
                if self._deal.size == 1:
                    block = group[0][0]
                    self._put(parts[0], self._kept[block], self._plan.span(block)[0])
                    continue
                with self._strategy.collectives.moving(what):
                    if shared is None:
                        shared = Shared(self._strategy.collectives.channel)
                    self._share(shared, group, parts)
        except BaseException:
            if shared is not None:
                shared.release()
            raise
        finally:
            if self._uploads is not None:
                self._uploads.end()
        if shared is not None:
            shared.close()
        # After the last exchange, so that nothing is between these and the end.
        for match, row in self._row_values:
            match.assign_row(row, self._strategy)
        for match in self._empty:
            match.assign(value_of(match, None), self._strategy)
        return self._nbytes

    def _share(
        self, shared: Shared, group: list[tuple[int, int]], parts: list[range]
    ) -> None:
        """Pass a block of each column through the memory that a worker shares."""
        # All take as many rounds as the longest part, since each is a call of all.
        longest = max(map(len, parts))
        for done in range(0, longest, shared.piece_bytes):
            pieces = [part[done : done + shared.piece_bytes] for part in parts]
            own = None
            column = self._deal.column
            if column < len(group) and self._deal.owns(group[column][1]):
                block, piece = group[column][0], pieces[column]
                begin = self._plan.span(block)[0]
                own = self._kept[block][piece.start - begin : piece.stop - begin]
            workers = [self._deal.worker_of(owner) for _, owner in group]
            for piece, data in zip(
                pieces, shared.exchange(own, pieces, workers), strict=True
            ):
                self._put(piece, data, piece.start)

    def _trimmed(self, block: int) -> range:
        """Return the bytes of a block that are wanted, by their place in the file."""
        start, stop = self._plan.span(block)
        first, last = self._sinks_in(start, stop)
        low = max(start, self._starts[first])
        return range(low, min(stop, self._stops[last - 1]))

    def _sinks_in(self, start: int, stop: int) -> tuple[int, int]:
        first = bisect.bisect_right(self._stops, start)
        return first, bisect.bisect_left(self._starts, stop)

    def _put(self, piece: range, data: Array, start: int) -> None:
        """Put bytes of the file, of which the first is at ``start``, into variables."""
        first, last = self._sinks_in(piece.start, piece.stop)
        for sink in self._sinks[first:last] if len(piece) else ():
            low = max(piece.start, sink.extent.offset)
            high = min(piece.stop, sink.extent.stop)
            found = data[low - start : high - start]
            sink.put(low, found, self._strategy, self._uploads)

    def _read_again(self, group: list[tuple[int, int]]) -> None:
        """Read again, on all replicas, blocks that were checked but not kept."""
        again = [(b, owner) for b, owner in group if b not in self._deal.kept(owner)]
        if not again:
            return
        error: Exception | None = None
        for block, owner in again:
            if self._deal.owns(owner):
                assert self._image is not None
                assert self._blocks is not None
                try:
                    slot = self._image.slot(self._image.num_slots - 1)
                    self._kept[block] = self._blocks.read(block, slot)
                except Exception as problem:
                    error = CorruptCheckpointError(
                        f"{problem} (variables hold values of two moments now)"
                    )
        _raise_together(self._strategy, error, self._file.path)

    def close(self) -> None:
        """Give back the file, and lend the memory."""
        self._kept.clear()
        self._image = None
        if any(thread.is_alive() for thread in self._threads):
            # Interrupted: they still read into it.
            self._memory.leave()
        else:
            self._memory.lend()
        if self._blocks is not None:
            self._blocks.close()
