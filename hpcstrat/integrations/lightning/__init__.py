"""Callbacks of Lightning's Trainer: saving before the job ends, ordered predictions."""

from hpcstrat.integrations.lightning.ordered_predictions import OrderedPredictions
from hpcstrat.integrations.lightning.preemption_checkpoint import PreemptionCheckpoint

__all__ = ["OrderedPredictions", "PreemptionCheckpoint"]
