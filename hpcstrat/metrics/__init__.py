"""Metrics: averages over the examples of all replicas since the last reset.

Each replica updates its own totals, without communication. In cross-replica context,
one reduction sums the totals of all replicas: of one metric in `Metric.result`, of
several metrics in `results`. An average therefore counts every example once, even if
the replicas' batches differ in size. Names, updates and weights follow
``tf.keras.metrics``; totals are float64. `Log` writes metrics to a file that contains
each step only once, even if the job is requeued.
"""

from hpcstrat.metrics.averages import Mean, MeanMetricWrapper, Sum
from hpcstrat.metrics.energy import EnergyMeter
from hpcstrat.metrics.group import MetricGroup, results
from hpcstrat.metrics.log import Log
from hpcstrat.metrics.log_file import read_log
from hpcstrat.metrics.log_sinks import MLflow, TensorBoard
from hpcstrat.metrics.metric import Metric
from hpcstrat.metrics.predictions import (
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    MeanAbsoluteError,
    MeanSquaredError,
    RootMeanSquaredError,
    SparseCategoricalAccuracy,
)
from hpcstrat.metrics.progress_bar import Progress
from hpcstrat.metrics.weights_and_biases import WeightsAndBiases

__all__ = [
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "EnergyMeter",
    "Log",
    "MLflow",
    "Mean",
    "MeanAbsoluteError",
    "MeanMetricWrapper",
    "MeanSquaredError",
    "Metric",
    "MetricGroup",
    "Progress",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "Sum",
    "TensorBoard",
    "WeightsAndBiases",
    "read_log",
    "results",
]
