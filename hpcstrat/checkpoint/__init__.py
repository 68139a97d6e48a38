"""Checkpoints, each in one HDF5 file, for restoring on any number of replicas."""

from hpcstrat.checkpoint.checkpoint_options import CheckpointOptions
from hpcstrat.checkpoint.keep.retention import KeepBest
from hpcstrat.checkpoint.manager import CheckpointManager
from hpcstrat.checkpoint.outcomes import RestoreReport, SaveStatistics
from hpcstrat.engine.typing import SupportsCheckpoint, SupportsDeferredCheckpoint

__all__ = [
    "CheckpointManager",
    "CheckpointOptions",
    "KeepBest",
    "RestoreReport",
    "SaveStatistics",
    "SupportsCheckpoint",
    "SupportsDeferredCheckpoint",
]
