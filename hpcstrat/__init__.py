"""The tf.distribute programming model on MPI: one rank per replica.

Public names are loaded when they are first used: ``import hpcstrat`` alone does not
start MPI, and loads neither mpi4py nor h5py.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from hpcstrat._launchers import LAUNCHERS, is_watcher
from hpcstrat._version import __version__ as __version__
from hpcstrat.engine import scope_watchers

if TYPE_CHECKING:
    from hpcstrat import cluster_resolver as cluster_resolver
    from hpcstrat import data as data
    from hpcstrat import elastic as elastic
    from hpcstrat import errors as errors
    from hpcstrat import layers as layers
    from hpcstrat import metrics as metrics
    from hpcstrat import optimizers as optimizers
    from hpcstrat import testing as testing
    from hpcstrat.checkpoint import CheckpointManager as CheckpointManager
    from hpcstrat.checkpoint import CheckpointOptions as CheckpointOptions
    from hpcstrat.checkpoint import KeepBest as KeepBest
    from hpcstrat.data import Dataset as Dataset
    from hpcstrat.data import DistributedDataset as DistributedDataset
    from hpcstrat.data.iterator import DistributedIterator as DistributedIterator
    from hpcstrat.elastic.preemption import (
        PreemptionCheckpointHandler as PreemptionCheckpointHandler,
    )
    from hpcstrat.elastic.preemption import TerminationConfig as TerminationConfig
    from hpcstrat.engine.arrays.indexed_slices import IndexedSlices as IndexedSlices
    from hpcstrat.engine.calls.cross_device_ops import (
        CrossDeviceOps as CrossDeviceOps,
    )
    from hpcstrat.engine.calls.cross_device_ops import (
        HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    )
    from hpcstrat.engine.calls.cross_device_ops import MpiAllReduce as MpiAllReduce
    from hpcstrat.engine.calls.cross_device_ops import (
        NcclAllReduce as NcclAllReduce,
    )
    from hpcstrat.engine.calls.cross_device_ops import (
        ReductionToOneDevice as ReductionToOneDevice,
    )
    from hpcstrat.engine.calls.cross_device_ops import (
        SharedMemoryAllReduce as SharedMemoryAllReduce,
    )
    from hpcstrat.engine.logs import get_logger as get_logger
    from hpcstrat.engine.logs import print_once as print_once
    from hpcstrat.engine.observe.timeline import trace as trace
    from hpcstrat.engine.options import AutoShardPolicy as AutoShardPolicy
    from hpcstrat.engine.options import CollectiveHints as CollectiveHints
    from hpcstrat.engine.options import CommunicationImplementation as _Implementation
    from hpcstrat.engine.options import CommunicationOptions as CommunicationOptions
    from hpcstrat.engine.options import InputContext as InputContext
    from hpcstrat.engine.options import InputOptions as InputOptions
    from hpcstrat.engine.options import InputReplicationMode as InputReplicationMode
    from hpcstrat.engine.options import ReduceOp as ReduceOp
    from hpcstrat.engine.options import RunOptions as RunOptions
    from hpcstrat.engine.options import ValueContext as ValueContext
    from hpcstrat.engine.options import VariableAggregation as VariableAggregation
    from hpcstrat.engine.options import (
        VariableSynchronization as VariableSynchronization,
    )
    from hpcstrat.engine.settings import Settings as Settings
    from hpcstrat.engine.topology.topology import Topology as Topology
    from hpcstrat.engine.values import DistributedValues as DistributedValues
    from hpcstrat.engine.values import Mirrored as Mirrored
    from hpcstrat.engine.values import PerReplica as PerReplica
    from hpcstrat.errors import CancelledError as CancelledError
    from hpcstrat.errors import CheckpointError as CheckpointError
    from hpcstrat.errors import CollectiveError as CollectiveError
    from hpcstrat.errors import DivergenceError as DivergenceError
    from hpcstrat.errors import HpcstratError as HpcstratError
    from hpcstrat.errors import NonFiniteError as NonFiniteError
    from hpcstrat.errors import RankLostError as RankLostError
    from hpcstrat.errors import ReplicaError as ReplicaError
    from hpcstrat.errors import TopologyError as TopologyError
    from hpcstrat.errors import UnavailableError as UnavailableError
    from hpcstrat.groups import SyncGroups as SyncGroups
    from hpcstrat.integrations.tf_distribute import experimental as experimental
    from hpcstrat.integrations.tf_distribute.absent import TPUStrategy as TPUStrategy
    from hpcstrat.integrations.tf_distribute.function import function as function
    from hpcstrat.losses import compute_average_loss as compute_average_loss
    from hpcstrat.losses import scale_regularization_loss as _scale_regularization_loss
    from hpcstrat.parameter_server import coordinator as coordinator
    from hpcstrat.parameter_server.coordinator.between_graph import (
        ParameterServerStrategyV1 as ParameterServerStrategyV1,
    )
    from hpcstrat.parameter_server.coordinator.strategy import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from hpcstrat.parameter_server.coordinator.strategy import Server as Server
    from hpcstrat.parameter_server.lookup import embedding_lookup as embedding_lookup
    from hpcstrat.parameter_server.server_variables import Rows as Rows
    from hpcstrat.parameter_server.server_variables import (
        ServerVariable as ServerVariable,
    )
    from hpcstrat.parameter_server.server_variables import (
        ShardedVariable as ShardedVariable,
    )
    from hpcstrat.randomness import RandomStreams as RandomStreams
    from hpcstrat.strategies import CentralStorageStrategy as CentralStorageStrategy
    from hpcstrat.strategies import MirroredStrategy as MirroredStrategy
    from hpcstrat.strategies import MultiWorkerMirroredStrategy as _MultiWorker
    from hpcstrat.strategies import OneDeviceStrategy as OneDeviceStrategy
    from hpcstrat.strategies import Strategy as Strategy
    from hpcstrat.strategies import experimental_set_strategy as _set_strategy
    from hpcstrat.strategies import get_loss_reduction as get_loss_reduction
    from hpcstrat.strategies import get_replica_context as get_replica_context
    from hpcstrat.strategies import get_strategy as get_strategy
    from hpcstrat.strategies import has_strategy as has_strategy
    from hpcstrat.strategies import in_cross_replica_context as _in_cross
    from hpcstrat.strategies.extended import StrategyExtended as StrategyExtended
    from hpcstrat.strategies.replica_context import ReplicaContext as ReplicaContext
    from hpcstrat.tools import chaos as chaos
    from hpcstrat.variables import CentralVariable as CentralVariable
    from hpcstrat.variables import MirroredVariable as MirroredVariable
    from hpcstrat.variables import SyncOnReadVariable as SyncOnReadVariable
    from hpcstrat.variables import Variable as Variable
    from hpcstrat.variables import partitioners as partitioners

    # These names are too long for an import of the form ``import X as X`` on one line.
    CommunicationImplementation = _Implementation
    MultiWorkerMirroredStrategy = _MultiWorker
    experimental_set_strategy = _set_strategy
    in_cross_replica_context = _in_cross
    scale_regularization_loss = _scale_regularization_loss


_MODULES = {
    "chaos": "tools.chaos",
    "cluster_resolver": "cluster_resolver",
    "coordinator": "parameter_server.coordinator",
    "data": "data",
    "elastic": "elastic",
    "errors": "errors",
    "experimental": "integrations.tf_distribute.experimental",
    "layers": "layers",
    "metrics": "metrics",
    "optimizers": "optimizers",
    "partitioners": "variables.partitioners",
    "testing": "testing",
}
# The public names that each module defines.
_NAMES = {
    "checkpoint": ("CheckpointManager", "CheckpointOptions", "KeepBest"),
    "engine.calls.cross_device_ops": (
        "CrossDeviceOps",
        "HierarchicalCopyAllReduce",
        "MpiAllReduce",
        "NcclAllReduce",
        "ReductionToOneDevice",
        "SharedMemoryAllReduce",
    ),
    "parameter_server.coordinator.between_graph": ("ParameterServerStrategyV1",),
    "parameter_server.coordinator.strategy": ("ParameterServerStrategy", "Server"),
    "data": ("Dataset", "DistributedDataset"),
    "data.iterator": ("DistributedIterator",),
    "errors": (
        "CancelledError",
        "CheckpointError",
        "CollectiveError",
        "DivergenceError",
        "HpcstratError",
        "NonFiniteError",
        "RankLostError",
        "ReplicaError",
        "TopologyError",
        "UnavailableError",
    ),
    "engine.arrays.indexed_slices": ("IndexedSlices",),
    "groups": ("SyncGroups",),
    "integrations.tf_distribute.absent": ("TPUStrategy",),
    "integrations.tf_distribute.function": ("function",),
    "losses": ("compute_average_loss", "scale_regularization_loss"),
    "engine.options": (
        "AutoShardPolicy",
        "CollectiveHints",
        "CommunicationImplementation",
        "CommunicationOptions",
        "InputContext",
        "InputOptions",
        "InputReplicationMode",
        "ReduceOp",
        "RunOptions",
        "ValueContext",
        "VariableAggregation",
        "VariableSynchronization",
    ),
    "parameter_server.lookup": ("embedding_lookup",),
    "parameter_server.server_variables": ("Rows", "ServerVariable", "ShardedVariable"),
    "elastic.preemption": ("PreemptionCheckpointHandler", "TerminationConfig"),
    "randomness": ("RandomStreams",),
    "engine.settings": ("Settings",),
    "strategies": (
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
    ),
    "strategies.replica_context": ("ReplicaContext",),
    "strategies.extended": ("StrategyExtended",),
    "engine.observe.timeline": ("trace",),
    "engine.topology.topology": ("Topology",),
    "engine.logs": ("get_logger", "print_once"),
    "engine.values": ("DistributedValues", "Mirrored", "PerReplica"),
    "variables": (
        "CentralVariable",
        "MirroredVariable",
        "SyncOnReadVariable",
        "Variable",
    ),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_HOMES, *_MODULES])  # noqa: PLE0605 - names of the table above


def __getattr__(name: str) -> Any:
    """Load and return a public name, when it is first used."""
    if name in _MODULES:
        return importlib.import_module(f"hpcstrat.{_MODULES[name]}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hpcstrat' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hpcstrat.{home}"), name)
    # The value is stored, so that this slow function is called only once for each name.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    # Names that are not loaded yet are included, for completion in a shell.
    return sorted([*globals(), *__all__])


# The strategies are in a layer below the integrations, and know none of them.
scope_watchers.register("keras", "hpcstrat.integrations.keras.scope_models")

# If the launcher's environment variables show a job of several ranks, report this
# rank's state from now on: even before MPI runs, the other ranks then see that this
# rank has started or ended.
if "mpi4py.MPI" in sys.modules or (
    any(os.environ.get(launcher.size, "1") != "1" for launcher in LAUNCHERS)
    and not is_watcher(sys.argv)
):
    importlib.import_module("hpcstrat.safety.start.early").begin()
