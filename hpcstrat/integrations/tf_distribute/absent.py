"""Unsupported classes of tf.distribute, kept so that ``isinstance`` checks work."""

from __future__ import annotations

from typing import Any

from hpcstrat.strategies import Strategy

__all__ = ["PreemptionWatcher", "TPUStrategy"]


class TPUStrategy(Strategy):
    """Raise an error that names the strategy to use instead of ``TPUStrategy``.

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
    """Raise an error that names the class to use instead of TensorFlow's TPU watcher.

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
