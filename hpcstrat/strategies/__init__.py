"""Strategies: classes that assign a program's replicas to the ranks of the job."""

from hpcstrat.strategies.base import Strategy
from hpcstrat.strategies.central_storage import CentralStorageStrategy
from hpcstrat.strategies.current import (
    experimental_set_strategy,
    get_loss_reduction,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from hpcstrat.strategies.mirrored import MirroredStrategy
from hpcstrat.strategies.multi_worker import MultiWorkerMirroredStrategy
from hpcstrat.strategies.one_device import OneDeviceStrategy

__all__ = [
    "CentralStorageStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "Strategy",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
