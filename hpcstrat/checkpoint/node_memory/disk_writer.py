"""The writing of a snapshot in node memory to the disk, by a process of each node.

Each node writes its blocks; the first node of the order then publishes the checkpoint.
The processes have no MPI: they see each other's files in the watchers' folder.
"""

from __future__ import annotations

import time
import traceback
from concurrent.futures import ThreadPoolExecutor

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
from hpcstrat.checkpoint.node_memory.save_orders import GivenUpError, OrderFile
from hpcstrat.checkpoint.node_memory.slot_files import SlotMap, SnapshotFolder
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


def execute(file: OrderFile) -> None:
    """Do this node's part of an order; an error gives it up, and is its cause."""
    order, node = file.order, watcher().node
    if node not in (*order.nodes, order.spare):
        return
    try:
        if node == order.spare:
            receive_copy(file)
        elif order.publication is None:
            send_copy(file, _source(file))
        else:
            _save(file, order.publication, leads=node == order.nodes[0])
    except GivenUpError:
        return
    except Exception as error:
        # If another node has given it up, that node has closed its connections.
        if file.is_under_way:
            traceback.print_exc()
            file.give_up(f"{type(error).__name__} on {node}: {error}")


def _save(file: OrderFile, publication: Publication, *, leads: bool) -> None:
    """Write the blocks of this node; if it leads, publish the checkpoint."""
    began = publication.created_unix_ns
    try:
        times = _write_blocks(file, publication.temporary)
        if leads:
            _publish(file, publication)
            times["total"] = (time.time_ns() - began) / 1e9
        file.note(f"wrote-{watcher().node}", times)
        if leads:
            file.end()
    except BaseException as error:
        if leads:
            publication.drop(error)
        raise


def _write_blocks(file: OrderFile, path: str) -> dict[str, float]:
    """Write the blocks of this node to the file at ``path``, and return the times."""
    order, source = file.order, _source(file)
    plan, hashes = source.plan, order.record.hashes
    blocks = order.blocks_of(watcher().node)
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
            if block_hash(data) != int(hashes[blocks[index]]):
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


def _source(file: OrderFile) -> SlotMap:
    """Return the data of the snapshot of an order, as soon as its record is there."""
    order, until = file.order, time.monotonic() + _RECORD_SECONDS
    folder = SnapshotFolder(order.folder)
    while time.monotonic() < until:
        for slot, record in folder.records().items():
            if record.digest == order.record.digest:
                return SlotMap(folder.data_path(slot), record.about.plan, reads=True)
        file.require()
        time.sleep(_NAP_SECONDS)
    raise CheckpointError("expected the snapshot in node memory, found another one")


def _publish(file: OrderFile, publication: Publication) -> None:
    """Publish the checkpoint when all nodes have written their blocks."""
    order, about = file.order, file.order.record.about
    publication.header = about.header
    python = packed_python(about.header)
    publication.skeleton = _skeletons.skeleton(about.header, python)
    if publication.skeleton.plan != about.plan:
        raise CheckpointError("expected the layout of the snapshot, found another one")
    publication.created_unix_ns = about.header.created_unix_ns
    for node in order.nodes[1:]:
        file.await_note(f"wrote-{node}")
    file.begin_publication()
    publication.do(order.record.hashes)
    if publication.error is not None:
        traceback.print_exception(publication.error)
        file.give_up(str(publication.error), "publishing")
        raise publication.error
