"""Reports of what a save cost, and of what a restore did."""

from __future__ import annotations

from dataclasses import dataclass

from hpcstrat.errors import CheckpointMismatchError

__all__ = ["RestoreReport", "SaveStatistics"]


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The values that a restore took from a checkpoint, and those that it left.

    Parameters
    ----------
    path : str
        The checkpoint.
    step : int
        Its step.
    num_replicas : int
        Number of replicas that saved it.
    verified : bool
        Whether hashes were compared; files of format version 1 have none.
    nbytes : int
        Bytes that this replica read.
    seconds : float
        Time that it took.
    read_seconds : float
        Part of it: reading this replica's part and comparing its hashes.
    unused : tuple of str
        Saved values that nothing took.
    passed_over : tuple of str
        Damaged checkpoints that are newer.
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
        """Check that all that was saved has been taken.

        Not collective; the same on every rank.

        Raises
        ------
        CheckpointMismatchError
            If not, naming what is left.
        """
        if self.unused:
            raise CheckpointMismatchError(
                f"expected the program to take all of {self.path}, found that nothing "
                f"took {', '.join(self.unused)}; give the manager the objects of these "
                "names"
            )


@dataclass(frozen=True, slots=True)
class SaveStatistics:
    """The cost of a save.

    Parameters
    ----------
    path : str
        The checkpoint.
    step : int
        Its step.
    nbytes : int
        Size of the file.
    asynchronous : bool
        Whether it was written in the background.
    blocking_seconds : float
        Time until ``save`` returned on this replica.
    copy_seconds : float
        Part of it: copying this replica's share of the values.
    total_seconds : float
        From the call until the checkpoint was durable, on replica 0; with what
        ``max_write_bandwidth`` made it wait.
    hash_seconds, write_seconds, flush_seconds : float
        Time that the threads of the slowest replica spent in each.
    bytes_per_second : float
        ``nbytes`` by ``total_seconds``.
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
