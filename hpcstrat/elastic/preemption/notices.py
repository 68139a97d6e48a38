"""Notices that the job will end, which ranks exchange, and the reaction to them."""

from __future__ import annotations

from typing import Any

from hpcstrat.cluster_resolver import batch_job_from_environment
from hpcstrat.engine.logs import get_logger

__all__ = [
    "EXIT_STATUS",
    "Notices",
    "first_save_seconds",
    "margin_seconds",
    "requeue",
]

EXIT_STATUS = 42
"""The exit status of a program that has saved everything before its job ends."""

# Until a save or restore has been timed, a save is estimated to take 5 s plus its bytes
# at 50 MB/s, the speed of a slow shared disk. The speed is divided by 3, because the
# state that optimizers have not yet created can triple the bytes.
_FIRST_SAVE_SECONDS = 5.0
_FIRST_BYTES_PER_SECOND = 50e6 / 3
_LEAST_MARGIN_SECONDS = 10.0
# Factor for the time of the last save, because other jobs may slow down the disk.
_MARGIN = 3.0


class Notices:
    """Notices of all ranks, which travel in the headers of a channel's calls.

    After each call of the channel, all ranks know the same notices. The channel is None
    for one replica. ``who`` says in the log whom the channel connects.
    """

    def __init__(self, channel: Any, who: str = "replica") -> None:
        self._channel, self._who = channel, who
        self._own = ""

    @property
    def is_first(self) -> bool:
        """True on the first rank."""
        channel = self._channel
        return channel is None or bool(channel.topology.replica_id == 0)

    def tell(self, reason: str) -> None:
        """Notify all ranks; signal handlers and threads may call this."""
        # Do no more than assign, because a signal handler or a thread calls this.
        if self._channel is None:
            self._own = reason
        else:
            self._channel.notice = reason

    def told(self) -> dict[int, str]:
        """Return the reasons of the ranks that had notices."""
        if self._channel is None:
            return {0: self._own} if self._own else {}
        told: dict[int, str] = self._channel.noticed
        return told

    def forget(self) -> None:
        """Discard all notices."""
        self._own = ""
        if self._channel is not None:
            self._channel.noticed = {}

    def log(self, num_steps: int) -> None:
        """Log the notices on the first rank."""
        if self.is_first:
            told = sorted(self.told().items())
            get_logger("preemption").warning(
                "the job is about to end (%s); saving after %d steps",
                "; ".join(f"{self._who} {r}: {why}" for r, why in told),
                num_steps,
            )


def first_save_seconds(nbytes: int) -> float:
    """Estimate the seconds of the first save of variables with ``nbytes`` bytes."""
    return _FIRST_SAVE_SECONDS + nbytes / _FIRST_BYTES_PER_SECOND


def margin_seconds(known: float) -> float:
    """Return how long before the job's end to begin a save of ``known`` seconds."""
    return max(_MARGIN * known, known + _LEAST_MARGIN_SECONDS)


def requeue() -> None:
    """Ask the scheduler to start this job again; not collective, for one rank."""
    job = batch_job_from_environment()
    if job is None:
        get_logger("preemption").warning(
            "expected a job of a scheduler to requeue, found none; start it again by "
            "hand"
        )
        return
    try:
        job.requeue()
    except RuntimeError as error:
        get_logger("preemption").warning("everything is saved, but %s", error)
