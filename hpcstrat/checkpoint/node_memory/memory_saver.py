"""`MemorySaver`, which has the watchers write background saves from snapshots."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hpcstrat.checkpoint.agreement import on_rank_0
from hpcstrat.checkpoint.file.schema import Header
from hpcstrat.checkpoint.keep.watcher_contract import (
    tell_watcher,
    watched_nodes,
    watcher,
)
from hpcstrat.checkpoint.node_memory.node_memory import KeptSnapshot, NodeMemory
from hpcstrat.checkpoint.node_memory.save_orders import (
    OrderFile,
    SaveOrder,
    orders_in,
)
from hpcstrat.checkpoint.node_memory.slot_files import Key
from hpcstrat.checkpoint.outcomes import SaveStatistics
from hpcstrat.checkpoint.save.pending_save import Publication, SaveOptions
from hpcstrat.checkpoint.save.saver import Saver
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.typing import Replicas
from hpcstrat.errors import CheckpointError
from hpcstrat.safety import newest_checkpoint

__all__ = ["MemorySaver"]

_NAP_SECONDS = 0.02
_PUBLICATION_SECONDS = 10.0


class _WatchedSave:
    """A save that the watchers write; only rank 0 has its ``file`` and ``number``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file: OrderFile | None = None
        self.number: int | None = None
        # The statistics, without the times of the watchers' processes; None if an
        # earlier generation has begun the save.
        self.statistics: SaveStatistics | None = None

    def is_under_way(self) -> bool:
        return self.file is not None and self.file.is_under_way

    def wait(self) -> dict[str, float]:
        """Wait for the end, and return the times; raise CheckpointError if it failed.

        Called on rank 0.
        """
        assert self.file is not None
        self.file.hurry()
        while self.file.is_under_way:
            time.sleep(_NAP_SECONDS)
        is_done, cause, times = self.file.is_done, self.file.cause(), self.file.times()
        self.file.remove()
        if not is_done:
            raise CheckpointError(
                f"expected the watchers to write {self.path}, found {cause}; older "
                "checkpoints and the snapshots in node memory are unchanged"
            )
        newest_checkpoint.tell(self.path)
        return times


