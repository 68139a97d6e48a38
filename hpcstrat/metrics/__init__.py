"""Metrics: averages over all examples that any replica has seen since the last reset.

Each replica adds to totals of its own, without communication; `Metric.result` in
cross-replica context adds them up in one reduction, and `results` does it for several
metrics. So an average counts every example once, however the replicas' batches differ
in size. Names, updates and weights follow ``tf.keras.metrics``; sums are float64.
`Log` writes them down, once for each step also when the job is requeued.
"""

from hpcstrat.metrics.averages import Mean, MeanMetricWrapper, Sum
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

__all__ = [
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
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
    "read_log",
    "results",
]
