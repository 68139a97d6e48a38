"""Reports on finished saves (their cost) and restores (their results)."""

from __future__ import annotations

from dataclasses import dataclass

from hpcstrat.errors import CheckpointMismatchError

__all__ = ["RestoreReport", "SaveStatistics"]


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """Report of a restore: the checkpoint, the time, and the values that were not used.

    Parameters
    ----------
    path : str
        Path of the checkpoint.
    step : int
        Step of the checkpoint.
    num_replicas : int
        Number of replicas that saved the checkpoint.
    verified : bool
        Whether the values' hashes were checked; files of format version 1 have none.
    nbytes : int
        Bytes that this replica read.
    seconds : float
        Time of the restore on this replica.
    read_seconds : float
        Part of ``seconds`` in which this replica read its part and checked hashes.
    unused : tuple of str
        Paths of saved values that no object of the program has received.
    passed_over : tuple of str
        Paths of newer checkpoints that were skipped, because they are damaged.
    """

    path: str
    step: int
    num_replicas: int
    verified: bool
    nbytes: int
    seconds: float
    read_seconds: float
    unused: tuple[str, ...]
    passed_over: tuple[str, ...]

    def assert_consumed(self) -> None:
        """Check that the program has received every saved value.

        Not collective; the result is the same on every rank.

        Raises
        ------
        CheckpointMismatchError
            If a value is unused; the message names the unused values.
        """
        if self.unused:
            raise CheckpointMismatchError(
                f"expected the program to restore all of {self.path}, found that no "
                f"object restored {', '.join(self.unused)}; give the manager the "
                "objects of these names"
            )


@dataclass(frozen=True, slots=True)
class SaveStatistics:
    """The cost of a save.

    Parameters
    ----------
    path : str
        Path of the checkpoint.
    step : int
        Step of the checkpoint.
    nbytes : int
        Size of the file.
    asynchronous : bool
        Whether the file was written in the background.
    blocking_seconds : float
        Time until ``save`` returned on this replica.
    copy_seconds : float
        Part of ``blocking_seconds`` for copying this replica's share of the values.
    total_seconds : float
        Time from the call of ``save`` until the checkpoint was on the disk, on replica
        0; includes delays because of ``max_write_bandwidth``.
    hash_seconds, write_seconds, flush_seconds : float
        Time that the slowest replica's threads spent hashing, writing and flushing.
    bytes_per_second : float
        ``nbytes`` divided by ``total_seconds``.
    """

    path: str
    step: int
    nbytes: int
    asynchronous: bool
    blocking_seconds: float
    copy_seconds: float
    total_seconds: float
    hash_seconds: float
    write_seconds: float
    flush_seconds: float
    bytes_per_second: float