class MemorySaver:
    """Saves as `Saver` does, and makes a snapshot in node memory with each save.

    With watchers on all nodes, they write an asynchronous save from the snapshot, by
    processes of low priority that outlive the ranks.
    """

    def __init__(self, ranks: Replicas, saver: Saver, memory: NodeMemory) -> None:
        self._ranks, self._saver, self._memory = ranks, saver, memory
        self._current: _WatchedSave | None = None
        self._last: SaveStatistics | None = None
        # Time of the program for the last save by watchers, and of their processes.
        self._own_seconds = self._writing_seconds = 0.0
        # On rank 0: the copy that is sent to a spare node, and all spare nodes.
        self._copy, self._spares = _WatchedSave(""), list[str]()
        if ranks.rank == 0 and all(memory.node_names):
            self._spares = sorted(watched_nodes().difference(memory.node_names))

    @property
    def last(self) -> SaveStatistics | None:
        """See `Saver.last`."""
        return self._last or self._saver.last

    @property
    def cost_seconds(self) -> float:
        """See `Saver.cost_seconds`; includes the processor time of a node's writer."""
        own = self._own_seconds + self._writing_seconds
        return own or self._saver.cost_seconds

    def save(
        self,
        order: SaveOptions,
        header: Header,
        values: Mapping[str, Any],
        compare: Callable[[], None],
    ) -> None:
        """Save as `Saver.save`, and make a snapshot; collective over all ranks."""
        is_watched = all(self._memory.node_names) and not self._memory.problem
        if order.asynchronous and is_watched:
            file, publication = self._saver.make_file(
                order, header, compare, outlives=True
            )
            kept = None
            try:
                kept = self._memory.snapshot(header, values, self._number_in_use())
            finally:
                if kept is None and publication is not None:
                    publication.drop(CheckpointError("there is no snapshot"))
            if kept is not None:
                self._begin(order, header, publication, kept, direct=file.direct)
                return
            # The ranks have compared their copies.
            self._saver.save(order, header, values, lambda: None)
        else:
            self._saver.save(order, header, values, compare)
            self.snapshot(header, values)
        self._last = None
        self._own_seconds = self._writing_seconds = 0.0

    def _number_in_use(self) -> int | None:
        """Return the number of the snapshot that is being saved or copied."""
        for one in (self._current, self._copy):
            if one is not None and one.is_under_way():
                return one.number
        return None

    def snapshot(self, header: Header, values: Mapping[str, Any]) -> None:
        """Make a snapshot, of which a spare node gets a copy; see `NodeMemory`."""
        kept = self._memory.snapshot(header, values, self._number_in_use())
        if kept is not None and self._ranks.rank == 0 and self._spares:
            try:
                self._send_copy(kept)
            except OSError as error:
                # The other ranks know nothing of copies.
                get_logger("checkpoint").debug("no copy of a snapshot: %s", error)

    def _send_copy(self, kept: KeptSnapshot) -> None:
        """Have the watchers copy a snapshot to a spare node, unless they are busy.

        Called on rank 0.
        """
        save, before = self._current, self._copy.file
        if (save is not None and save.is_under_way()) or self._copy.is_under_way():
            return
        if before is not None:
            if not before.is_done:
                get_logger("checkpoint").warning(
                    "expected spare node %s to keep a copy of a snapshot, found %s",
                    *(self._spares.pop(0), before.cause()),
                )
            before.remove()
            self._copy.file = None
        if not self._spares:
            return
        order = self._order_for(kept, spare=self._spares[0])
        self._copy.file = OrderFile.begin(watcher().folder, order)
        self._copy.number = kept.key[1]
        nodes = (*order.nodes, order.spare)
        if not tell_watcher("save", order=self._copy.file.name, nodes=nodes):
            # The watcher has no time: the next snapshot is copied.
            self._copy.file.remove()
            self._copy.file = None

    def _order_for(
        self,
        kept: KeptSnapshot,
        *,
        publication: Publication | None = None,
        **more: Any,
    ) -> SaveOrder:
        """Return the order to write, or to send, a snapshot."""
        return SaveOrder(
            publication=publication,
            folder=self._memory.folder_name,
            key=kept.key,
            digest=kept.digest,
            nodes=self._memory.node_names,
            writers=kept.writers,
            job=watcher().job,
            **more,
        )

    def _begin(
        self,
        order: SaveOptions,
        header: Header,
        publication: Publication | None,
        kept: KeptSnapshot,
        *,
        direct: bool,
    ) -> None:
        """Have the watchers write a snapshot; collective over all ranks."""
        save = _WatchedSave(order.path)

        def begin() -> None:
            assert publication is not None
            if self._copy.is_under_way():
                assert self._copy.file is not None
                self._copy.file.give_up()
                self._copy.file.remove()
                self._copy.file = None
            told = self._order_for(
                kept,
                publication=publication,
                direct=direct,
                bandwidth=order.bandwidth,
            )
            try:
                save.file = OrderFile.begin(watcher().folder, told)
                if not tell_watcher("save", order=save.file.name, nodes=told.nodes):
                    raise TimeoutError("the watcher of this node does not answer")
            except OSError as error:
                if save.file is not None:
                    save.file.remove()
                publication.drop(error)
                raise
            save.number = kept.key[1]

        on_rank_0(self._ranks, f"save of {order.path}", begin)
        seconds = time.perf_counter() - order.began
        save.statistics = SaveStatistics(
            path=order.path,
            step=header.step,
            nbytes=kept.nbytes,
            asynchronous=True,
            blocking_seconds=seconds,
            copy_seconds=self._memory.seconds,
            total_seconds=seconds,
            hash_seconds=0.0,
            write_seconds=0.0,
            flush_seconds=0.0,
            bytes_per_second=0.0,
        )
        self._current, self._own_seconds = save, seconds

    def busy(self) -> bool:
        """Return whether a save is still being written; collective as `Saver.busy`."""
        save = self._current
        if save is None:
            return self._saver.busy()
        what = f"whether the save of {save.path} is done"
        return bool(on_rank_0(self._ranks, what, save.is_under_way))

    def finish(self) -> None:
        """Wait for the current save; collective as `Saver.finish`."""
        save = self._current
        if save is None:
            self._saver.finish()
            return
        try:
            times = on_rank_0(self._ranks, f"save of {save.path}", save.wait)
        except CheckpointError:
            self._current = None
            raise
        self._current = None
        self._writing_seconds = times.get("cpu", 0.0)
        if save.statistics is None:
            return
        self._last = replace(
            save.statistics,
            total_seconds=times["total"],
            hash_seconds=times["hash"],
            write_seconds=times["write"],
            flush_seconds=times["flush"],
            bytes_per_second=save.statistics.nbytes / times["total"],
        )
        if self._ranks.rank == 0:
            get_logger("checkpoint").info("saved %s", self._last)

    def settle(self, key: Key | None) -> str | None:
        """End saves of earlier generations, before a restore of a snapshot, or of none.

        Called on rank 0. A save of this snapshot, or of an older one, is continued: its
        path is returned. A newer one is given up, because the program goes back.
        """
        found, self._current, self._copy.file = watcher(), None, None
        folder, path = self._memory.folder_name, None
        for file in orders_in(found.folder, folder) if found.folder else ():
            order = file.read()
            if order is None:
                continue
            publication = order.publication
            is_whole = publication is not None and order.job == found.job
            is_whole = is_whole and watched_nodes().issuperset(order.nodes)
            is_older = key is not None and order.key <= key
            if publication and is_whole and is_older and file.is_under_way:
                path = publication.path
                self._current = _WatchedSave(path)
                self._current.file, self._current.number = file, order.key[1]
                continue
            file.give_up("that the program went back to an older state")
            until = time.monotonic() + _PUBLICATION_SECONDS
            # It may be just about to be published.
            while is_whole and file.is_under_way and time.monotonic() < until:
                time.sleep(_NAP_SECONDS)
            file.remove()
        return path

    def follow(self, path: str | None) -> None:
        """Continue on all ranks the save that `settle` has returned."""
        if path is None:
            self._current = None
        elif self._ranks.rank:
            self._current = _WatchedSave(path)

    def close(self) -> None:
        """Wait for the current save, and free all memory, as `Saver.close`."""
        try:
            self.finish()
        finally:
            self._saver.close()
