"""`CheckpointManager`, which saves and restores a program's objects."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, SupportsFloat, overload

from hpcstrat.checkpoint.agreement import (
    compare_copies,
    on_rank_0,
    require_one_writer,
    strategy_of,
)
from hpcstrat.checkpoint.checkpoint_options import CheckpointOptions
from hpcstrat.checkpoint.due_saves import DueSaves
from hpcstrat.checkpoint.file.image import ImageMemory
from hpcstrat.checkpoint.file.schema import (
    checkpoint_name,
    list_checkpoints,
    step_of,
)
from hpcstrat.checkpoint.keep.folder import Folder
from hpcstrat.checkpoint.keep.retention import (
    KeepBest,
    Retention,
    best_path,
    checked_metrics,
    newest_path,
)
from hpcstrat.checkpoint.keep.watcher_contract import tell_watcher
from hpcstrat.checkpoint.node_memory.memory_saver import MemorySaver
from hpcstrat.checkpoint.node_memory.node_memory import NodeMemory
from hpcstrat.checkpoint.objects import Objects, whole_shape
from hpcstrat.checkpoint.outcomes import RestoreReport, SaveStatistics
from hpcstrat.checkpoint.restore.restorer import Restorer
from hpcstrat.checkpoint.save.pending_save import SaveOptions, checked_bandwidth
from hpcstrat.checkpoint.save.saver import Saver
from hpcstrat.checkpoint.save.state_reading import read_state
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.observe.timeline import traced
from hpcstrat.errors import CheckpointError
from hpcstrat.safety import newest_checkpoint

__all__ = ["CheckpointManager"]

_ON_BUSY = ("wait", "skip")
_CREATION = "creation of a CheckpointManager"


class CheckpointManager:
    """Saves a program's state in a folder, and restores it on any number of replicas.

    Collective over all ranks of the strategy, as are the manager's methods.

    A checkpoint in the folder, whichever job saved it, is kept if at least one of
    ``max_to_keep``, ``keep_every``, ``keep_best`` and ``keep_for`` keeps it. The others
    are removed when a new checkpoint is on the disk. The newest intact checkpoint is
    always kept. Damaged checkpoints are not counted, and not removed.

    If replicas consist of several ranks, a variable with ``split`` is one dataset of
    its whole shape, which a restore divides as the program's variable is divided. State
    of a replica is saved once, and must be equal on the replica's ranks.

    Parameters
    ----------
    directory : str or path
        Folder of the files ``ckpt-<step>.h5``; the first save makes it if it is
        missing.
    options : CheckpointOptions, optional
        Which checkpoints to keep, and how to write them. Another object with this name
        is saved, like the other objects.
    max_to_keep : int or None
        This and the next five parameters are the options of the same names, without a
        `CheckpointOptions`, as in older programs. Options that will be added later are
        only in `CheckpointOptions`, so that they take no name from the objects.
    keep_every : int or timedelta, optional
        See `CheckpointOptions`.
    keep_best : KeepBest, optional
        See `CheckpointOptions`.
    keep_for : float or timedelta, optional
        See `CheckpointOptions`.
    max_write_bandwidth : float, optional
        See `CheckpointOptions`.
    independent : bool
        See `CheckpointOptions`.
    **objects : Variable, nested dict or list of Variables, optimizer, or data set
        Objects to save, by their names in the file.

    Raises
    ------
    ValueError
        If an object cannot be saved, a name is reserved, or a parameter is invalid. If
        only some ranks have invalid arguments, the other ranks raise ReplicaError.
    CheckpointError
        If something other than a folder exists at ``directory``.
    RuntimeError
        For a strategy of one replica in a job of several ranks.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        options: Any = None,
        max_to_keep: int | None = 5,
        keep_every: int | timedelta | None = None,
        keep_best: KeepBest | None = None,
        keep_for: float | timedelta | None = None,
        max_write_bandwidth: float | None = None,
        independent: bool = False,
        **objects: Any,
    ) -> None:
        try:
            older = CheckpointOptions(
                max_to_keep=max_to_keep,
                keep_every=keep_every,
                keep_best=keep_best,
                keep_for=keep_for,
                max_write_bandwidth=max_write_bandwidth,
                independent=independent,
            )
            if not isinstance(options, CheckpointOptions):
                objects |= {} if options is None else {"options": options}
                options = older
            elif older != CheckpointOptions():
                raise ValueError(
                    f"expected all options in options={options}, found others beside "
                    "it; move them there"
                )
            folder = Folder(os.path.abspath(os.fspath(directory)))
            known = Objects(objects)
            if not options.independent:
                names = known.variables() or known.names
                require_one_writer(known.strategy, names)
        except Exception as error:
            # Notify the other ranks by the objects' strategy: the manager has none yet.
            strategy_of(objects).all_ranks.collectives.fail(_CREATION, error)
            raise
        self.directory = folder.path
        self._objects, self._options, self._folder = known, options, folder
        self._strategy = strategy = known.strategy
        self.collectives = strategy.all_ranks.collectives
        # Saves and restores share the buffer, and the list of damaged files.
        retention, memory = Retention(folder.path, options), ImageMemory()
        saver = Saver(strategy.all_ranks, folder, retention, memory)
        self._node_memory: NodeMemory | None = None
        self._memory_saver: MemorySaver | None = None
        if options.memory:
            self._node_memory = NodeMemory(strategy.all_ranks, retention)
            self._memory_saver = MemorySaver(
                strategy.all_ranks, saver, self._node_memory
            )
        self._saver = self._memory_saver or saver
        self._due = DueSaves(options, strategy.all_ranks, self._node_memory)
        self._restorer = Restorer(
            *(strategy, folder.path, known, retention, memory),
            node_memory=self._node_memory,
            saver=self._memory_saver,
        )
        # Error of a save in the background, to be raised by the next `wait`.
        self._pending: CheckpointError | None = None
        # Number of asynchronous saves: each compares another part of the variables.
        self._turn = 0
        on_rank_0(strategy, _CREATION, folder.prepare)
        newest_checkpoint.prepare()

    def __enter__(self) -> Self:
        """Return this manager."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the manager; after an error do not, because ranks may be missing."""
        if kind is None:
            self.close()

    @property
    def last_save(self) -> SaveStatistics | None:
        """The cost of the last finished save; None before the first save ends.

        Not collective. A background save counts as finished after the next `save` or
        `wait`.
        """
        return self._saver.last

    @property
    def last_restore(self) -> RestoreReport | None:
        """A report of the last restore; None before the first restore.

        Not collective.
        """
        return self._restorer.last

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the checkpoints that are in the folder now, oldest step first.

        Not collective; ranks may see different contents of the folder.
        """
        return list_checkpoints(self.directory)

    @overload
    def save(  # numpydoc ignore=GL08
        self,
        step: int | None = None,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        asynchronous: bool = False,
        on_busy: Literal["wait"] = "wait",
        overwrite: bool = False,
    ) -> str: ...

    @overload
    def save(  # numpydoc ignore=GL08
        self,
        step: int | None = None,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        asynchronous: bool = False,
        on_busy: str,
        overwrite: bool = False,
    ) -> str | None: ...

    @traced("save", "checkpoint")
    @collective
    def save(
        self,
        step: int | None = None,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        asynchronous: bool = False,
        on_busy: str = "wait",
        overwrite: bool = False,
    ) -> str | None:
        """Save all objects to the disk; if asynchronous, copy them to memory first.

        Collective over the strategy's replicas.

        Parameters
        ----------
        step : int, optional
            Number in the file's name; default: the optimizer's iterations, or one more
            than the newest checkpoint's step.
        metrics : mapping of str to number, optional
            Metrics to store in the file, for ``keep_best``: numbers or arrays of shape
            (), the same on every rank, such as ``{"val_loss": 0.25}``.
        asynchronous : bool
            Whether to return as soon as this replica's share is copied to memory, and
            to write the file in threads. The program may change the objects after the
            return. The checkpoint appears in the folder, without a further call, when
            the shares of all replicas are on the disk. If a thread fails, the next
            `wait`, `close` or `save` raises the error.
        on_busy : str
            While an earlier save is still being written: ``"wait"`` for it, or
            ``"skip"`` this save.
        overwrite : bool
            Whether to replace a checkpoint of this step, and to remove checkpoints of
            later steps when this one is on the disk. Use it after a restore of an older
            checkpoint. Without ``step``, a checkpoint of this step is always replaced.

        Returns
        -------
        str or None
            Path of the checkpoint; None if the save was skipped.

        Raises
        ------
        CheckpointError
            On every rank: if the folder cannot be written, or the disk is full; if
            there is a checkpoint of the given ``step``, or of a later step (a restore
            would choose that one as the newest); if another job saves in the folder; or
            if an earlier save in the background failed. No partial file is left, and
            older checkpoints are unchanged.
        CollectiveError
            On every rank, if ranks save different steps, metrics or variables, or the
            plain state of an object differs between ranks.
        RuntimeError
            On a coordinator, while scheduled functions have not ended.
        DivergenceError
            On every rank, if the copies of a mirrored variable differ. An asynchronous
            save compares a part of the variables (up to 16 MiB, or an eighth of a
            replica's share), and the next asynchronous save compares the next part.
        """
        path, step = self._save(
            *(step, metrics),
            asynchronous=asynchronous,
            on_busy=on_busy,
            overwrite=overwrite,
        )
        if path is not None:
            self._due.saved(step)
        return path

    def _save(
        self,
        step: int | None,
        metrics: Mapping[str, SupportsFloat] | None,
        *,
        asynchronous: bool,
        on_busy: str = "wait",
        overwrite: bool = False,
    ) -> tuple[str | None, int | None]:
        """Save as `save` does; return the path, and the step."""
        began = time.perf_counter()
        # Check arguments before any collective call: an error then reaches all ranks.
        if on_busy not in _ON_BUSY:
            raise ValueError(
                f"expected on_busy to be 'wait' or 'skip', found {on_busy!r}; take one"
            )
        self._strategy.require_idle("save")
        numbers = checked_metrics(metrics)
        if on_busy == "skip" and self._saver.busy():
            return None, step
        # Finish the last save, because two saves would need twice the memory.
        self.wait()
        # After a restore of an older step, ``iterations`` reaches saved steps again.
        replaces = overwrite or step is None
        if step is None:
            step = self._objects.iterations()
        if step is None:
            step = self._newest_step() + 1
        try:
            name = checkpoint_name(step)
        except Exception as error:
            # Notify the other ranks, which would wait in this method's collectives.
            self.collectives.fail("save", error)
            raise
        kind = "asynchronous save" if asynchronous else "save"
        state = read_state(self._objects, self._strategy, step, kind, numbers)
        header, values, variables = state
        # An asynchronous save compares only a part, because comparing takes long.
        turn = self._turn if asynchronous else None
        self._turn += asynchronous
        compare = partial(compare_copies, self._strategy, variables, turn)
        path = os.path.join(self.directory, name)
        order = SaveOptions(
            path=path,
            asynchronous=asynchronous,
            replaces=replaces,
            abandons=overwrite,
            began=began,
            bandwidth=checked_bandwidth(self._options.max_write_bandwidth),
        )
        self._saver.save(order, header, values, compare)
        if self._node_memory is None and self._strategy.all_ranks.rank == 0:
            tell_watcher("progress", step=step)
        return path, step

    @traced("save_if_due", "checkpoint")
    @collective
    def save_if_due(
        self,
        step: int | None = None,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        asynchronous: bool = True,
        overwrite: bool = False,
    ) -> str | None:
        """Save to the disk or to the nodes' memory, if enough steps have passed.

        Collective over the strategy's replicas; call it after each step. A call that
        does nothing makes no collective call, and takes microseconds; but with
        ``"auto"``, the call after the first save broadcasts the interval. The options
        ``every`` and ``memory`` of `CheckpointOptions` decide on the intervals.

        Parameters
        ----------
        step : int, optional
            The same number on all ranks; default: the optimizer's iterations.
        metrics : mapping of str to number, optional
            See `save`.
        asynchronous : bool
            See `save`. A save that is due while an earlier one is being written waits.
        overwrite : bool
            See `save`.

        Returns
        -------
        str or None
            Path of the checkpoint; None if none was due.

        Raises
        ------
        ValueError
            If there is no ``step`` and no optimizer.
        CheckpointError
            As `save`; also if a newer generation of the run was started by watchers.
        CollectiveError
            As `save`.
        """
        wanted = self._objects.iterations() if step is None else step
        if wanted is None:
            raise ValueError(
                "expected a step or an optimizer among the objects, found none; pass "
                "step="
            )
        began, path = time.perf_counter(), None
        if self._due.is_save_due(wanted, self._saver.cost_seconds):
            path, _ = self._save(
                *(wanted, metrics),
                asynchronous=asynchronous,
                overwrite=overwrite or step is None,
            )
            self._due.end_save(wanted, began, self._saver.cost_seconds)
        elif self._due.is_snapshot_due(wanted):
            self._snapshot(wanted)
        else:
            return None
        self._due.end_snapshot(wanted, began)
        return path

    def _snapshot(self, step: int) -> None:
        """Copy all objects to the memory of the nodes."""
        assert self._memory_saver is not None
        state = read_state(self._objects, self._strategy, step, "snapshot", {})
        header, values, _ = state
        self._memory_saver.snapshot(header, values)

    @collective
    def restore(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        allow_cast: bool = False,
        expect_partial: bool = False,
        per_replica: str = "error",
        only: Collection[str] | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> int:
        """Restore all objects, or some of them, from a checkpoint.

        Collective over the strategy's replicas.

        A mirrored variable gets the saved value on every replica. For a SyncOnRead
        variable, the aggregation decides: with ``SUM``, each replica gets a share of
        the saved total (shares of integers add up exactly); with ``MEAN`` or
        ``ONLY_FIRST_REPLICA``, the saved value; with ``NONE``, its own saved row.

        Parameters
        ----------
        path : str or path, optional
            Default: the newest readable checkpoint; damaged checkpoints are skipped
            with a warning.
        allow_cast : bool
            Whether a saved value may have another dtype. Replica 0 logs a warning with
            the names of variables whose dtype cannot represent the saved values.
        expect_partial : bool
            Whether to ignore saved values that belong to no object.
        per_replica : str
            Rule for SyncOnRead variables with ``NONE`` if another number of replicas
            has saved the file: ``"error"``, ``"first"`` (row 0), ``"cycle"`` (replica
            ``r`` gets row ``r`` modulo the number of rows), or ``"init"`` (no change).
        only : collection of str, optional
            Names, as given to the manager, of the objects to restore; default: all.
        rename : mapping of str to str, optional
            Maps a path in the checkpoint, or its beginning up to a ``/``, to the path
            in the program: ``{"variables/net": "variables/model"}``.

        Returns
        -------
        int
            The step of the checkpoint.

        Raises
        ------
        CheckpointError
            On every rank, before any variable changes: if there is no checkpoint; if it
            does not fit (CheckpointMismatchError, also a ValueError, which names all
            mismatches); if it is damaged (CorruptCheckpointError); if a rank does not
            have enough memory, or cannot read the file now.
        RuntimeError
            On a coordinator, while scheduled functions have not ended.
        """
        self._strategy.require_idle("restore")
        self._settle()
        step = self._restore(
            path,
            rename,
            allow_cast=allow_cast,
            expect_partial=expect_partial,
            per_replica=per_replica,
            only=only,
        )
        if step is None:
            found = "none" if os.path.isdir(self.directory) else "no such folder"
            raise CheckpointError(
                f"expected a checkpoint in {self.directory}, found {found}; check the "
                "folder, or call restore_or_initialize"
            )
        return step

    # This method is separate, because `collective` expects errors of arguments before
    # a method's first collective call, and `restore` makes such calls in `_settle`.
    @collective
    def _restore(
        self,
        path: str | os.PathLike[str] | None,
        rename: Mapping[str, str] | None,
        *,
        only: Collection[str] | None,
        **rules: Any,
    ) -> int | None:
        chosen = None if path is None else os.fspath(path)
        names = dict(rename or {})
        known = self._objects.names
        if isinstance(only, str) or not known.issuperset(only or ()):
            raise ValueError(
                f"expected only to be a list of names from {sorted(known)}, found "
                f"{only!r}; pass such a list"
            )
        return self._after_restore(
            self._restorer.restore(chosen, names, only=only, **rules),
            whole=only is None,
        )

    def _after_restore(self, step: int | None, *, whole: bool) -> int | None:
        """Make a snapshot of restored objects, because new nodes have none."""
        if step is not None:
            # Not if some variables do not exist yet, or if the program will set others.
            complete = whole and not self._restorer.defers
            self._due.restart(self._restorer.disk_step, step if complete else None)
            if complete and self._node_memory is not None:
                self._snapshot(step)
        return step

    @collective
    def restore_or_initialize(
        self, init_fn: Callable[[], object] | None = None
    ) -> int | None:
        """Restore the newest checkpoint, if there is one.

        Collective over the strategy's replicas.

        Parameters
        ----------
        init_fn : callable, optional
            Called on every rank if there is no checkpoint.

        Returns
        -------
        int or None
            Step of the checkpoint. None if there is no checkpoint; then only
            ``init_fn`` changes variables.

        Raises
        ------
        CheckpointError
            On every rank, if the checkpoint does not fit.
        """
        self._settle()
        step = self._after_restore(
            self._restorer.restore(
                None, {}, allow_cast=False, expect_partial=False, per_replica="error"
            ),
            whole=True,
        )
        if step is None and init_fn is not None:
            init_fn()
        return step

    @collective
    def latest(self) -> str | None:
        """Return the newest intact checkpoint, without reading its data.

        Collective over the strategy's replicas.

        Returns
        -------
        str or None
            Path of the checkpoint; None if there is none.
        """
        self._settle()
        newest = partial(newest_path, self.directory)
        path: str | None = on_rank_0(
            self._strategy, "search for the newest checkpoint", newest
        )
        return path

    @collective
    def best(self) -> str | None:
        """Return the best intact checkpoint by ``keep_best``, without reading its data.

        Collective over the strategy's replicas.

        Returns
        -------
        str or None
            Path of the checkpoint, for `restore`; None if no checkpoint has the metric
            of ``keep_best``, or if the metric is NaN in all checkpoints.

        Raises
        ------
        ValueError
            On every rank, if the manager was made without ``keep_best``.
        """
        rule = self._options.keep_best
        if rule is None:
            raise ValueError(
                "expected a manager with keep_best, found one without; pass "
                'keep_best=KeepBest("val_loss"), or the like'
            )
        self._settle()
        path: str | None = on_rank_0(
            self._strategy,
            "search for the best checkpoint",
            partial(best_path, self.directory, rule),
        )
        return path

    @collective
    def wait(self) -> None:
        """Wait until the save in the background, if there is one, is on the disk.

        Collective over the strategy's replicas.

        Raises
        ------
        CheckpointError
            On every rank, if the save failed on any rank.
        """
        pending, self._pending = self._pending, None
        try:
            self._saver.finish()
        except CheckpointError as error:
            raise error from pending
        if pending is not None:
            raise pending

    @collective
    def close(self) -> None:
        """Wait for a save in the background, free the buffers, and unlock the folder.

        Collective over the strategy's replicas. The manager can still be used.

        Raises
        ------
        CheckpointError
            On every rank, if a save in the background failed on any rank.
        """
        try:
            self.wait()
        finally:
            self._saver.close()
            self._folder.release()
            if self._node_memory is not None:
                self._node_memory.close()

    @collective
    def complete(self) -> None:
        """Close the manager at the end of the work, and remove its snapshots in memory.

        Collective over the strategy's replicas. After `close`, the snapshots stay in
        the memory of the nodes, for a run that is started again.

        Raises
        ------
        CheckpointError
            On every rank, if a save in the background failed on any rank; the snapshots
            then stay.
        """
        self.close()
        if self._node_memory is not None:
            self._node_memory.remove()

    def _add_optional(self, name: str, thing: Any) -> None:
        """Add an object with plain state that older checkpoints may lack."""
        self._objects.add_optional(name, thing)

    def _nbytes(self) -> int:
        """Return the size in bytes of the variables that exist now."""
        found = self._objects.variables().values()
        return sum(math.prod(whole_shape(v)) * v.dtype.itemsize for v in found)

    def _settle(self) -> None:
        """Finish a background save; keep its error, which the next `wait` raises."""
        try:
            self._saver.finish()
        except CheckpointError as error:
            self._pending = error

    def _newest_step(self) -> int:
        # Only rank 0 lists the folder: if it changes meanwhile, ranks would differ.
        newest = on_rank_0(
            self._strategy,
            "search for the newest step",
            lambda: max((step_of(p) or 0 for p in self.checkpoints), default=0),
        )
        return int(newest)

    def __repr__(self) -> str:
        """Show the names of the saved objects, and the folder."""
        return (
            f"<{type(self).__name__} of {', '.join(sorted(self._objects.names))} in "
            f"{self.directory!r}>"
        )
