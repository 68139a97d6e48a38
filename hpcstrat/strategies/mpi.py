"""What the strategies on MPI share: who owns topology and channel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hpcstrat.collectives.call import describe_call
from hpcstrat.collectives.header import Channel
from hpcstrat.cross_device_ops import CrossDeviceOps
from hpcstrat.errors import RankLostError, TopologyError
from hpcstrat.options import CommunicationOptions, check_on_error
from hpcstrat.replica_collectives import Collectives
from hpcstrat.safety import exits, lateness, recording, watchdog
from hpcstrat.safety.copies import Copies
from hpcstrat.settings import Settings
from hpcstrat.strategies.base import Strategy
from hpcstrat.strategies.devices import Devices, prepare_mpi
from hpcstrat.survival import is_loss
from hpcstrat.topology import Topology, start_mpi
from hpcstrat.variables import MirroredVariable

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiStrategy"]


class _Connection:
    """A topology with its channel, and how many strategies use them."""

    def __init__(
        self, topology: Topology, settings: Settings, replicas_per_worker: int | None
    ) -> None:
        self.topology = topology
        self.settings = settings
        self.devices = Devices(topology, settings, replicas_per_worker)
        self.channel = Channel(topology) if topology.num_replicas > 1 else None
        self._record()
        self.copies: Copies | None = None
        self.users = 0
        try:
            self._watch(topology, settings)
        except Exception:
            if topology.survives:
                # Another rank may have died meanwhile.
                self.abandon(None)
            elif self.channel is not None:
                recording.stop(topology, together=False)
                exits.unregister(self.channel)
                self.channel.close()
            raise

    def _watch(self, topology: Topology, settings: Settings) -> None:
        """Let all that looks after the ranks begin."""
        if self.channel is not None:
            self.copies = Copies(self.channel, settings)
            if settings.divergence != "off":
                self.channel.copy_check = self.copies
            exits.register(self.channel)
            watchdog.register(self.channel, settings)
            lateness.watch(self.channel.arrivals, settings)

    def _record(self) -> None:
        """Begin the timeline of the settings."""
        channel = self.channel
        comm = None if channel is None else channel.arrivals.comm
        directory = self.settings.timeline or ""
        if not directory and not self.settings.nvtx:
            return
        try:
            recording.start(directory, self.settings, self.topology, comm)
        except OSError:
            if channel is not None:
                channel.close()
            raise

    def close(self, key: Any) -> None:
        """Free everything, when no other strategy uses it."""
        self.users -= 1
        if self.users:
            return
        _connections.pop(key, None)
        if self.channel is not None:
            lateness.conclude(self.channel.arrivals)
        recording.stop(self.topology)
        if self.channel is not None:
            exits.unregister(self.channel)
            watchdog.unregister(self.channel)
            self.channel.close()
        self.topology.close()

    def abandon(self, key: Any) -> None:
        """Let go of everything on this rank: others have died."""
        if _connections.get(key) is self:
            del _connections[key]
        recording.stop(self.topology, together=False)
        if self.channel is not None and not self.channel.closed:
            lateness.forget(self.channel.arrivals)
            exits.unregister(self.channel)
            watchdog.unregister(self.channel)
            self.channel.abandon()
        self.topology.abandon()


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


def _connect(
    comm: Any, replicas_per_worker: int | None, given: Settings, survives: bool
) -> _Connection:
    """Form a topology and its channel."""
    topology = Topology(
        comm, replicas_per_worker=replicas_per_worker, survives=survives
    )
    try:
        settings = _agree_on_settings(topology, given)
        return _Connection(topology, settings, replicas_per_worker)
    except Exception as error:
        if survives and is_loss(topology.mpi, error, topology.replica_comm):
            topology.abandon()
            raise RankLostError(
                "expected all ranks to form a strategy, found that one was lost; form "
                "another of those that are left"
            ) from error
        if isinstance(error, RankLostError):
            topology.abandon()
        else:
            topology.close()
        raise


def _agree_on_creation(kind: str) -> None:
    """Notice a rank that makes a strategy alone, while there is a way to."""
    for connection in _connections.values():
        if connection.channel is not None and connection.topology.spans_job:
            connection.channel.meet()
            connection.channel.agree(describe_call(f"creation of {kind}"))
            return


def _survives(on_lost_rank: str, progress_thread: bool) -> bool:
    """Whether the loss of a rank is to be an error on the others."""
    if on_lost_rank not in ("abort", "raise"):
        raise ValueError(
            f"expected on_lost_rank 'abort' or 'raise', found {on_lost_rank!r}; choose "
            "one"
        )
    if on_lost_rank == "raise" and progress_thread:
        raise ValueError(
            "expected no progress thread with on_lost_rank='raise', found one, in "
            "which the loss of a rank could not be handled; leave one of them out"
        )
    return on_lost_rank == "raise"


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
    on_error : str
        See `Strategy`.
    progress_thread : bool
        Take started reductions further in a thread.
    on_lost_rank : str
        See `MultiWorkerMirroredStrategy`.
    settings : Settings, optional
        How the strategy watches over its ranks; what is not given comes from the
        environment.
    devices : sequence of str, optional
        What the program has named; subclasses give them to the ranks.

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
        on_error: str = "abort",
        progress_thread: bool = False,
        on_lost_rank: str = "abort",
        settings: Settings | None = None,
        devices: Sequence[str] | None = None,
    ) -> None:
        check_on_error(on_error)
        survives = _survives(on_lost_rank, progress_thread)
        prepare_mpi(settings or Settings(), devices)
        world = start_mpi(threads=progress_thread).COMM_WORLD
        if world.size > 1:
            # An uncaught error ends the job also while its first strategy is formed.
            exits.install()
        if comm is None or comm.size == world.size:
            own = "" if comm is None else ", comm=..."
            own += ", progress_thread=True" if progress_thread else ""
            own += f", on_lost_rank={on_lost_rank}" if survives else ""
            _agree_on_creation(f"{type(self).__name__}({replicas_per_worker}{own})")
        self._key: Any = replicas_per_worker if comm is None else object()
        connection = _connections.get(self._key)
        if connection is None:
            given = settings or Settings()
            connection = _connect(comm, replicas_per_worker, given, survives)
            _connections[self._key] = connection
        elif connection.topology.survives is not survives:
            raise ValueError(
                f"expected on_lost_rank as in the strategies that are open, found "
                f"{on_lost_rank!r}; give all the same, or close them first"
            )
        elif connection.topology.replica_comm.bcast(
            settings is not None and settings.differ_from(connection.settings)
        ):
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
        super().__init__(collectives, connection.topology.replica_id, on_error=on_error)

    def _bind(self, names: Sequence[str] | None = None) -> None:
        """Give each rank its device; every strategy does so when it is made."""
        try:
            self._devices = self._connection.devices.bind(names)
        except Exception as error:
            topology = self.topology
            lost = topology.survives and is_loss(
                topology.mpi, error, topology.replica_comm
            )
            if lost or isinstance(error, RankLostError):
                self.abandon()
            else:
                self.close()
            if not lost:
                raise
            raise RankLostError(
                "expected all ranks to form a strategy, found that one was lost; form "
                "another of those that are left"
            ) from error
        self.device = self._devices[self.topology.worker_comm.rank]
        named = names is not None or self.settings.device == "gpu"
        self.puts_on_gpu = named and self.device.startswith("GPU:")

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices of this worker's replicas."""
        return self._devices

    @property
    def settings(self) -> Settings:
        """How this strategy watches over its ranks; the same on every replica."""
        return self._connection.settings

    def register(self, variable: MirroredVariable) -> None:
        """Take a variable among those whose copies are compared; for variables alone.

        Logically collective over the strategy's replicas.

        Parameters
        ----------
        variable : MirroredVariable
            New.
        """
        if self._connection.copies is not None:
            self._connection.copies.add(variable)

    def expect_slow(self, seconds: float) -> AbstractContextManager[None]:
        """Let the others wait longer for this replica, without a warning.

        Not collective: any replica may call it, alone or with others, in any context.
        ``timeout_seconds`` of a call holds nevertheless.

        Parameters
        ----------
        seconds : float
            How long the block may take. ``warn_seconds`` and ``limit_seconds`` of those
            that wait for this replica, and of its own waits, begin to count at the end
            of the block, or when this is over, whichever comes first.

        Returns
        -------
        context manager
            They nest: the one that lasts longest counts.

        Raises
        ------
        ValueError
            If ``seconds`` is not positive and finite.
        """
        super().expect_slow(seconds)
        return watchdog.expect_slow(seconds)

    def check_divergence(self) -> None:
        """Compare all copies of all mirrored variables now.

        Collective over the strategy's replicas. The variables are those of all open
        strategies over the same ranks.

        Raises
        ------
        DivergenceError
            If copies of a variable differ. On every replica.
        RuntimeError
            In replica context.
        """
        self._require_cross("check_divergence")
        if self._connection.copies is not None:
            self._connection.copies.check()

    @property
    def topology(self) -> Topology:
        """The communicators of the replicas; freed by `close`."""
        return self._connection.topology

    @property
    def lost_ranks(self) -> tuple[int, ...] | None:
        """The replicas that are known to have died; None while no loss was noticed."""
        channel = self._connection.channel
        error = None if channel is None else channel.deaths.error
        return None if error is None else error.ranks

    def abandon(self) -> None:
        """Let go of everything but the communicators, also where ranks have died.

        Not collective. All strategies over these ranks can make no call afterwards,
        and ranks that are in one raise RankLostError where the loss of ranks is
        survived.
        """
        self._closed = True
        self._connection.abandon(self._key)

    def close(self) -> None:
        """Free the communicators, when this is the last strategy that uses them.

        Collective over the strategy's replicas; not collective after a loss was
        noticed. A second call does nothing.

        Raises
        ------
        CollectiveError
            If another rank does something else. On every rank.
        """
        if not self._closed and self.lost_ranks is not None:
            self.abandon()
        if not self._closed:
            if self._connection.channel is not None:
                self._connection.channel.meet()
            self.collectives.barrier("close")
            self._closed = True
            self.collectives.close()
            if self._connection.copies is not None:
                self._connection.copies.leave_out(self)
            self._connection.close(self._key)
