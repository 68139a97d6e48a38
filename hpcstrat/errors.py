"""Exceptions that hpcstrat raises.

Every message is one sentence: it names the expected value and the value found, and
after a ``;`` says what to change. Wrong arguments raise the built-in ``ValueError``,
``TypeError`` and ``RuntimeError``, as in tf.distribute.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CancelledError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CollectiveError",
    "CorruptCheckpointError",
    "DivergenceError",
    "HpcstratError",
    "NonFiniteError",
    "OutOfRangeError",
    "RankLostError",
    "ReplicaError",
    "TopologyError",
    "UnavailableError",
]


class HpcstratError(Exception):
    """Base class of all exceptions that hpcstrat defines."""


class TopologyError(HpcstratError, RuntimeError):
    """The ranks, the MPI library or the GPUs of the job do not meet a requirement."""


class CollectiveError(HpcstratError, RuntimeError):
    """Ranks disagree on a collective call; raised on every rank of the call.

    Parameters
    ----------
    message : str
        A message that says which call each rank made.
    ranks : sequence of int
        The ranks of the job that caused the error, if they are known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __str__(self) -> str:
        """Return the message without quotes.

        A subclass may also be a KeyError, whose ``__str__`` would quote the message."""
        return str(self.args[0])


class ReplicaError(CollectiveError):
    """Another replica failed; raised on the replicas that did not fail.

    If the failed replica raised a built-in exception such as ValueError or OSError,
    this error is also an instance of that class: one ``except`` catches both errors.
    """


class DivergenceError(CollectiveError):
    """Values that must be equal on all replicas differ; raised on every replica.

    The values are copies of a mirrored variable, or were passed to
    ``Strategy.check_equal``.

    Parameters
    ----------
    message : str
        A message with the variable, the element, and the different values.
    ranks : sequence of int
        The replicas whose value differs from the value of most replicas; for copies on
        the ranks of one replica, the ranks of the job.
    variable : str
        Name of the first variable, in order of creation, whose copies differ. For
        ``check_equal``, path of the first different leaf, such as ``tree['bias'][0]``.
    element : tuple of int
        Index of the first element that differs in this variable or leaf.
    """

    def __init__(
        self,
        message: str,
        ranks: Sequence[int] = (),
        variable: str = "",
        element: Sequence[int] = (),
    ) -> None:
        super().__init__(message, ranks)
        self.variable = variable
        self.element = tuple(element)


class RankLostError(CollectiveError):
    """The process of a rank has died; raised on every remaining rank.

    This error is raised with ``on_lost_rank="raise"``, and by `hpcstrat.elastic.run`.
    The strategy can make no more collective calls. ``ranks`` has the replicas that are
    known to be lost; it may be empty on a rank that another rank has notified.
    """


class NonFiniteError(HpcstratError, FloatingPointError):
    """A combined gradient is NaN or infinite; raised on every replica.

    Raised only with the setting ``non_finite="raise"``, before any variable is changed.
    """


class CheckpointError(HpcstratError):
    """A checkpoint could not be written or read; raised on every rank."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint does not match the program's objects; nothing was restored."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint file is damaged or incomplete."""


class OutOfRangeError(HpcstratError):
    """An iterator has no more elements."""


class CancelledError(HpcstratError):
    """A scheduled function was not run, because an earlier function had failed."""


class UnavailableError(HpcstratError):
    """A parameter server, or a worker whose data is needed, was lost."""
