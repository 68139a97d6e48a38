"""What is saved, when, and how it comes back on another number of replicas."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, SupportsFloat, overload

from hpcstrat.channel.entries import collective
from hpcstrat.checkpoint.arguments import require_one_writer, strategy_of
from hpcstrat.checkpoint.file.image import ImageMemory
from hpcstrat.checkpoint.file.schema import Header, checkpoint_name
from hpcstrat.checkpoint.keep.folder import Folder
from hpcstrat.checkpoint.keep.keep_rules import KeepBest, KeepRules, checked_metrics
from hpcstrat.checkpoint.keep.retention import Retention
from hpcstrat.checkpoint.objects import Objects
from hpcstrat.checkpoint.on_first import on_first
from hpcstrat.checkpoint.outcomes import SaveStatistics
from hpcstrat.checkpoint.restore_methods import RestoreMethods
from hpcstrat.checkpoint.save.pending_save import Order, checked_bandwidth
from hpcstrat.checkpoint.save.saver import Saver
from hpcstrat.errors import CheckpointError
from hpcstrat.observe.job_timeline import measure
from hpcstrat.observe.timeline import traced
from hpcstrat.safety.divergence.divergence import check_mirrored
from hpcstrat.variables import read_all

__all__ = ["CheckpointManager"]

_ON_BUSY = ("wait", "skip")
_CREATION = "creation of a CheckpointManager"


class CheckpointManager(RestoreMethods):
    """Saves a program's state in a folder, and restores it on any number of replicas.

    Collective over the strategy's replicas, as are its methods.

    A checkpoint is kept if any of ``max_to_keep``, ``keep_every``, ``keep_best`` and
    ``keep_for`` asks for it, whichever job saved it. Others are removed when a new one
    is on the disk. The newest whole checkpoint always stays; damaged ones do not count,
    and stay too.

    Parameters
    ----------
    directory : str or path
        Where the files ``ckpt-<step>.h5`` are; the first save makes it where it is
        missing.
    max_to_keep : int or None
        How many of the newest to keep; None keeps all, whatever the others say.
    keep_every : int or timedelta, optional
        Keep for ever those whose step is a multiple of this number, or those that are
        at least this time apart, from the oldest one in the folder on.
    keep_best : KeepBest, optional
        Keep the best by a metric that is given to `save`.
    keep_for : float or timedelta, optional
        Keep those younger than this; a number is in seconds. What counts is the time in
        the file at which its save began.
    max_write_bandwidth : float, optional
        Bytes per second that all replicas together write in asynchronous saves while
        nobody waits for them, as a mean over a save; default: as many as the disk
        takes, which can slow down training and other jobs.
    independent : bool
        Allow a strategy of one replica in a job of several ranks; each rank then needs
        a folder of its own.
    **objects : Variable, nested dict or list of Variables, optimizer, or data set
        What is saved, by the name that it has in the file.

    Raises
    ------
    ValueError
        If an object cannot be saved, its name is reserved, or one of the above is no
        such value. Where only some ranks were given such, the others raise
        ReplicaError.
    CheckpointError
        If there is something else in place of the folder.
    RuntimeError
        For a strategy of one replica in a job of several ranks.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = 5,
        keep_every: int | timedelta | None = None,
        keep_best: KeepBest | None = None,
        keep_for: float | timedelta | None = None,
        max_write_bandwidth: float | None = None,
        independent: bool = False,
        **objects: Any,
    ) -> None:
        try:
            self._bandwidth = checked_bandwidth(max_write_bandwidth)
            rules = KeepRules(max_to_keep, keep_every, keep_best, keep_for)
            folder = Folder(os.path.abspath(os.fspath(directory)))
            known = Objects(objects)
            if not independent:
                names = known.variables() or known.names
                require_one_writer(known.strategy, names)
        except Exception as error:
            strategy_of(objects).collectives.fail(_CREATION, error)
            raise
        retention, memory = Retention(folder.path, rules), ImageMemory()
        super().__init__(folder.path, known, keep_best, retention, memory)
        self._saver = Saver(self._strategy, folder, retention, memory)
        self._pending: CheckpointError | None = None
        # Which part of the variables the next asynchronous save compares.
        self._turn = 0
        on_first(self._strategy, _CREATION, folder.prepare)

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it; after an error, which may be this rank's alone, do not wait."""
        if kind is None:
            self.close()

    @property
    def last_save(self) -> SaveStatistics | None:
        """What the last save that is done has cost; None before.

        Not collective. One in the background counts from the next `save` or `wait` on.
        """
        return self._saver.last

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
        """Save everything; on return it is on the disk, or a copy is in memory.

        Collective over the strategy's replicas.

        Parameters
        ----------
        step : int, optional
            Number in the file's name; default: the optimizer's iterations, or one more
            than the newest checkpoint's.
        metrics : mapping of str to number, optional
            Stored in the file, for ``keep_best``: numbers or arrays of shape (), the
            same on every rank, such as ``{"val_loss": 0.25}``.
        asynchronous : bool
            Whether to return as soon as this replica's share is copied; threads then
            write it. What is saved may change at once. Without a further call, the
            checkpoint appears when all replicas' shares are on the disk; `wait`,
            `close` and the next `save` raise what went wrong.
        on_busy : str
            While an earlier save is still being written: ``"wait"`` for it, or
            ``"skip"`` this one.
        overwrite : bool
            Whether a checkpoint of this step is replaced, as it is without ``step``,
            and those of later steps are removed once this one is on the disk: after
            going back to an older one.

        Returns
        -------
        str or None
            Path of the checkpoint; None where it was skipped.

        Raises
        ------
        CheckpointError
            On every rank: if the folder cannot be written, the disk is full, or there
            is a checkpoint of the ``step`` given, or of a later one, which would be
            taken for the newest; or if an earlier save in the background failed.
            Nothing is left behind, and older checkpoints are as before.
        CollectiveError
            On every rank, if ranks save different steps, metrics or variables.
        DivergenceError
            On every rank, if the copies of a mirrored variable have come to differ. An
            asynchronous save compares up to 16 MiB of them, or an eighth of a replica's
            share, and the next one the next part.
        """
        began = time.perf_counter()
        numbers = self._checked(on_busy, metrics)
        if on_busy == "skip" and self._saver.busy():
            return None
        self.wait()
        replaces = overwrite or step is None
        if step is None:
            step = self._objects.iterations()
        if step is None:
            step = self._newest_step() + 1
        try:
            variables = self._objects.variables()
            iterators, python = self._objects.states()
            name = checkpoint_name(step)
        except Exception as error:
            self.collectives.fail("save", error)
            raise
        kind = "asynchronous save" if asynchronous else "save"
        given = f"metrics {numbers} and " if numbers else ""
        self.collectives.barrier(
            f"{kind} of step {step} with {given}{self._objects.describe(variables)}"
        )
        # Clocks drift: a timeline measures them where the ranks meet now and then.
        channel = self.collectives.channel
        measure(None if channel is None else channel.topology)
        # Comparing all variables may take longer than copying this replica's share.
        turn = self._turn if asynchronous else None
        self._turn += asynchronous
        compare = partial(check_mirrored, self._strategy, variables, turn)
        read = read_all(list(variables.values()), own_rows=True)
        values = dict(zip(variables, read, strict=True))
        header = Header(step, self._strategy.num_replicas_in_sync)
        header.entries = self._objects.entries(variables, values)
        header.iterators, header.python = iterators, python
        header.metrics = numbers
        path = os.path.join(self.directory, name)
        order = Order(path, asynchronous, replaces, overwrite, began, self._bandwidth)
        self._saver.save(order, header, values, compare)
        return path

    def _checked(
        self, on_busy: str, metrics: Mapping[str, SupportsFloat] | None
    ) -> dict[str, float]:
        """Refuse what cannot be, on all ranks; return the metrics."""
        if on_busy not in _ON_BUSY:
            raise self._refuse(
                "save",
                f"expected on_busy to be 'wait' or 'skip', found {on_busy!r}; take one",
            )
        try:
            return checked_metrics(metrics)
        except Exception as error:
            self.collectives.fail("save", error)
            raise

    @collective
    def wait(self) -> None:
        """Wait until a save in the background is on the disk, if there is one.

        Collective over the strategy's replicas.

        Raises
        ------
        CheckpointError
            On every rank, if it failed on any.
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
        """Wait as `wait` does, and give back the memory of saves and restores.

        Collective over the strategy's replicas. The manager can still be used.

        Raises
        ------
        CheckpointError
            On every rank, if a save in the background failed on any.
        """
        try:
            self.wait()
        finally:
            self._saver.close()

    def _settle(self) -> None:
        try:
            self._saver.finish()
        except CheckpointError as error:
            self._pending = error
