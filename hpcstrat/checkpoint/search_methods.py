"""What is in a manager's folder: found by replica 0, the same for all."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

from hpcstrat.checkpoint.file.schema import list_checkpoints, step_of
from hpcstrat.checkpoint.keep.keep_rules import KeepBest
from hpcstrat.checkpoint.keep.retention import best_path
from hpcstrat.checkpoint.keep.search import newest_path
from hpcstrat.checkpoint.on_first import on_first
from hpcstrat.typing import Replicas

__all__ = ["SearchMethods"]


class SearchMethods:
    """Methods of a manager that look for checkpoints.

    Parameters
    ----------
    directory : str
        The folder.
    strategy : Strategy
        Whose replicas.
    keep_best : KeepBest or None
        What is best.
    """

    def __init__(
        self, directory: str, strategy: Replicas, keep_best: KeepBest | None
    ) -> None:
        self.directory = directory
        self._strategy = strategy
        self.collectives = strategy.collectives
        self._keep_best = keep_best

    @abstractmethod
    def _settle(self) -> None:
        """Finish a save in the background; `wait` raises what went wrong with it."""

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the checkpoints that are in the folder now, oldest step first.

        Not collective; ranks may see different moments.
        """
        return list_checkpoints(self.directory)

    def latest(self) -> str | None:
        """Return the newest checkpoint that is whole; its data are not read.

        Collective over the strategy's replicas.

        Returns
        -------
        str or None
            Its path; None where there is none.
        """
        self._settle()
        newest = partial(newest_path, self.directory)
        path: str | None = on_first(
            self._strategy, "search for the newest checkpoint", newest
        )
        return path

    def best(self) -> str | None:
        """Return the best checkpoint that is whole; its data are not read.

        Collective over the strategy's replicas.

        Returns
        -------
        str or None
            Its path, for `restore`; None where no checkpoint has the metric of
            ``keep_best``, or it is NaN in all.

        Raises
        ------
        ValueError
            On every rank, if the manager was made without ``keep_best``.
        """
        rule = self._keep_best
        if rule is None:
            raise self._refuse(
                "search for the best checkpoint",
                "expected a manager with keep_best, found one without; pass "
                'keep_best=KeepBest("val_loss"), or the like',
            )
        self._settle()
        path: str | None = on_first(
            self._strategy,
            "search for the best checkpoint",
            partial(best_path, self.directory, rule),
        )
        return path

    def _refuse(self, what: str, text: str) -> ValueError:
        """Tell the other ranks of an argument that cannot be; return the error."""
        error = ValueError(text)
        self.collectives.fail(what, error)
        return error

    def _newest_step(self) -> int:
        newest = on_first(
            self._strategy,
            "search for the newest step",
            lambda: max((step_of(p) or 0 for p in self.checkpoints), default=0),
        )
        return int(newest)
