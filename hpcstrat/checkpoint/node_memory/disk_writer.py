"""The writing of a snapshot in node memory to the disk, by a process of each node.

Each node writes its blocks; the first node of the order then publishes the checkpoint.
The processes have no MPI: they see each other's files in the watchers' folder.
"""

from __future__ import annotations

import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hpcstrat.checkpoint.disk import (
    closing,
    flush,
    forget_pages,
    open_to_write,
    write_all,
)
from hpcstrat.checkpoint.file.commit_record import block_hash
from hpcstrat.checkpoint.file.skeleton import packed_python
from hpcstrat.checkpoint.file.skeleton_cache import SkeletonCache
from hpcstrat.checkpoint.keep.watcher_contract import watcher
from hpcstrat.checkpoint.node_memory.save_orders import (
    OrderFile,
    SaveOrder,
)
from hpcstrat.checkpoint.node_memory.slot_files import (
    Record,
    SlotMap,
    SnapshotFolder,
)
from hpcstrat.errors import CheckpointError

__all__ = ["execute"]

_NUM_THREADS = 2
_NAP_SECONDS = 0.05
# The ranks of another node may write the record of a snapshot some time later.
_RECORD_SECONDS = 30.0
# A process writes many saves of one program.
_skeletons = SkeletonCache()


class _GivenUpError(Exception):
    """Raised if somebody has given up the save meanwhile."""


def execute(file: OrderFile) -> bool:
    """Write this node's blocks of an order, and publish it on its first node.

    An error gives up the save, and is its cause; returns whether the save succeeded.
    """
    order, node = file.read(), watcher().node
    if order is None or node not in order.nodes:
        return False
    place = order.nodes.index(node)
    try:
        record, seconds = _write_blocks(file, order, place)
        file.note_written(place, seconds)
        if place == 0:
            _publish(file, order, record)
    except _GivenUpError:
        if place == 0:
            order.publication.drop(CheckpointError("the save was given up"))
        return False
    except Exception as error:
        traceback.print_exc()
        file.give_up(f"{type(error).__name__} on {node}: {error}")
        if place == 0:
            order.publication.drop(error)
        return False
    return True


def _require(file: OrderFile) -> None:
    if not file.is_under_way:
        raise _GivenUpError


def _write_blocks(
    file: OrderFile, order: SaveOrder, place: int
) -> tuple[Record, dict[str, float]]:
    """Write the blocks of one node; return the record, and the times."""
    slot, record = _record(file, order)
    _, _, _, _, plan = record.contents()
    folder = SnapshotFolder(order.folder)
    blocks = np.flatnonzero(order.writers == place).tolist()
    if not record.held[blocks].all():
        raise CheckpointError(f"expected all of {len(blocks)} blocks, found some")
    source = SlotMap(folder.data_path(slot), plan, reads=True)
    began, cpu = time.perf_counter(), time.process_time()
    delay = plan.size / order.bandwidth / max(len(blocks), 1)
    path = order.publication.temporary
    with closing(open_to_write(path, order.direct)) as target:

        def write(index: int) -> tuple[float, float]:
            _require(file)
            turn = began + delay * index
            while time.perf_counter() < turn and not file.is_urgent:
                time.sleep(min(turn - time.perf_counter(), _NAP_SECONDS))
                _require(file)
            start = time.perf_counter()
            data = source.block(blocks[index]).data
            if block_hash(data) != int(record.hashes[blocks[index]]):
                raise CheckpointError(
                    f"expected block {blocks[index]} as it was copied, found other "
                    "bytes in node memory"
                )
            hashed = time.perf_counter()
            write_all(target, data, plan.span(blocks[index])[0])
            return hashed - start, time.perf_counter() - hashed

        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            pairs = [*pool.map(write, range(len(blocks)))]
        start = time.perf_counter()
        flush(target)
        flushing = time.perf_counter() - start
        if not order.direct:
            forget_pages(target, plan.data_start, plan.data_end)
    return record, {
        "hash": sum(hashing for hashing, _ in pairs),
        "write": sum(writing for _, writing in pairs),
        "flush": flushing,
        "cpu": time.process_time() - cpu,
    }


def _record(file: OrderFile, order: SaveOrder) -> tuple[int, Record]:
    """Return the slot and record of the snapshot to save, as soon as it is there."""
    folder, until = SnapshotFolder(order.folder), time.monotonic() + _RECORD_SECONDS
    while time.monotonic() < until:
        for slot, record in folder.records().items():
            if record.digest == order.digest:
                return slot, record
        _require(file)
        time.sleep(_NAP_SECONDS)
    raise CheckpointError("expected the snapshot in node memory, found another one")


def _publish(file: OrderFile, order: SaveOrder, record: Record) -> None:
    """Publish the checkpoint when all nodes have written their blocks."""
    publication = order.publication
    _, _, _, header, plan = record.contents()
    publication.header = header
    publication.skeleton = _skeletons.skeleton(header, packed_python(header))
    if publication.skeleton.plan != plan:
        raise CheckpointError("expected the layout of the snapshot, found another one")
    began = publication.created_unix_ns
    publication.created_unix_ns = header.created_unix_ns
    for place in range(1, len(order.nodes)):
        while file.written(place) is None:
            _require(file)
            time.sleep(_NAP_SECONDS)
    if not file.begin_publication():
        raise _GivenUpError
    publication.do(record.hashes)
    if publication.error is not None:
        file.fail_publication(str(publication.error))
        raise publication.error
    total = (time.time_ns() - began) / 1e9
    file.note_written(0, {**(file.written(0) or {}), "total": total})
    file.end()
