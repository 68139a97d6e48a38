"""The names of ``tf.distribute.experimental``, available as ``hs.experimental``."""

from __future__ import annotations

from typing import Any

from hpcstrat.elastic.preemption import PreemptionCheckpointHandler, TerminationConfig
from hpcstrat.engine.options import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
    ValueContext,
)
from hpcstrat.integrations.tf_distribute import rpc
from hpcstrat.integrations.tf_distribute.absent import PreemptionWatcher, TPUStrategy
from hpcstrat.parameter_server import coordinator
from hpcstrat.parameter_server.coordinator.strategy import ParameterServerStrategy
from hpcstrat.strategies import CentralStorageStrategy
from hpcstrat.strategies import MultiWorkerMirroredStrategy as _Newer
from hpcstrat.variables import partitioners

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
    "rpc",
]

CollectiveCommunication = CommunicationImplementation


class _AlsoNewer(type):
    """Lets instances of the newer class pass ``isinstance``, as in tf.distribute."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Newer)


class MultiWorkerMirroredStrategy(_Newer, metaclass=_AlsoNewer):
    """`hpcstrat.MultiWorkerMirroredStrategy` with TensorFlow's older arguments.

    Collective over ``comm``.

    Parameters
    ----------
    communication : CommunicationImplementation or str
        A hint about the implementation, as in tf.distribute.
    cluster_resolver : object, optional
        Stored for programs that read it; not used, because MPI defines the ranks.
    **options : object
        Other arguments of `hpcstrat.MultiWorkerMirroredStrategy`, by name.
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = "auto",
        cluster_resolver: Any = None,
        **options: Any,
    ) -> None:
        hint = CommunicationOptions(implementation=communication)
        super().__init__(cluster_resolver, hint, **options)
