"""Unsupported classes of tf.distribute, kept so that ``isinstance`` checks work."""

from __future__ import annotations

from typing import Any

from hpcstrat.strategies import Strategy

__all__ = ["PreemptionWatcher", "TPUStrategy"]


class TPUStrategy(Strategy):
    """Stand-in for TensorFlow's ``TPUStrategy``; raises an error with advice.

    Not collective.

    Parameters
    ----------
    *args : object
        Not used.
    **kwargs : object
        Not used.

    Raises
    ------
    NotImplementedError
        Always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            "expected replicas on CPUs or GPUs, found TPUStrategy, and no TPU is "
            "supported; use MultiWorkerMirroredStrategy"
        )


class PreemptionWatcher:
    """Stand-in for TensorFlow's watcher of TPUs; raises an error with advice.

    Not collective.

    Raises
    ------
    NotImplementedError
        Always.
    """

    def __init__(self) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            "expected a PreemptionCheckpointHandler, which takes notice of signals and "
            "of Slurm's end of the job, found PreemptionWatcher, which is for TPUs; "
            "use that one, with a termination_watcher_fn where notices come otherwise"
        )
