"""The process that writes this node's snapshots to the disk; the watcher starts it.

``python -m hpcstrat.checkpoint.node_memory.writer_process`` reads a line for each task
from its standard input: ``save NAME`` of an order in the watchers' folder, or ``end
NUMBER NODE...``: no rank is left, and the newest snapshot of these nodes is to be
saved. The process ends with its input.
"""

from __future__ import annotations

import glob
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
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
from hpcstrat.checkpoint.node_memory.slot_files import (
    Record,
    SnapshotFolder,
    read_value,
    write_value,
)
from hpcstrat.checkpoint.save.pending_save import Publication

__all__ = ["main", "save_newest"]

# Folders of snapshots by name: their checkpoints' rules, and their records.
_Held: TypeAlias = Mapping[str, tuple[Retention, list[Record]]]

_GATHER_SECONDS, _PLAN_SECONDS = 10.0, 30.0
_NAP_SECONDS = 0.05


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
