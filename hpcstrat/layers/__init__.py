"""Layers whose result depends on the whole global batch, for NumPy code.

The method of batch normalization is from Ioffe and Szegedy, Batch normalization:
accelerating deep network training by reducing internal covariate shift, ICML 2015,
arXiv:1502.03167.
"""

from hpcstrat.layers.moments import sync_batch_moments, sync_batch_moments_backward
from hpcstrat.layers.normalization import SyncBatchNormalization

__all__ = [
    "SyncBatchNormalization",
    "sync_batch_moments",
    "sync_batch_moments_backward",
]
