"""`NodeMemory`, which copies objects to the memory of nodes, and finds the copies."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.checkpoint.agreement import on_rank_0
from hpcstrat.checkpoint.file.commit_record import block_hash
from hpcstrat.checkpoint.file.extents import FileLayout
from hpcstrat.checkpoint.file.image import as_bytes, is_elsewhere
from hpcstrat.checkpoint.file.schema import Header
from hpcstrat.checkpoint.file.skeleton import packed_python, state_bytes
from hpcstrat.checkpoint.file.skeleton_cache import SkeletonCache
from hpcstrat.checkpoint.keep.retention import Retention
from hpcstrat.checkpoint.keep.watcher_contract import (
    require_newest_generation,
    tell_watcher,
    watcher,
)
from hpcstrat.checkpoint.node_memory.held_blocks import HeldSnapshot, find_newest
from hpcstrat.checkpoint.node_memory.save_orders import deal_blocks
from hpcstrat.checkpoint.node_memory.slot_files import (
    NUM_SLOTS,
    Record,
    SlotMap,
    SnapshotAbout,
    SnapshotFolder,
    write_value,
)
from hpcstrat.checkpoint.node_memory.snapshot_blocks import (
    SnapshotDivision,
    copy_block,
)
from hpcstrat.checkpoint.save.part_exchange import PartExchange
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.typing import Array, Replicas

__all__ = ["KeptSnapshot", "NodeMemory"]

_TAG = 19
_CREATION = "start of snapshots in node memory"


@dataclass(frozen=True, slots=True)
class KeptSnapshot:
    """A complete snapshot; ``writers`` has the node that can write each block."""

    record: Record
    writers: Array


def _failure(error: Exception) -> str:
    """Return what is reported of an error of one rank in a copy."""
    return f"a copy failed: {type(error).__name__}: {error}"


class NodeMemory:
    """Snapshots of one program's objects in the memory of the nodes of its ranks.

    Collective over ``ranks``, as are all methods. If the memory cannot be used on one
    node, rank 0 logs one warning, and all later snapshots do nothing. A snapshot has
    the layout of a checkpoint file. ``retention`` is for a save at the job's end.
    """

    def __init__(self, ranks: Replicas, retention: Retention) -> None:
        self._ranks, self._skeletons = ranks, SkeletonCache()
        self._folder = SnapshotFolder.of(retention.directory)
        self._plan: FileLayout | None = None
        self._maps: dict[int, SlotMap] = {}
        self._division: SnapshotDivision
        self.problem = self._late_problem = ""
        self._told_differing = False
        # The cost of the last snapshot, as the slowest rank has measured it.
        self.seconds = 0.0
        identity, problem = ("", 0, 0), ""
        try:
            identity = self._folder.make()
        except OSError as error:
            problem = f"{self._folder.path} cannot be used: {error}"
        abouts = [record.about for record in self._folder.records().values()]
        keys, starts = [a.key for a in abouts], [a.first_start for a in abouts]
        found = ranks.collectives.all_gather_object(
            (problem, identity, keys, starts, watcher().node), _CREATION
        )
        order = {one[1]: one[4] for one in found}
        self._nodes = tuple(list(order).index(one[1]) for one in found)
        self._node = self._nodes[ranks.rank]
        # Names of the nodes; empty where a node has no watcher.
        self.node_names = tuple(order.values())
        self._leads = self._nodes.index(self._node) == ranks.rank
        if self._leads and not problem and watcher().node:
            try:
                write_value(self._folder.rules_path, retention)
            except OSError as error:
                self._late_problem = f"{self._folder.path} cannot be written: {error}"
        every = [key for one in found for key in one[2]]
        newest = max((key[0] for key in every), default=0)
        self.generation = watcher().generation or newest + 1
        self._number = max((key[1] for key in every), default=0)
        first = [start for one in found for start in one[3]]
        self.first_start = min(first, default=time.time())
        self._stop_using(next(filter(None, (one[0] for one in found)), ""))

    def _stop_using(self, problem: str) -> None:
        """Make no more snapshots if there is a problem, which all ranks know."""
        self.problem = problem
        if problem and self._ranks.rank == 0:
            get_logger("checkpoint").warning(
                "expected to keep snapshots in the memory of nodes, found that %s; the "
                "program goes on with saves to the disk only",
                problem,
            )

    @property
    def folder_name(self) -> str:
        """Name of the folder of snapshots on each node."""
        return os.path.basename(self._folder.path)

    def snapshot(
        self, header: Header, values: Mapping[str, Any], in_use: int | None = None
    ) -> KeptSnapshot | None:
        """Copy the objects to node memory; ``values`` are those of `Saver.save`.

        On rank 0, ``in_use`` is the number of a snapshot that must stay. Returns None
        if the memory cannot be used. All ranks must have reached a common call since
        the last snapshot. Raises CheckpointError if a newer generation of the run was
        started.
        """
        if self.problem:
            return None
        began = time.perf_counter()
        what = f"snapshot of step {header.step}"
        new = self._agree(header, what, in_use)
        plan, self._number = new.about.plan, new.about.key[1]
        if plan != self._plan:
            self._plan = plan
            self._division = SnapshotDivision(plan, self._nodes)
            self._maps.clear()
        slot = self._number % NUM_SLOTS
        if slot not in self._maps and not self._prepare(slot, plan, what):
            return None
        place = self._maps[slot]
        if self._leads:
            self._folder.forget(slot)
        copied, problem = self._copy(place, header, values, new, what)
        self._send_copies(place, copied, what)
        seconds = time.perf_counter() - began
        blocks = np.array([*copied], np.int64)
        hashes = np.array([*copied.values()], np.uint64)
        found = self._ranks.collectives.all_gather_object(
            (problem or self._late_problem, seconds, blocks, hashes),
            f"end of the {what}",
        )
        self.seconds = max(one[1] for one in found)
        problem = next(filter(None, (one[0] for one in found)), "")
        self._stop_using(problem)
        if problem:
            return None
        kept = self._conclude(slot, new, [one[2:] for one in found])
        if self._leads:
            tell_watcher("progress", step=header.step)
        return kept

    def _agree(self, header: Header, what: str, in_use: int | None) -> Record:
        """Return the record of a new snapshot, without the hashes; collective."""

        def describe() -> bytes:
            require_newest_generation(f"a {what}")
            number = self._number + 1
            if in_use is not None and (number - in_use) % NUM_SLOTS == 0:
                # The other slot is overwritten: the one in use is complete.
                number += 1
            key = self.generation, number, header.step, self._ranks.num_ranks
            header.created_unix_ns = time.time_ns()
            plan = self._skeletons.skeleton(header, packed_python(header)).plan
            run, first = self._folder.run, self.first_start
            return pickle.dumps(SnapshotAbout(run, key, first, header, plan), 5)

        common: bytes = on_rank_0(self._ranks, what, describe)
        return Record(common, np.zeros(0), np.zeros(0))

    def _prepare(self, slot: int, plan: FileLayout, what: str) -> bool:
        """Reserve memory for a slot on each node; return whether there was enough."""
        # All ranks have unmapped older files, so that their memory is free.
        self._ranks.collectives.barrier(f"reservation for the {what}")
        held, problem = self._division.held(self._node), ""
        if self._leads:
            try:
                self._folder.reserve(slot, plan, held)
            except OSError as error:
                problem = error.strerror or str(error)
        problem = self._first_of(problem, f"memory for the {what}")
        if not problem:
            try:
                self._maps[slot] = SlotMap(self._folder.data_path(slot), plan)
            except OSError as error:
                problem = f"{self._folder.path} cannot be mapped: {error}"
            problem = self._first_of(problem, f"map of the {what}")
        self._stop_using(problem)
        return not problem

    def _first_of(self, problem: str, what: str) -> str:
        every = self._ranks.collectives.all_gather_object(problem, what)
        return next(filter(None, every), "")

    def _copy(
        self,
        place: SlotMap,
        header: Header,
        values: Mapping[str, Any],
        new: Record,
        what: str,
    ) -> tuple[dict[int, int], str]:
        """Copy this rank's blocks; return their hashes, and the text of an error."""
        plan, rank = place.plan, self._ranks.rank
        exchange = PartExchange(plan, self._ranks, what)
        with exchange.prepared():
            data: dict[str, Any] = dict(exchange.plan(values))
        copied: dict[int, int] = {}
        problem = ""
        try:
            data |= {
                path: value if is_elsewhere(value) else as_bytes(value)
                for path, value in values.items()
                if path not in data
            }
            # Any rank may write a part of rank 0's plain state.
            data |= state_bytes(header, packed_python(new.about.header))
        except Exception as error:
            problem = _failure(error)

        def copy(blocks: Any) -> str:
            try:
                for block in blocks:
                    target = place.block(block)
                    copied[block] = copy_block(target, plan, block, data)
            except Exception as error:
                return _failure(error)
            return ""

        # All ranks make all rounds, even after an error.
        for blocks in exchange.rounds() or ():
            problem = problem or copy(blocks)
        own = [*self._division.own[rank], *self._division.common[rank]]
        rest = [block for block in own if block not in copied]
        return copied, problem or copy(rest)

    def _send_copies(self, place: SlotMap, copied: dict[int, int], what: str) -> None:
        """Send this rank's own blocks to its partner; hash the blocks that arrive."""
        division, rank = self._division, self._ranks.rank
        turns = max(map(len, division.own))
        if not turns or len(set(self._nodes)) == 1:
            return
        partner, clients = division.partners[rank], division.clients(rank)
        with self._ranks.collectives.moving(f"copies of the {what}") as comm:
            for turn in range(turns):
                some = {r: division.own[r][turn:][:1] for r in (rank, *clients)}
                first = {r: place.block(one[0]) for r, one in some.items() if one}
                sent = {partner: first.pop(rank)} if rank in first else {}
                comm.exchange(sent, first, _TAG)
        for client in clients:
            for block in division.own[client]:
                copied[block] = block_hash(place.block(block).data)

    def _conclude(
        self, slot: int, new: Record, found: list[tuple[Array, Array]]
    ) -> KeptSnapshot:
        """Write the record on each node, with the blocks that are as they were sent."""
        division = self._division
        hashes = np.zeros(division.plan.num_blocks, np.uint64)
        # The rank that has copied a block from its values decides on the hash; of those
        # that all nodes have, the first rank. Later ranks are overwritten.
        for rank, (blocks, own) in reversed([*enumerate(found)]):
            mine = np.isin(blocks, [*division.own[rank], *division.common[rank]])
            hashes[blocks[mine]] = own[mine]
        held = np.zeros((len(self.node_names), len(hashes)), bool)
        differing: set[int] = set()
        for node, (blocks, own) in zip(self._nodes, found, strict=True):
            same = hashes[blocks] == own
            differing.update(blocks[~same].tolist())
            held[node, blocks[same]] = True
        if differing and self._ranks.rank == 0 and not self._told_differing:
            self._told_differing = True
            plan = division.plan
            paths = {piece.path for block in differing for piece in plan.pieces(block)}
            get_logger("checkpoint").warning(
                "expected equal bytes on all nodes in a snapshot, found that those of "
                "%s differ; they are kept on one node only: find the difference by "
                'Settings(divergence="full")',
                ", ".join(sorted(paths)),
            )
        record = Record(new.common, hashes, held[self._node])
        if self._leads:
            try:
                self._folder.keep(slot, record)
            except OSError as error:
                # The other ranks are told at the next snapshot.
                self._late_problem = f"{self._folder.path} cannot be written: {error}"
        return KeptSnapshot(record, deal_blocks(held))

    def find(self, passed_over: set[bytes]) -> HeldSnapshot | None:
        """Return the newest snapshot whose blocks are all intact on some node, or None.

        Snapshots whose digest is in ``passed_over`` are left out.
        """
        if self.problem:
            return None
        return find_newest(self._folder, self._ranks, self._nodes, passed_over)

    def follow(self, snapshot: HeldSnapshot | None) -> None:
        """Continue after a restore: the next snapshot overwrites another slot."""
        if snapshot is not None:
            self._number = snapshot.key[1]

    def remove(self) -> None:
        """Remove all snapshots."""
        self._maps.clear()
        self._ranks.collectives.barrier("removal of snapshots in node memory")
        if self._leads:
            self._folder.remove()

    def close(self) -> None:
        """Unmap the memory; the snapshots stay. Not collective."""
        self._maps.clear()
        self._plan = None
        self._skeletons.close()

    def __repr__(self) -> str:
        """Show the folder and the number of nodes."""
        return f"<NodeMemory of {len(set(self._nodes))} nodes in {self._folder.path!r}>"
