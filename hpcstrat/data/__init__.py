"""Input: data sets, and their division between replicas."""

from hpcstrat.data.dataset import SHARD_HINT, Dataset, DatasetOptions, mix
from hpcstrat.data.dealing import DealtDataset, StreamDataset
from hpcstrat.data.distributed import (
    DistributedDataset,
    distribute_dataset,
    distribute_from_function,
)
from hpcstrat.data.elements import ArraySpec
from hpcstrat.data.rows import INFINITE, UNKNOWN

__all__ = [
    "INFINITE",
    "SHARD_HINT",
    "UNKNOWN",
    "ArraySpec",
    "Dataset",
    "DatasetOptions",
    "DealtDataset",
    "DistributedDataset",
    "StreamDataset",
    "distribute_dataset",
    "distribute_from_function",
    "mix",
]
