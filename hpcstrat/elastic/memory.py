"""`Memory`, which keeps the state to restore after the loss of a rank."""

from __future__ import annotations

from typing import Any

from hpcstrat.checkpoint.file.plain_state import as_text, from_text
from hpcstrat.checkpoint.node_memory.snapshot_blocks import partners_of
from hpcstrat.checkpoint.objects import Objects
from hpcstrat.elastic.memory_restore import Inventory, choose, restore_commit
from hpcstrat.elastic.snapshots import Snapshot, exchange
from hpcstrat.elastic.watching.reports import report_progress
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.typing import Replicas

__all__ = ["Memory"]


class Memory:
    """Keeps the last two commits of a program's state in each rank's memory.

    `hpcstrat.elastic.run` makes this object, and passes it to the training function.

    Parameters
    ----------
    partner_copies : bool
        Whether a second replica keeps a copy of the state that only one replica has.

    Attributes
    ----------
    state : dict
        The values that were passed to the restored `commit`, without the step.
    """

    def __init__(self, partner_copies: bool = False) -> None:
        self.state: dict[str, Any] = {}
        self._copies = partner_copies
        self._strategy: Replicas | None = None
        self._generation = 0
        self._joined: int | None = None
        self._objects: Objects | None = None
        self._commits = [Snapshot(), Snapshot()]
        self._restored = False
        self._number = 0
        self._calls = -1
        self._partners: list[int] = []

    def begin(self, strategy: Replicas, generation: int) -> None:
        """Use another strategy from now on; `hpcstrat.elastic.run` calls this method.

        Not collective. For the library's own modules.
        """
        if self._joined is None:
            self._joined = generation
        self.state = {}
        # Keep the commits for the next `restore`.
        self._strategy, self._generation = strategy, generation
        self._objects, self._restored, self._number, self._calls = None, False, 0, -1

    def track(self, **objects: Any) -> None:
        """Choose the objects to keep; call this in each call of the training function.

        Not collective; the objects must exist, and be the same on every rank.

        Parameters
        ----------
        **objects : Variable, nested dict or list of Variables, optimizer, or data set
            Any objects that `hpcstrat.CheckpointManager` can save.

        Raises
        ------
        ValueError
            If an object cannot be kept.
        """
        self._objects = Objects(objects)
        self._restored = False
        self._require_whole(self._objects)

    def _require_whole(self, objects: Objects) -> None:
        """Raise ValueError for sharded variables: a lost rank would lose its shards."""
        variables = objects.variables().items()
        parts = [path for path, variable in variables if variable.is_sharded]
        if parts and self._strategy is not None and not self._strategy.logical:
            raise ValueError(
                "expected state of which each rank has a complete copy, found "
                f"{parts[0]!r}, of which each rank has only a part, because of "
                "sharded=True; pass logical_replicas= to elastic.run, whose commits "
                "keep all parts on all ranks"
            )

    @property
    def collectives(self) -> Any:
        """The collective calls of the strategy, or of this rank alone before `begin`.

        For the library's own modules.
        """
        strategy = self._strategy
        return Collectives(None) if strategy is None else strategy.collectives

    @collective
    def restore(self) -> int | None:
        """Restore the newest commit that all remaining ranks have.

        Collective over the strategy's replicas.

        Returns
        -------
        int or None
            The step of that commit. None if there is no commit, such as at the start of
            the job; then nothing changes.

        Raises
        ------
        RuntimeError
            If `track` was not called before.
        CheckpointMismatchError
            On every rank, if the tracked objects do not fit the commit.
        """
        objects = self._tracked("restore")
        strategy = self._strategy
        assert strategy is not None
        collectives = strategy.collectives
        held = [commit for commit in self._commits if commit.key is not None]
        assert self._joined is not None
        place = strategy.topology.worker_id
        report = Inventory(self._joined, place, [_holding(commit) for commit in held])
        reports = collectives.all_gather_object(report, "restoring from memory")
        # Choose partners again, because each loss changes the active ranks.
        self._partners = partners_of([other.worker for other in reports])
        key = choose(reports)
        self._restored = True
        if key is None:
            # All ranks start from the beginning: never restore these older commits.
            for commit in held:
                commit.key = None
            return None
        commit = next((c for c in held if c.key == key), Snapshot())
        restore_commit(commit, key, objects, strategy, reports)
        for other in held:
            # Discard the other commit, which is older, or which not all ranks have.
            if other is not commit:
                other.key = None
        self.state = from_text(commit.python[""])
        # Commit immediately: without a commit on new ranks, another loss before the
        # next commit would lose the parts that new ranks have just received.
        self._number += 1
        self._keep(commit.step, commit.python[""])
        return commit.step

    @collective
    def commit(self, step: int, **state: Any) -> None:
        """Keep the current state, to continue from it after a rank is lost.

        Logically collective over the strategy's replicas: all must call it, but mostly
        it only copies memory. It communicates for partner copies, for logical replicas,
        or if the strategy has made no collective call since the last commit. Watchers
        are told of the step; see `report_progress`.

        Parameters
        ----------
        step : int
            Number that `restore` returns if it restores this commit.
        **state : object
            Further values to keep, the same on every replica, of types that a
            `CheckpointManager` can save. `restore` assigns them to ``memory.state``.

        Raises
        ------
        RuntimeError
            If `restore` was not called before.
        ValueError
            If a value of the state cannot be restored unchanged.
        """
        # Count this commit even if it fails here, because other replicas count it, too.
        self._number += 1
        self._tracked("commit")
        if not self._restored:
            raise RuntimeError(
                "expected restore() before the first commit, found none; call it after "
                "track(), on every call of the training function"
            )
        self._keep(int(step), as_text("commit", state))
        if self._strategy is not None and self._strategy.rank == 0:
            report_progress(step)

    def _tracked(self, what: str) -> Objects:
        if self._objects is None:
            raise RuntimeError(
                f"expected track() before {what}, found none; call it on every call of "
                "the training function, once its variables are made"
            )
        return self._objects

    def _keep(self, step: int, text: bytes) -> None:
        # Overwrite the older commit, because a loss may interrupt this commit.
        commit = min(self._commits, key=lambda c: c.key or (-1, -1))
        strategy, objects = self._strategy, self._objects
        assert strategy is not None
        assert objects is not None
        self._require_whole(objects)
        channel = strategy.collectives.channel
        if channel is not None:
            channel.pending.drain()
            # If there is a collective call between commits, no rank is more than one
            # commit ahead, so that all have a commit in common if each keeps two.
            if channel.num_calls == self._calls:
                strategy.collectives.barrier(f"commit of step {step}")
        if strategy.logical:
            commit.fill_whole(objects, {"": text})
        else:
            commit.fill(objects, {"": text})
        if self._copies and not strategy.logical and channel is not None:
            commit.copies = exchange(strategy, commit.own_part(), self._partners)
        commit.step = step
        commit.replica = strategy.rank
        commit.num_replicas = strategy.num_replicas_in_sync
        commit.num_ranks = strategy.num_ranks
        commit.key = self._generation, self._number
        self._calls = -1 if channel is None else channel.num_calls

    def __repr__(self) -> str:
        return (
            f"<Memory of {', '.join(sorted(self.state)) or 'nothing yet'}, commit "
            f"{self._number}>"
        )


def _holding(commit: Snapshot) -> tuple[Any, int, int, list[int]]:
    return commit.key, commit.replica, commit.num_ranks, sorted(commit.copies)
