"""What a manager restores."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping

from hpcstrat.channel.entries import collective
from hpcstrat.checkpoint.file.image import ImageMemory
from hpcstrat.checkpoint.keep.keep_rules import KeepBest
from hpcstrat.checkpoint.keep.retention import Retention
from hpcstrat.checkpoint.objects import Objects
from hpcstrat.checkpoint.outcomes import RestoreReport
from hpcstrat.checkpoint.restore.restorer import Restorer
from hpcstrat.checkpoint.search_methods import SearchMethods
from hpcstrat.errors import CheckpointError

__all__ = ["RestoreMethods"]


class RestoreMethods(SearchMethods):
    """Methods of a manager that restore.

    Parameters
    ----------
    directory : str
        The folder.
    objects : Objects
        What is restored.
    keep_best : KeepBest or None
        What is best.
    retention : Retention
        Is told of damaged files, on replica 0.
    memory : ImageMemory
        For what is read.
    """

    def __init__(
        self,
        directory: str,
        objects: Objects,
        keep_best: KeepBest | None,
        retention: Retention,
        memory: ImageMemory,
    ) -> None:
        super().__init__(directory, objects.strategy, keep_best)
        self._objects = objects
        self._restorer = Restorer(self._strategy, directory, objects, retention, memory)

    @property
    def last_restore(self) -> RestoreReport | None:
        """What the last restore did; None before.

        Not collective.
        """
        return self._restorer.last

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
        """Restore everything from a checkpoint, or some objects.

        Collective over the strategy's replicas.

        A mirrored variable gets the saved value on every replica. A SyncOnRead variable
        with ``SUM`` gets a share of the saved total, integers so that the shares add up
        exactly; with ``MEAN`` and ``ONLY_FIRST_REPLICA`` the value; with ``NONE`` its
        own replica's row.

        Parameters
        ----------
        path : str or path, optional
            Default: the newest checkpoint that can be read; damaged ones are passed
            over with a warning.
        allow_cast : bool
            Whether a saved value may have another dtype.
        expect_partial : bool
            Whether saved values that no object takes are left alone.
        per_replica : str
            What SyncOnRead variables with ``NONE`` do when another number of replicas
            saved them: ``"error"``, ``"first"`` (row 0), ``"cycle"`` (row ``r`` modulo
            the number saved), or ``"init"`` (stay as they are).
        only : collection of str, optional
            Names of the objects that are restored, as they were given to the manager;
            default: all.
        rename : mapping of str to str, optional
            Path in the checkpoint, or its beginning up to a ``/``, to the program's:
            ``{"variables/net": "variables/model"}``.

        Returns
        -------
        int
            The step of the checkpoint.

        Raises
        ------
        CheckpointError
            On every rank, before any variable changes: if there is no checkpoint; if
            it does not fit (CheckpointMismatchError, also a ValueError, which names
            all that does not); if it is damaged (CorruptCheckpointError); if a rank
            has no memory for it, or cannot read it just now.
        """
        self._settle()
        try:
            chosen = None if path is None else os.fspath(path)
            names = dict(rename or {})
            self._check_only(only)
        except Exception as error:
            self.collectives.fail("restore", error)
            raise
        step = self._restorer.restore(
            chosen,
            names,
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

    def _check_only(self, only: Collection[str] | None) -> None:
        known = self._objects.names
        if isinstance(only, str) or not known.issuperset(only or ()):
            raise ValueError(
                f"expected only to hold names of {sorted(known)}, found {only!r}; pass "
                "a list of such names"
            )

    @collective
    def restore_or_initialize(
        self, init_fn: Callable[[], object] | None = None
    ) -> int | None:
        """Restore the newest checkpoint, if there is one.

        Collective over the strategy's replicas.

        Parameters
        ----------
        init_fn : callable, optional
            Called on every rank where there is no checkpoint.

        Returns
        -------
        int or None
            Its step; None where there is none, and variables stay as they are, but for
            what ``init_fn`` does.

        Raises
        ------
        CheckpointError
            On every rank, if the checkpoint does not fit.
        """
        self._settle()
        step = self._restorer.restore(
            None, {}, allow_cast=False, expect_partial=False, per_replica="error"
        )
        if step is None and init_fn is not None:
            init_fn()
        return step
