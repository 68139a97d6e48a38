"""What the strategies on MPI share: who owns topology and channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcstrat.collectives.call import describe_call
from hpcstrat.collectives.header import Channel
from hpcstrat.cross_device_ops import CrossDeviceOps
from hpcstrat.errors import TopologyError
from hpcstrat.options import CommunicationOptions
from hpcstrat.replica_collectives import Collectives
from hpcstrat.safety import exits
from hpcstrat.settings import Settings
from hpcstrat.strategies.base import Strategy, check_on_error
from hpcstrat.topology import Topology, start_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiStrategy"]


class _Connection:
    """A topology with its channel, and how many strategies use them."""

    def __init__(self, topology: Topology, settings: Settings) -> None:
        self.topology = topology
        self.settings = settings
        self.channel = Channel(topology) if topology.num_replicas > 1 else None
        self.users = 0
        if self.channel is not None:
            exits.register(self.channel)

    def close(self, key: Any) -> None:
        """Free everything, when no other strategy uses it."""
        self.users -= 1
        if self.users:
            return
        _connections.pop(key, None)
        if self.channel is not None:
            exits.unregister(self.channel)
            self.channel.close()
        self.topology.close()


# Strategies over all ranks share a topology, so that calls of two strategies in
# different order are noticed like any other mismatch.
_connections: dict[Any, _Connection] = {}


def _agree_on_settings(topology: Topology, given: Settings) -> Settings:
    """Return replica 0's settings, or raise its error on all replicas."""
    found: Settings | Exception | None = None
    if topology.replica_id == 0:
        try:
            found = given.resolved()
        except (TypeError, ValueError) as error:
            found = error
    found = topology.replica_comm.bcast(found)
    if isinstance(found, Exception):
        raise found
    assert found is not None
    return found


def _agree_on_creation(kind: str) -> None:
    """Notice a rank that makes a strategy alone, while there is a way to."""
    for connection in _connections.values():
        if connection.channel is not None and connection.topology.spans_job:
            connection.channel.agree(describe_call(f"creation of {kind}"))
            return


class MpiStrategy(Strategy):
    """A strategy with one MPI rank per replica.

    Collective over ``comm``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        The ranks; default: all of the job.
    replicas_per_worker : int, optional
        See `Topology`.
    cross_device_ops : CrossDeviceOps, optional
        How buffers are summed; default: chosen by the library.
    communication_options : CommunicationOptions, optional
        Defaults of every call.
    device : str
        This replica's device.
    on_error : str
        See `Strategy`.
    progress_thread : bool
        Take started reductions further in a thread.
    settings : Settings, optional
        How the strategy watches over its ranks; what is not given comes from the
        environment.

    Raises
    ------
    ValueError
        If the environment has a ``HPCSTRAT_`` variable that is unknown, or another
        strategy over the same ranks is open with other settings. On every rank.
    """

    def __init__(
        self,
        *,
        comm: MPI.Intracomm | None = None,
        replicas_per_worker: int | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        device: str = "CPU:0",
        on_error: str = "abort",
        progress_thread: bool = False,
        settings: Settings | None = None,
    ) -> None:
        check_on_error(on_error)
        start_mpi(threads=progress_thread)
        if comm is None or comm.size == start_mpi().COMM_WORLD.size:
            own = "" if comm is None else ", comm=..."
            own += ", progress_thread=True" if progress_thread else ""
            _agree_on_creation(f"{type(self).__name__}({replicas_per_worker}{own})")
        self._key: Any = replicas_per_worker if comm is None else object()
        connection = _connections.get(self._key)
        if connection is None:
            topology = Topology(comm, replicas_per_worker=replicas_per_worker)
            try:
                agreed = _agree_on_settings(topology, settings or Settings())
            except Exception:
                topology.close()
                raise
            connection = _Connection(topology, agreed)
            _connections[self._key] = connection
        elif settings is not None and settings.differ_from(connection.settings):
            raise ValueError(
                f"expected the settings of the strategies that are open, "
                f"{connection.settings}, found {settings}; close them first, or give "
                "the settings to the first"
            )
        connection.users += 1
        if progress_thread and connection.channel is not None:
            try:
                connection.channel.use_progress_thread()
            except TopologyError:
                connection.close(self._key)
                raise
        self._connection = connection
        self._closed = False
        collectives = Collectives(
            connection.channel, cross_device_ops, communication_options
        )
        super().__init__(
            collectives, connection.topology.replica_id, device, on_error=on_error
        )

    @property
    def settings(self) -> Settings:
        """How this strategy watches over its ranks; the same on every replica."""
        return self._connection.settings

    @property
    def topology(self) -> Topology:
        """The communicators of the replicas; freed by `close`."""
        return self._connection.topology

    def close(self) -> None:
        """Free the communicators, when this is the last strategy that uses them.

        Collective over the strategy's replicas. A second call does nothing.

        Raises
        ------
        CollectiveError
            If another rank does something else. On every rank.
        """
        if not self._closed:
            self.collectives.barrier("close")
            self._closed = True
            self.collectives.close()
            self._connection.close(self._key)
