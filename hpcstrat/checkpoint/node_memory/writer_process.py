"""The process that writes this node's snapshots to the disk; the watcher starts it.

``python -m hpcstrat.checkpoint.node_memory.writer_process`` reads a line for each task
from its standard input: ``save NAME`` of an order in the watchers' folder, or ``end
NUMBER NODE...``: no rank is left, and the newest snapshot of these nodes is to be
saved. The process ends with its input.

Each node writes its blocks; the first node of the order then publishes the checkpoint.
The processes have no MPI: they see each other's files in the watchers' folder.
"""

from __future__ import annotations

import glob
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np

from hpcstrat.checkpoint.disk import (
    closing,
    create,
    flush,
    forget_pages,
    goes_direct,
    open_to_write,
)
from hpcstrat.checkpoint.file.commit_record import block_hash
from hpcstrat.checkpoint.file.schema import checkpoint_name, step_of
from hpcstrat.checkpoint.file.skeleton import packed_python
from hpcstrat.checkpoint.file.skeleton_cache import SkeletonCache
from hpcstrat.checkpoint.keep.folder import identity_of, temporary_name
from hpcstrat.checkpoint.keep.retention import Retention, newest_path
from hpcstrat.checkpoint.keep.watcher_contract import watcher
from hpcstrat.checkpoint.node_memory.save_orders import (
    GivenUpError,
    OrderFile,
    SaveOrder,
    deal_blocks,
)
from hpcstrat.checkpoint.node_memory.slot_files import (
    Record,
    SlotMap,
    SnapshotFolder,
    read_value,
    write_value,
)
from hpcstrat.checkpoint.node_memory.spare_copy import receive_copy, send_copy
from hpcstrat.checkpoint.save.pending_save import Publication
from hpcstrat.engine.file_bytes import write_all
from hpcstrat.errors import CheckpointError

__all__ = ["main", "save_newest"]

# Folders of snapshots by name: their checkpoints' rules, and their records.
_Held: TypeAlias = Mapping[str, tuple[Retention, list[Record]]]

_NUM_THREADS = 2
_NAP_SECONDS = 0.05
# The ranks of another node may write the record of a snapshot some time later.
_RECORD_SECONDS = 30.0
_GATHER_SECONDS, _PLAN_SECONDS = 10.0, 30.0
# A process writes many saves of one program.
_skeletons = SkeletonCache()


def save_newest(number: int, nodes: Sequence[str]) -> None:
    """Save the newest complete snapshot of the nodes, unless the disk has it.

    Called on each of the nodes after generation ``number``, when no rank is left.
    """
    own, base = watcher().node, os.path.join(watcher().folder, f"held-{number}")
    write_value(f"{base}.{own}", _held())
    if own == nodes[0]:
        found = {node: _await(f"{base}.{node}", _GATHER_SECONDS) for node in nodes}
        names = {name for held in found.values() for name in held}
        orders = [_order(name, found) for name in sorted(names)]
        write_value(f"{base}.plan", [one.path for one in orders if one is not None])
    for path in _await(f"{base}.plan", _PLAN_SECONDS):
        if (file := OrderFile.open(path)) is None:
            continue
        execute(file)
        if own == nodes[0]:
            while file.is_under_way:
                time.sleep(_NAP_SECONDS)
            _say(
                "it is saved"
                if file.is_done
                else f"expected a save, found {file.cause()}"
            )
            file.remove()


def _say(text: str) -> None:
    sys.stderr.write(f"hpcstrat watch: {text}\n")


def _held() -> _Held:
    """Return the snapshots on this node."""
    found = {}
    for path in glob.glob(f"{glob.escape(watcher().memory)}/hpcstrat-*"):
        folder = SnapshotFolder(os.path.basename(path))
        if (rules := read_value(folder.rules_path)) is None:
            _say(f"snapshots in {path} cannot be saved: it has no file retention")
        else:
            found[os.path.basename(path)] = rules, [*folder.records().values()]
    return found


def _await(path: str, seconds: float) -> Any:
    """Return what another node has written; nothing if it does not in time."""
    until = time.monotonic() + seconds
    while (found := read_value(path)) is None and time.monotonic() < until:
        time.sleep(_NAP_SECONDS)
    return found or {}


def _order(name: str, found: Mapping[str, _Held]) -> OrderFile | None:
    """Return an order to save the newest complete snapshot; None if there is none."""
    having = {node: held[name] for node, held in found.items() if name in held}
    retention = next(iter(having.values()))[0]
    newest = newest_path(retention.directory)
    saved = -1 if newest is None else step_of(newest) or 0
    snapshots: dict[tuple[Any, bytes], dict[str, Record]] = {}
    for node, (_, records) in having.items():
        for record in records:
            key = record.about.key, record.digest
            snapshots.setdefault(key, {})[node] = record
    for (key, _), by_node in sorted(snapshots.items(), reverse=True):
        step = key[2]
        if step <= saved:
            break
        held = np.array([record.held for record in by_node.values()])
        if held.any(axis=0).all():
            _say(f"saves the snapshot of step {step} in {retention.directory}")
            return _begin(name, retention, by_node, held)
        _say(f"the snapshot of step {step} was lost with a node")
    _say(f"the newest checkpoint in {retention.directory} is of step {saved}")
    return None


def _begin(
    name: str, retention: Retention, by_node: Mapping[str, Record], held: Any
) -> OrderFile:
    record = next(iter(by_node.values()))
    about = record.about
    path = os.path.join(retention.directory, checkpoint_name(about.header.step))
    temporary = temporary_name(os.path.basename(path), outlives=True)
    publication = Publication(
        path=path,
        temporary=os.path.join(retention.directory, temporary),
        replaces=False,
        found=identity_of(path),
        abandoned=[],
        retention=retention,
        created_unix_ns=time.time_ns(),
    )
    create(publication.temporary, about.plan.size)
    order = SaveOrder(
        publication=publication,
        folder=name,
        record=record,
        nodes=tuple(by_node),
        writers=deal_blocks(held),
        job=watcher().job,
        direct=goes_direct("auto", retention.directory),
    )
    return OrderFile.begin(watcher().folder, order)


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


def main() -> None:
    """Execute the lines of the standard input."""
    for line in sys.stdin:
        kind, *words = line.split()
        try:
            if kind == "end":
                save_newest(int(words[0]), words[1:])
            elif file := OrderFile.open(os.path.join(watcher().folder, words[0])):
                execute(file)
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
