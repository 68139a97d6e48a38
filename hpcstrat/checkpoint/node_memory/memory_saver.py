"""`MemorySaver`, which has the watchers write background saves from snapshots."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
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


class MemorySaver:
    """Saves as `Saver` does, and makes a snapshot in node memory with each save.

    With watchers on all nodes, they write an asynchronous save from the snapshot, by
    processes of low priority that outlive the ranks.
    """

    def __init__(self, ranks: Replicas, saver: Saver, memory: NodeMemory) -> None:
        self._ranks, self._saver, self._memory = ranks, saver, memory
        # Path of the save that the watchers write, and on rank 0 its order.
        self._path: str | None = None
        self._order: OrderFile | None = None
        # Makes its statistics from the times of the watchers' processes; None if an
        # earlier generation has begun it.
        self._statistics: partial[SaveStatistics] | None = None
        self._last: SaveStatistics | None = None
        # Time of the program for the last save by watchers, and of their processes.
        self._own_seconds = self._writing_seconds = 0.0
        # On rank 0: the order to copy a snapshot to a spare node, and all spare nodes.
        self._copy: OrderFile | None = None
        self._spares = list[str]()
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
                self._begin(order, header.step, publication, kept, direct=file.direct)
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
        for file in (self._order, self._copy):
            if file is not None and file.is_under_way:
                return file.order.record.about.key[1]
        return None

    def snapshot(self, header: Header, values: Mapping[str, Any]) -> None:
        """Make a snapshot, of which a spare node gets a copy; see `NodeMemory`."""
        in_use = self._number_in_use()
        kept = self._memory.snapshot(header, values, in_use)
        if kept is not None and self._ranks.rank == 0 and in_use is None:
            try:
                self._send_copy(kept)
            except OSError as error:
                # The other ranks know nothing of copies.
                get_logger("checkpoint").debug("no copy of a snapshot: %s", error)

    def _send_copy(self, kept: KeptSnapshot) -> None:
        """Have the watchers copy a snapshot to a spare node, if there is one."""
        if (before := self._copy) is not None:
            if not before.is_done:
                get_logger("checkpoint").warning(
                    "expected spare node %s to keep a copy of a snapshot, found %s",
                    *(self._spares.pop(0), before.cause()),
                )
            before.remove()
            self._copy = None
        if self._spares:
            # If the watcher has no time, the next snapshot is copied.
            self._copy = self._tell(kept, spare=self._spares[0])

    def _tell(self, kept: KeptSnapshot, **more: Any) -> OrderFile:
        """Order the watchers to write, or to send, a snapshot; raises OSError."""
        nodes = self._memory.node_names
        order = SaveOrder(
            folder=self._memory.folder_name,
            record=kept.record,
            nodes=nodes,
            writers=kept.writers,
            job=watcher().job,
            **{"publication": None, **more},
        )
        file = OrderFile.begin(watcher().folder, order)
        some = [*nodes, order.spare] if order.spare else nodes
        if not tell_watcher("save", order=file.name, nodes=some):
            file.remove()
            raise TimeoutError("the watcher of this node does not answer")
        return file

    def _begin(
        self,
        order: SaveOptions,
        step: int,
        publication: Publication | None,
        kept: KeptSnapshot,
        *,
        direct: bool,
    ) -> None:
        """Have the watchers write a snapshot; collective over all ranks."""

        def begin() -> None:
            assert publication is not None
            if self._copy is not None and self._copy.is_under_way:
                self._copy.give_up("that a save to the disk has begun")
                self._copy.remove()
                self._copy = None
            options = {"direct": direct, "bandwidth": order.bandwidth}
            try:
                self._order = self._tell(kept, publication=publication, **options)
            except OSError as error:
                publication.drop(error)
                raise

        on_rank_0(self._ranks, f"save of {order.path}", begin)
        seconds = time.perf_counter() - order.began
        self._path, self._own_seconds = order.path, seconds
        self._statistics = partial(
            SaveStatistics,
            path=order.path,
            step=step,
            nbytes=kept.record.about.plan.size,
            asynchronous=True,
            blocking_seconds=seconds,
            copy_seconds=self._memory.seconds,
        )

    def busy(self) -> bool:
        """Return whether a save is still being written; collective as `Saver.busy`."""
        if self._path is None:
            return self._saver.busy()

        def is_under_way() -> bool:
            return self._order is not None and self._order.is_under_way

        what = f"whether the save of {self._path} is done"
        return bool(on_rank_0(self._ranks, what, is_under_way))

    def finish(self) -> None:
        """Wait for the current save; collective as `Saver.finish`."""
        if self._path is None:
            self._saver.finish()
            return
        what, statistics = f"save of {self._path}", self._statistics
        try:
            times: dict[str, float] = on_rank_0(self._ranks, what, self._wait)
        except CheckpointError:
            self.follow(None)
            raise
        self.follow(None)
        self._writing_seconds = times.get("cpu", 0.0)
        if statistics is None:
            return
        total = times.get("total", self._own_seconds)
        self._last = statistics(
            total_seconds=total,
            hash_seconds=times.get("hash", 0.0),
            write_seconds=times.get("write", 0.0),
            flush_seconds=times.get("flush", 0.0),
            bytes_per_second=statistics.keywords["nbytes"] / total,
        )
        if self._ranks.rank == 0:
            get_logger("checkpoint").info("saved %s", self._last)

    def _wait(self) -> dict[str, float]:
        """Wait on rank 0 for the end of the current save, and return its times."""
        file = self._order
        assert file is not None
        file.hurry()
        while file.is_under_way:
            time.sleep(_NAP_SECONDS)
        is_done, cause, times = file.is_done, file.cause(), file.times()
        file.remove()
        self._order = None
        if not is_done:
            raise CheckpointError(
                f"expected the watchers to write {self._path}, found {cause}; older "
                "checkpoints and the snapshots in node memory are unchanged"
            )
        assert self._path is not None
        newest_checkpoint.tell(self._path)
        return times

    def settle(self, key: Key | None) -> str | None:
        """End saves of earlier generations, before a restore of a snapshot, or of none.

        Called on rank 0. A save of this snapshot, or of an older one, is continued: its
        path is returned. A newer one is given up, because the program goes back.
        """
        found, self._order, self._copy = watcher(), None, None
        folder, path = self._memory.folder_name, None
        for file in orders_in(found.folder, folder) if found.folder else ():
            order = file.order
            is_whole = order.publication is not None and order.job == found.job
            is_whole = is_whole and watched_nodes().issuperset(order.nodes)
            is_older = key is not None and order.record.about.key <= key
            if order.publication and is_whole and is_older and file.is_under_way:
                path, self._order = order.publication.path, file
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
        self._path, self._statistics = path, None

    def close(self) -> None:
        """Wait for the current save, and free all memory, as `Saver.close`."""
        try:
            self.finish()
        finally:
            self._saver.close()
