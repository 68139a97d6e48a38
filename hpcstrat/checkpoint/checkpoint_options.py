"""`CheckpointOptions`, which say how a `CheckpointManager` keeps and writes state."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from hpcstrat.checkpoint.interval import Interval, checked_interval
from hpcstrat.checkpoint.keep.retention import KeepBest, KeepRules
from hpcstrat.checkpoint.save.pending_save import checked_bandwidth

__all__ = ["CheckpointOptions"]


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(KeepRules):
    """Options of a `CheckpointManager`: which checkpoints it keeps, and how it writes.

    Not collective.

    Parameters
    ----------
    max_to_keep : int or None
        Number of the newest checkpoints to keep; None keeps all, despite other rules.
    keep_every : int or timedelta, optional
        Number: keep forever the checkpoints whose step is a multiple of it. Timedelta:
        keep forever the oldest checkpoint, and then checkpoints at least this time
        apart.
    keep_best : KeepBest, optional
        Keep the best checkpoints by a metric that is passed to `save`.
    keep_for : float or timedelta, optional
        Keep checkpoints younger than this; a number is in seconds. The age counts from
        the start of the save, which the file records.
    max_write_bandwidth : float, optional
        Highest mean rate, in bytes per second, at which all replicas together write an
        asynchronous save. The limit ends when a rank waits for the save. Default: no
        limit, which can slow down training and other jobs.
    independent : bool
        Allow a strategy of one replica in a job of several ranks; each rank then needs
        its own folder.
    every : int or "auto"
        Number of steps between saves to the disk by `CheckpointManager.save_if_due`.
        ``"auto"`` chooses it from the measured cost of saves, and from the number of
        times that the run was lost.
    memory : bool, int or "auto"
        Whether to keep snapshots in the memory of the nodes, from which `restore` reads
        in a run that is started again on these nodes. Number: steps between snapshots
        by `CheckpointManager.save_if_due`. True: as ``"auto"``, which chooses it as
        ``every`` does. Each save to the disk also makes a snapshot.

    Raises
    ------
    ValueError
        If an option is invalid.
    """

    max_to_keep: int | None = 5
    keep_every: int | timedelta | None = None
    keep_best: KeepBest | None = None
    keep_for: float | timedelta | None = None
    max_write_bandwidth: float | None = None
    independent: bool = False
    every: Interval = "auto"
    memory: bool | Interval = False

    def __post_init__(self) -> None:
        """Raise ValueError for invalid values."""
        super().__post_init__()
        checked_bandwidth(self.max_write_bandwidth)
        checked_interval("every", self.every)
        if type(self.memory) is not bool:
            checked_interval("memory", self.memory)
