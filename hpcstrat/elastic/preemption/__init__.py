"""Saving before a job ends, after a notice by a signal, scheduler or function."""

from __future__ import annotations

from hpcstrat.elastic.preemption.handler import PreemptionCheckpointHandler
from hpcstrat.elastic.preemption.termination import TerminationConfig

__all__ = ["PreemptionCheckpointHandler", "TerminationConfig"]
