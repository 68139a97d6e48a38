"""Horovod's layer of batch normalization over all ranks."""

from __future__ import annotations

from typing import Any

from hpcstrat.integrations.horovod.torch.basics import submissions
from hpcstrat.integrations.torch import batch_norm

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(batch_norm.SyncBatchNorm):
    """Batch normalization with the mean and variance of all ranks' rows, also on CPUs.

    In training, and in evaluation without running statistics, calling the layer is
    collective over all ranks.
    """

    @property
    def _home(self) -> Any:  # type: ignore[override]
        return submissions()
