"""Exceptions of hpcstrat.

Every message is one sentence that says what was expected and what was found, then
``;`` and what to do. Errors of arguments are the built-in ``ValueError``,
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
    """Base class of the errors that only hpcstrat raises."""


class TopologyError(HpcstratError, RuntimeError):
    """The ranks that were started do not form what the strategy needs."""


class CollectiveError(HpcstratError, RuntimeError):
    """Ranks disagree on a collective call; raised on every rank of the call.

    Parameters
    ----------
    message : str
        What each rank called.
    ranks : sequence of int
        The ranks that caused the error, where they are known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __str__(self) -> str:
        """Return the message, which some mixed-in classes would quote."""
        return str(self.args[0])


class ReplicaError(CollectiveError):
    """Another replica failed; raised on the replicas that did not.

    Where that replica raised a ValueError, OSError or the like, this error is of that
    class, too, so that the same ``except`` clause catches both.
    """


class DivergenceError(CollectiveError):
    """Copies that must be equal have come to differ; raised on every replica.

    They are copies of a mirrored variable, or values given to ``Strategy.check_equal``.

    Parameters
    ----------
    message : str
        Names the variable and the element, with the values.
    ranks : sequence of int
        The replicas whose copies differ from those of most.
    variable : str
        Name of the first variable that differs, in order of creation; or of the leaf of
        a tree, such as ``tree['bias'][0]``.
    element : tuple of int
        Index of its first element that differs.
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
    """The process of a rank has died; raised on every rank that is left.

    It is raised with ``on_lost_rank="raise"``, and by `hpcstrat.elastic.run`. The
    strategy can make no more calls. ``ranks`` are the replicas known to be lost; a
    survivor that learns of the loss from another may not know them.
    """


class NonFiniteError(HpcstratError, FloatingPointError):
    """A combined gradient is NaN or infinite; raised on every replica.

    Only with the setting ``non_finite="raise"``; no variable has changed.
    """


class CheckpointError(HpcstratError):
    """A checkpoint could not be written or read; raised on every rank."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint does not fit the program; nothing was restored."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint file is damaged or incomplete."""


class OutOfRangeError(HpcstratError):
    """An iterator is at its end."""


class CancelledError(HpcstratError):
    """A scheduled function was not run, because one before it had failed."""


class UnavailableError(HpcstratError):
    """A parameter server, or data that a lost worker had, no longer exists."""
