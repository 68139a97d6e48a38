"""Classes of tf.distribute without a counterpart, so that ``isinstance`` works."""

from __future__ import annotations

from typing import Any

from hpcstrat.strategies import Strategy

__all__ = ["PreemptionWatcher", "TPUStrategy"]


class TPUStrategy(Strategy):
    """Replicas on TPUs: an error that says what to use instead.

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
        """Refuse to be made."""
        raise NotImplementedError(
            "expected replicas on CPUs or GPUs, found TPUStrategy, and no TPU is "
            "supported; use MultiWorkerMirroredStrategy"
        )


class PreemptionWatcher:
    """TensorFlow's watch for notices to TPUs: an error that says what to use.

    Not collective.

    Raises
    ------
    NotImplementedError
        Always.
    """

    def __init__(self) -> None:
        """Refuse to be made."""
        raise NotImplementedError(
            "expected a PreemptionCheckpointHandler, which takes notice of signals and "
            "of Slurm's end of the job, found PreemptionWatcher, which is for TPUs; "
            "use that one, with a termination_watcher_fn where notices come otherwise"
        )
