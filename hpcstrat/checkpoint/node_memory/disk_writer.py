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
)
from hpcstrat.checkpoint.file.commit_record import block_hash
from hpcstrat.checkpoint.file.skeleton import packed_python
from hpcstrat.checkpoint.file.skeleton_cache import SkeletonCache
from hpcstrat.checkpoint.keep.watcher_contract import watcher
from hpcstrat.checkpoint.node_memory.save_orders import (
    GivenUpError,
    OrderFile,
    SaveOrder,
)
from hpcstrat.checkpoint.node_memory.slot_files import (
    Record,
    SlotMap,
    SnapshotFolder,
)
from hpcstrat.checkpoint.node_memory.spare_copy import receive_copy, send_copy
from hpcstrat.checkpoint.save.pending_save import Publication
from hpcstrat.engine.file_bytes import write_all
from hpcstrat.errors import CheckpointError

__all__ = ["execute"]

_NUM_THREADS = 2
_NAP_SECONDS = 0.05
# The ranks of another node may write the record of a snapshot some time later.
_RECORD_SECONDS = 30.0
# A process writes many saves of one program.
_skeletons = SkeletonCache()


def execute(file: OrderFile) -> bool:
    """Write this node's blocks of an order, and publish it on its first node.

    An error gives up the save, and is its cause; returns whether the save succeeded.
    """
    order, node = file.read(), watcher().node
    if order is None or node not in (*order.nodes, order.spare):
        return False
    try:
        if node == order.spare:
            receive_copy(file, order)
        elif order.publication is None:
            send_copy(file, order, _source(file, order))
        else:
            _save(file, order, order.publication, order.nodes.index(node))
    except GivenUpError:
        return False
    except Exception as error:
        if not file.is_under_way:
            # Another node has given it up, and closes its connections.
            return False
        traceback.print_exc()
        file.give_up(f"{type(error).__name__} on {node}: {error}")
        return False
    return True


def _save(
    file: OrderFile, order: SaveOrder, publication: Publication, place: int
) -> None:
    """Write the blocks of one node, and publish the checkpoint on the first node."""
    try:
        source, record = _source(file, order)
        seconds = _write_blocks(file, order, publication.temporary, source, record)
        file.note_written(place, seconds)
        if place == 0:
            _publish(file, order, publication, record)
    except BaseException as error:
        if place == 0:
            publication.drop(error)
        raise


def _write_blocks(
    file: OrderFile, order: SaveOrder, path: str, source: SlotMap, record: Record
) -> dict[str, float]:
    """Write the blocks of this node to the file at ``path``, and return the times."""
    plan = source.plan
    place = order.nodes.index(watcher().node)
    blocks = np.flatnonzero(order.writers == place).tolist()
    began, cpu = time.perf_counter(), time.process_time()
    delay = plan.size / order.bandwidth / max(len(blocks), 1)
    with closing(open_to_write(path, order.direct)) as target:

        def write(index: int) -> tuple[float, float]:
            file.require()
            turn = began + delay * index
            while (wait := turn - time.perf_counter()) > 0 and not file.is_urgent:
                time.sleep(min(wait, _NAP_SECONDS))
                file.require()
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
    return {
        "hash": sum(hashing for hashing, _ in pairs),
        "write": sum(writing for _, writing in pairs),
        "flush": flushing,
        "cpu": time.process_time() - cpu,
    }


def _source(file: OrderFile, order: SaveOrder) -> tuple[SlotMap, Record]:
    """Return data and record of the snapshot of an order, as soon as it is there."""
    folder, until = SnapshotFolder(order.folder), time.monotonic() + _RECORD_SECONDS
    place = order.nodes.index(watcher().node)
    while time.monotonic() < until:
        for slot, record in folder.records().items():
            if record.digest == order.digest:
                if not record.held[order.writers == place].all():
                    raise CheckpointError(
                        "expected all blocks of this node, found some"
                    )
                _, _, _, _, plan = record.contents()
                return SlotMap(folder.data_path(slot), plan, reads=True), record
        file.require()
        time.sleep(_NAP_SECONDS)
    raise CheckpointError("expected the snapshot in node memory, found another one")


def _publish(
    file: OrderFile, order: SaveOrder, publication: Publication, record: Record
) -> None:
    """Publish the checkpoint when all nodes have written their blocks."""
    _, _, _, header, plan = record.contents()
    publication.header = header
    publication.skeleton = _skeletons.skeleton(header, packed_python(header))
    if publication.skeleton.plan != plan:
        raise CheckpointError("expected the layout of the snapshot, found another one")
    began = publication.created_unix_ns
    publication.created_unix_ns = header.created_unix_ns
    for place in range(1, len(order.nodes)):
        while file.written(place) is None:
            file.require()
            time.sleep(_NAP_SECONDS)
    if not file.begin_publication():
        raise GivenUpError
    publication.do(record.hashes)
    if publication.error is not None:
        traceback.print_exception(publication.error)
        file.fail_publication(str(publication.error))
        raise publication.error
    total = (time.time_ns() - began) / 1e9
    file.note_written(0, {**(file.written(0) or {}), "total": total})
    file.end()
