"""The coordinator, which sends functions to workers, and classes for their results.

One rank, the coordinator, runs the program and schedules functions. Some of the other
ranks hold variables (`hpcstrat.parameter_server`), and the remaining ranks, the
workers, run the functions.
"""

from hpcstrat.parameter_server.coordinator.coordinator import ClusterCoordinator
from hpcstrat.parameter_server.coordinator.remote_values import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
    RemoteValue,
)
from hpcstrat.parameter_server.coordinator.worker import (
    experimental_get_current_worker_index,
)

# tf.distribute uses both spellings, each in another module.
PerWorkerValue = PerWorkerValues

__all__ = [
    "ClusterCoordinator",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]
