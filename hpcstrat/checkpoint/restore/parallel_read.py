"""Parallel restore: each replica reads a part of the file, and sends it to the others.

No variable changes before all replicas have checked the hashes of their parts. While
checking, a replica keeps the blocks that it reads, up to a limit. It reads its other
blocks again when it sends them.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from hpcstrat.checkpoint.disk import (
    NO_DESCRIPTORS,
    PASSING,
    goes_direct,
    require_descriptors,
)
from hpcstrat.checkpoint.file.commit_record import Blocks
from hpcstrat.checkpoint.file.extents import Extent, part_of
from hpcstrat.checkpoint.file.image import Image, ImageMemory
from hpcstrat.checkpoint.file.reader import CheckpointFile, read_values
from hpcstrat.checkpoint.file.schema import named_dtype
from hpcstrat.checkpoint.node_memory.held_blocks import (
    BlockBroadcasts,
    HeldDeal,
    HeldSnapshot,
)
from hpcstrat.checkpoint.restore.entry_matching import Match, Sink, live_bytes, value_of
from hpcstrat.checkpoint.save.part_writer import NUM_THREADS
from hpcstrat.engine.gpu.transfers import Uploads
from hpcstrat.engine.topology.segment import Segment
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.errors import CheckpointError, CorruptCheckpointError

__all__ = ["BlockDeal", "Shared", "restore_values"]

_PIECE_BYTES = 8 << 20


class BlockDeal:
    """The division of blocks: which replica reads (owns) which blocks of the file.

    The division is the same on every replica. A column consists of the replicas with
    the same position in their workers; within a column, blocks are sent between
    workers. ``column`` is this replica's position, and ``own`` has its blocks.
    ``columns`` is the number of replicas of the smallest worker; replicas with a higher
    position read nothing. A replica keeps up to ``most_kept`` blocks. Owners are
    numbered by column, then by worker.
    """

    def __init__(self, blocks: list[int], most_kept: int, ranks: Replicas) -> None:
        self._blocks = blocks
        self.most_kept = most_kept
        self.size = ranks.num_ranks
        self.column, self.columns, self._worker, self._workers = 0, 1, 0, 1
        if self.size > 1:
            topology = ranks.topology
            self.column = topology.worker_comm.rank
            # Each column needs a replica on each worker.
            self.columns = topology.smallest_worker
            self._worker, self._workers = topology.worker_id, topology.num_workers
        self._owner = self.column * self._workers + self._worker
        mine = self._part(self._owner) if self.column < self.columns else ()
        self.own = [blocks[index] for index in mine]

    def _part(self, owner: int) -> range:
        return part_of(len(self._blocks), owner, self.columns * self._workers)

    def owns(self, owner: int) -> bool:
        """Return whether this replica reads blocks, and has the number ``owner``."""
        return owner == self._owner and self.column < self.columns

    def is_here(self, owner: int) -> bool:
        """Return whether every replica has read the blocks of an owner itself."""
        del owner
        return self.size == 1

    def worker_of(self, owner: int) -> int:
        return owner % self._workers

    def kept(self, owner: int) -> set[int]:
        """Return the blocks that an owner keeps in memory until it sends them."""
        indices = self._part(owner)[: self.most_kept]
        return {self._blocks[index] for index in indices}

    def rounds(self) -> Iterator[list[tuple[int, int]]]:
        """Yield, for each round, one pair (block, owner) for each column."""
        columns = [
            [
                (self._blocks[index], owner)
                for owner in range(first, first + self._workers)
                for index in self._part(owner)
            ]
            for first in range(0, self.columns * self._workers, self._workers)
        ]
        # The first column has the most blocks: `part_of` favors the first owners.
        for turn in range(len(columns[0])):
            yield [column[turn] for column in columns if turn < len(column)]


class Shared:
    """Memory shared by the replicas of a worker, through which blocks are sent.

    Collective over the channel's replicas, inside of its ``moving``. A block is sent in
    pieces of at most ``piece_bytes``.
    """

    def __init__(self, channel: Any) -> None:
        topology = channel.topology
        self._worker = channel.interruptible(topology.worker_comm)
        self._across = channel.interruptible(topology.cross_worker_comm)
        self._several = topology.num_workers > 1
        self._segment = Segment(self._worker, 0, 2 * _PIECE_BYTES)
        # All replicas use the size of pieces that fits the least shared memory.
        comm = channel.interruptible(topology.replica_comm)
        self.piece_bytes: int = min(comm.allgather(self._segment.part_bytes // 2))
        self._half = 0

    def _place(self, column: int, nbytes: int) -> Array:
        segment = self._segment
        start = segment.common_bytes + column * segment.part_bytes
        start += self._half * self.piece_bytes
        return np.frombuffer(segment.buffer, np.uint8, nbytes, start)

    def exchange(
        self, own: Array | None, pieces: Sequence[range], workers: Sequence[int]
    ) -> list[Array]:
        """Send a piece of a block from each column to all replicas; return the pieces.

        Collective over the channel's replicas. For each column, ``pieces`` has the
        range of bytes of its piece, and ``workers`` the worker that sends it. ``own``
        has the bytes of the piece if this replica is the sender, or is None. The
        returned views are valid until the second call after this call.
        """
        column = self._worker.rank
        # Alternate between two halves of the memory, because some replicas may still
        # copy from the half of the last call. A replica has finished this copy when it
        # reaches the barrier below.
        self._half = 1 - self._half
        if column < len(pieces) and len(pieces[column]):
            mine = self._place(column, len(pieces[column]))
            if own is not None:
                mine[:] = own
            if self._several:
                self._across.Bcast(mine, root=workers[column])
        self._worker.Barrier()
        return [self._place(k, len(piece)) for k, piece in enumerate(pieces)]

    def close(self) -> None:
        """Free the memory. Collective over the replicas of each worker."""
        self._segment.close()

    def release(self) -> None:
        """Free the memory without a collective call, after an error."""
        self._segment.release()


# A replica keeps blocks of up to this total size, and reads its other blocks twice.
_KEPT_BYTES = 1 << 30
# The limit if values are for parameter servers, or if the ranks of a replica divide
# them: they may not fit in this rank's memory.
_KEPT_ON_THE_WAY_BYTES = 64 << 20


def restore_values(
    file: CheckpointFile,
    matches: Sequence[Match],
    strategy: Replicas,
    memory: ImageMemory,
    held: HeldSnapshot | None = None,
) -> tuple[int, float]:
    """Restore the values of all variables; return the bytes read and the seconds.

    Collective over the strategy's replicas; ``matches`` have the same order on each.
    ``held`` is the snapshot in node memory if ``file`` is that of a snapshot.
    Raises on every rank, before any variable changes: CorruptCheckpointError if a part
    is damaged, CheckpointError if memory is short or a part cannot be read now.
    """
    if file.vouched is None:
        return _restore_unchecked(file, matches, strategy)
    parallel = _ParallelRead(file, matches, strategy, memory, held)
    try:
        seconds = _read_together(strategy.all_ranks, parallel.name, parallel.read)
        return parallel.give_out(), seconds
    finally:
        parallel.close()


def _read_together(ranks: Replicas, path: str, read: Callable[[], None]) -> float:
    """Call ``read`` on all ranks; return its seconds on this rank.

    Collective over ``ranks``. If it fails on one, every rank raises.
    """
    error: Exception | None = None
    began = time.perf_counter()
    try:
        read()
    except CorruptCheckpointError as problem:
        error = problem
    except Exception as problem:
        error = _unreadable(path, problem)
    seconds = time.perf_counter() - began
    _raise_together(ranks, error, path)
    return seconds


def _unreadable(path: str, problem: Exception) -> CheckpointError:
    """Return the error to raise for an exception in reading a file."""
    found = f"expected {path} to be readable, found {type(problem).__name__}: {problem}"
    if isinstance(problem, OSError) and problem.errno not in PASSING:
        return CorruptCheckpointError(f"{found}; restore an older checkpoint")
    advice = "free memory"
    if isinstance(problem, OSError) and problem.errno in NO_DESCRIPTORS:
        advice = "close files, or raise their number (ulimit -n)"
    return CheckpointError(f"{found}; the file may be intact: {advice}, and try again")


def _raise_together(ranks: Replicas, error: Exception | None, path: str) -> None:
    # Send an error as its class and text, because some errors cannot be pickled.
    mine = error and (type(error), str(error))
    found = ranks.collectives.all_gather_object(mine, f"verdict on {path}")
    bad = sorted(filter(None, found), key=lambda each: each[0] is CheckpointError)
    if bad:
        # All replicas raise the same error. Prefer the error of a damaged file.
        kind, text = bad[0]
        raise kind(text)


def _restore_unchecked(
    file: CheckpointFile, matches: Sequence[Match], strategy: Replicas
) -> tuple[int, float]:
    """Restore values from a file of format version 1; every replica reads it all."""
    wanted = {m.entry.path: named_dtype(m.entry.dtype) for m in matches}
    values: dict[str, Array] = {}
    seconds = _read_together(
        strategy.all_ranks,
        file.path,
        lambda: values.update(read_values(file.path, wanted)),
    )
    for match in matches:
        match.assign_whole(values[match.entry.path], strategy)
    return sum(value.nbytes for value in values.values()), seconds


class _ParallelRead:
    """One restore on this replica: `read` its part of the file, then `give_out`."""

    def __init__(
        self,
        file: CheckpointFile,
        matches: Sequence[Match],
        strategy: Replicas,
        memory: ImageMemory,
        held: HeldSnapshot | None,
    ) -> None:
        assert file.vouched is not None
        self._file, self._strategy, self._memory = file, strategy, memory
        self._held = held
        # The same on all ranks, other than the path of a snapshot.
        self.name = file.path if held is None else held.name
        self._ranks = strategy.all_ranks
        self._vouched = file.vouched
        self._plan = file.vouched.plan
        self._sinks: list[Sink] = []
        self._empty: list[Match] = []
        self._rows: list[tuple[Match, Extent]] = []
        self._row_values: list[tuple[Match, Array]] = []
        for match in matches:
            self._sort(match)
        # Sort by offset, so that bisection finds the values in a block.
        self._sinks.sort(key=lambda sink: sink.extent.offset)
        self._starts = [sink.extent.offset for sink in self._sinks]
        self._stops = [sink.extent.stop for sink in self._sinks]
        needed = {
            block
            for sink in self._sinks
            for block in self._plan.blocks_of(sink.extent.offset, sink.extent.stop)
        }
        passes = any(s.elsewhere is not None or s.is_divided for s in self._sinks)
        kept_bytes = _KEPT_ON_THE_WAY_BYTES if passes else _KEPT_BYTES
        most_kept = max(1, kept_bytes // self._plan.block_bytes)
        self._deal: BlockDeal | HeldDeal
        if held is None:
            self._deal = BlockDeal(sorted(needed), most_kept, self._ranks)
        else:
            self._deal = HeldDeal(sorted(needed), held.owners, self._ranks)
        self._own: Sequence[int] = self._deal.own
        self._kept: dict[int, Array] = {}
        # `read` sets the following attributes.
        self._image: Image
        self._blocks: Blocks
        self._open = contextlib.ExitStack()
        self._uploads: Uploads | None = None
        self._threads: list[threading.Thread] = []
        self._nbytes = 0

    def _sort(self, match: Match) -> None:
        """Add a match to the empty values, the own rows, or the exchanged values."""
        extent = self._file.extents.get(match.entry.path)
        if extent is None:
            self._empty.append(match)
        elif (
            self._held is None
            and match.takes_one_row(self._strategy)
            and match.variable is not None
            and extent.nbytes > self._plan.block_bytes
        ):
            # The rows together are larger than a block, which is too much to exchange:
            # each replica reads only its own row.
            [row] = match.rows(self._strategy)
            if row is not None:
                each = extent.nbytes // match.entry.shape[0]
                place = extent.offset + row * each
                self._rows.append((match, Extent(extent.path, place, each)))
        else:
            self._sinks.append(Sink(match, extent, live_bytes(match)))

    def read(self) -> None:
        """Read and check this replica's part; make no MPI call, change no variable."""
        # Slots: one for each kept block, one for each thread, one for `_read_again`.
        num_kept = min(len(self._own), self._deal.most_kept)
        slots = num_kept + NUM_THREADS + 1
        self._image = self._memory.image(slots, self._plan.block_bytes)
        direct = goes_direct(self._strategy.settings.direct_io, self._file.path)
        # A node that was not there at a snapshot has no file of it.
        if self._held is None or any(map(self._deal.owns, self._held.owners.tolist())):
            self._blocks = self._open.enter_context(
                Blocks(self._file.path, self._vouched, direct)
            )
        todo: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        for index, block in enumerate(self._own):
            todo.put((block, index if index < num_kept else -1))
        errors: list[BaseException] = []
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(todo, num_kept + k, errors),
                name=f"hpcstrat-restore-{k}",
                # After an interrupt, the program does not wait for daemon threads.
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
            # Without free descriptors for shared memory, MPI would abort the process.
            require_descriptors()
        if any(sink.on_device for sink in self._sinks):
            # If memory is short, raise now, before any variable changes.
            self._uploads = Uploads()

    def _work(
        self,
        todo: SimpleQueue[tuple[int, int] | None],
        scratch: int,
        errors: list[BaseException],
    ) -> None:
        while (item := todo.get()) is not None:
            block, index = item
            if errors:
                # Another thread has failed: empty the queue up to this thread's None.
                continue
            slot = self._image.slot(scratch if index < 0 else index)
            try:
                data = self._blocks.read(block, slot)
            except BaseException as error:
                # The main thread raises the error, because only it can make MPI calls.
                errors.append(error)
                continue
            if index >= 0:
                self._kept[block] = data

    def _row(self, match: Match, extent: Extent) -> Array:
        found = np.empty(extent.nbytes, np.uint8)
        slot = self._image.slot(self._image.num_slots - 1)
        for block in self._plan.blocks_of(extent.offset, extent.stop):
            data = self._blocks.read(block, slot)
            self._nbytes += data.size
            begin, end = self._plan.span(block)
            low, high = max(begin, extent.offset), min(end, extent.stop)
            place = slice(low - extent.offset, high - extent.offset)
            found[place] = data[low - begin : high - begin]
        return value_of(match, found, match.entry.shape[1:])

    def give_out(self) -> int:
        """Send all blocks to all replicas, and copy the values to the variables.

        Collective over the strategy's replicas. Returns the bytes that this one read.
        """
        what = f"values of {self.name}"
        # All replicas have checked their parts: from here on, variables change.
        self._ranks.collectives.barrier(what)
        shared: Shared | BlockBroadcasts | None = None
        kind = Shared if self._held is None else BlockBroadcasts
        try:
            for group in self._deal.rounds():
                self._read_again(group)
                parts = [self._trimmed(block) for block, _ in group]
                block, owner = group[0]
                if self._deal.is_here(owner):
                    self._put(parts[0], self._kept[block], self._plan.span(block)[0])
                    continue
                with self._ranks.collectives.moving(what):
                    if shared is None:
                        shared = kind(self._ranks.collectives.channel)
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
        # Assign rows after the last exchange, when no collective can fail any more.
        for match, row in self._row_values:
            match.assign_row(row, self._strategy)
        for match in self._empty:
            match.assign_whole(value_of(match, None), self._strategy)
        return self._nbytes

    def _share(
        self,
        shared: Shared | BlockBroadcasts,
        group: list[tuple[int, int]],
        parts: list[range],
    ) -> None:
        # All replicas make as many exchanges as the longest part needs.
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
        """Return the offsets of a block from its first to its last wanted byte."""
        start, stop = self._plan.span(block)
        first, last = self._sinks_in(start, stop)
        low = max(start, self._starts[first])
        return range(low, min(stop, self._stops[last - 1]))

    def _sinks_in(self, start: int, stop: int) -> tuple[int, int]:
        first = bisect.bisect_right(self._stops, start)
        return first, bisect.bisect_left(self._starts, stop)

    def _put(self, piece: range, data: Array, start: int) -> None:
        """Copy ``piece`` of the file to variables; ``data`` begins at ``start``."""
        first, last = self._sinks_in(piece.start, piece.stop)
        for sink in self._sinks[first:last] if len(piece) else ():
            low = max(piece.start, sink.extent.offset)
            high = min(piece.stop, sink.extent.stop)
            found = data[low - start : high - start]
            sink.put(low, found, self._strategy, self._uploads)

    def _read_again(self, group: list[tuple[int, int]]) -> None:
        """Read again the blocks of a round that were not kept; collective."""
        again = [(b, owner) for b, owner in group if b not in self._deal.kept(owner)]
        if not again:
            return
        error: Exception | None = None
        for block, owner in again:
            if self._deal.owns(owner):
                try:
                    slot = self._image.slot(self._image.num_slots - 1)
                    self._kept[block] = self._blocks.read(block, slot)
                except Exception as problem:
                    error = CorruptCheckpointError(
                        f"{problem} (some variables already have restored values, "
                        "others still have their old values)"
                    )
        _raise_together(self._ranks, error, self.name)

    def close(self) -> None:
        self._kept.clear()
        if any(thread.is_alive() for thread in self._threads):
            # After an interrupt, threads may still read into this memory.
            self._memory.leave()
        else:
            self._memory.lend()
        self._open.close()
