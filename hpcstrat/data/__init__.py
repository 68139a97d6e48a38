"""Input: data sets, and their division between replicas."""

from hpcstrat.data.dataset import SHARD_HINT, Dataset, mix
from hpcstrat.data.dealing import DealtDataset, StatefulDataset, StreamDataset
from hpcstrat.data.distributed import (
    DistributedDataset,
    distribute_dataset,
    distribute_from_function,
)
from hpcstrat.data.elements import ArraySpec
from hpcstrat.data.lineage import DatasetOptions
from hpcstrat.data.measured_costs import MeasuredCosts
from hpcstrat.data.prediction_writer import PredictionWriter
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
    "MeasuredCosts",
    "PredictionWriter",
    "StatefulDataset",
    "StreamDataset",
    "distribute_dataset",
    "distribute_from_function",
    "mix",
]
