"""The process that writes this node's snapshots to the disk; the watcher starts it.

``python -m hpcstrat.checkpoint.node_memory.writer_process`` reads a line for each task
from its standard input: ``save NAME`` of an order in the watchers' folder, or ``end
NUMBER NODE...``: no rank is left, and the newest snapshot of these nodes is to be
saved. The process ends with its input.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hpcstrat.checkpoint.disk import create, goes_direct
from hpcstrat.checkpoint.file.schema import checkpoint_name, step_of
from hpcstrat.checkpoint.keep.folder import identity_of, temporary_name
from hpcstrat.checkpoint.keep.retention import Retention, newest_path
from hpcstrat.checkpoint.keep.watcher_contract import watcher
from hpcstrat.checkpoint.node_memory.disk_writer import execute
from hpcstrat.checkpoint.node_memory.save_orders import (
    OrderFile,
    SaveOrder,
    deal_blocks,
)
from hpcstrat.checkpoint.node_memory.slot_files import Record, SnapshotFolder
from hpcstrat.checkpoint.save.pending_save import Publication

__all__ = ["main", "save_newest"]

# Folders of snapshots by name: their checkpoints, and their records.
_Held: TypeAlias = Mapping[str, tuple[Retention, list[Record]]]

_GATHER_SECONDS, _PLAN_SECONDS = 10.0, 30.0
_NAP_SECONDS = 0.05


def save_newest(number: int, nodes: Sequence[str]) -> None:
    """Save the newest complete snapshot of the nodes, unless the disk has it.

    Called on each of the nodes after generation ``number``, when no rank is left.
    """
    own, base = watcher().node, Path(watcher().folder, f"held-{number}")
    _write(base.with_suffix(f".{own}"), _held())
    plan = base.with_suffix(".plan")
    if own == nodes[0]:
        for path in base.parent.glob("held-*"):
            if path.stem != base.stem:
                path.unlink(missing_ok=True)
        found = {}
        for node in nodes:
            held = _read(base.with_suffix(f".{node}"), _GATHER_SECONDS)
            found[node] = held or {}
        names = {name for held in found.values() for name in held}
        orders = [_order(name, found) for name in sorted(names)]
        _write(plan, [one.path for one in orders if one is not None])
    for path in _read(plan, _PLAN_SECONDS) or ():
        file = OrderFile(path)
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
    for path in Path(watcher().memory).glob("hpcstrat-*"):
        folder = SnapshotFolder(path.name)
        try:
            found[path.name] = folder.retention(), [*folder.records().values()]
        except OSError as error:
            _say(f"snapshots in {path} cannot be saved: {error}")
    return found


def _write(path: Path, contents: Any) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(pickle.dumps(contents))
    new.rename(path)


def _read(path: Path, seconds: float) -> Any:
    """Return what another node has written, or None if it does not in time."""
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            return None
        time.sleep(_NAP_SECONDS)
    return pickle.loads(path.read_bytes())


def _order(name: str, found: Mapping[str, _Held]) -> OrderFile | None:
    """Return an order to save the newest complete snapshot; None if there is none."""
    having = {node: held[name] for node, held in found.items() if name in held}
    retention = next(iter(having.values()))[0]
    keys = {
        (record.contents()[1], record.digest)
        for _, records in having.values()
        for record in records
    }
    newest = newest_path(retention.directory)
    saved = -1 if newest is None else step_of(newest) or 0
    for key, digest in sorted(keys, reverse=True):
        step = key[2]
        if step <= saved:
            break
        records = {
            node: record
            for node, (_, records) in having.items()
            for record in records
            if record.digest == digest
        }
        held = np.array([record.held for record in records.values()])
        if held.any(axis=0).all():
            _say(f"saves the snapshot of step {step} in {retention.directory}")
            record = next(iter(records.values()))
            return _begin(name, retention, record, (tuple(records), deal_blocks(held)))
        _say(f"the snapshot of step {step} was lost with a node")
    _say(f"the newest checkpoint in {retention.directory} is of step {saved}")
    return None


def _begin(
    name: str, retention: Retention, record: Record, nodes: tuple[Any, Any]
) -> OrderFile:
    _, key, _, header, plan = record.contents()
    path = os.path.join(retention.directory, checkpoint_name(header.step))
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
    create(publication.temporary, plan.size)
    order = SaveOrder(
        publication=publication,
        folder=name,
        key=key,
        digest=record.digest,
        nodes=nodes[0],
        writers=nodes[1],
        job=watcher().job,
        direct=goes_direct("auto", retention.directory),
        bandwidth=float("inf"),
    )
    return OrderFile.begin(watcher().folder, order)


def main() -> None:
    """Execute the lines of the standard input."""
    for line in sys.stdin:
        kind, *words = line.split()
        try:
            if kind == "save":
                execute(OrderFile(os.path.join(watcher().folder, words[0])))
            else:
                save_newest(int(words[0]), words[1:])
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
