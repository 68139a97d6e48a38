"""Functions that a coordinator sends to workers, and what they return.

One rank runs the program and schedules functions; others hold variables
(`hpcstrat.parameter_server`) or run the functions.
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

# Both are names of tf.distribute, which spells it differently in two modules.
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
