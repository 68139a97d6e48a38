"""Checkpoints: one HDF5 file each, restored on any number of replicas."""

from hpcstrat.checkpoint.manager import CheckpointManager
from hpcstrat.checkpoint.report import RestoreReport, SaveStatistics
from hpcstrat.checkpoint.retention import KeepBest

__all__ = ["CheckpointManager", "KeepBest", "RestoreReport", "SaveStatistics"]
