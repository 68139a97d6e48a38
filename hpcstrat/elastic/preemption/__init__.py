"""Saving before the job ends, when a signal, Slurm or the program says so."""

from __future__ import annotations

from hpcstrat.elastic.preemption.handler import PreemptionCheckpointHandler
from hpcstrat.elastic.preemption.termination import TerminationConfig

__all__ = ["PreemptionCheckpointHandler", "TerminationConfig"]
