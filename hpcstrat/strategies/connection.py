"""Connections: a topology and its channel, shared by strategies over the same ranks."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.entries import refuse_inner
from hpcstrat.engine.gpu import library
from hpcstrat.engine.observe import job_timeline
from hpcstrat.engine.options import check_on_error
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.topology.children import refuse_children
from hpcstrat.engine.topology.segment import SharedFile
from hpcstrat.engine.topology.survival import is_loss
from hpcstrat.engine.topology.topology import Topology, start_mpi
from hpcstrat.errors import RankLostError, TopologyError
from hpcstrat.safety import exits, lateness
from hpcstrat.safety.divergence.copies import MirroredCopies
from hpcstrat.safety.divergence.equal_inputs import EqualInputs
from hpcstrat.safety.start.creation import Creation
from hpcstrat.safety.watchdog import watchdog
from hpcstrat.strategies.devices import Devices, prepare_mpi


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRequest:
    """Constructor arguments of `MpiStrategy`, compared between ranks by `connect`."""

    kind: str
    comm: Any = None
    replicas_per_worker: Any = None
    on_error: str = "abort"
    on_lost_rank: str = "abort"
    progress_thread: bool = False
    settings: Any = None
    devices: Sequence[str] | None = None
    logical_replicas: Any = None
    # The number of ranks along each axis of a replica.
    replica_shape: Mapping[str, int] = field(default_factory=dict)
    # Arguments that only this kind of strategy has, already checked by its constructor.
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks_per_replica(self) -> int:
        """The number of ranks of a replica."""
        return math.prod(self.replica_shape.values())

    @property
    def survives(self) -> bool:
        """True if the loss of a rank raises an error on the other ranks."""
        return self.on_lost_rank == "raise"

    @property
    def key(self) -> Any:
        """The key in ``_connections``, equal for strategies that share a connection."""
        # Only strategies over all ranks share a connection. A strategy with its own
        # communicator gets its own topology, under a unique key.
        return self.replicas_per_worker if self.comm is None else object()

    def call(self, size: int) -> Call:
        """Return a description of the strategy's creation, with non-default arguments.

        All ranks raise an error if their descriptions differ. ``size`` is the number of
        ranks of the job.
        """
        words = {
            "replicas_per_worker": self.replicas_per_worker,
            "devices": self.devices,
            "replica_shape": self.replica_shape if self.ranks_per_replica > 1 else None,
            "logical_replicas": self.logical_replicas,
            "on_error": self.on_error if self.on_error != "abort" else None,
            "on_lost_rank": "raise" if self.survives else None,
            "progress_thread": self.progress_thread or None,
            **self.own,
        }
        # Settings are left out: all ranks use replica 0's (`_agree_on_settings`).
        given = [f"{name}={value!r}" for name, value in words.items() if value]
        if self.comm is not None:
            own = self.comm.size
            given.insert(0, "comm=..." if own == size else f"comm=... of {own} ranks")
        return describe_call(f"creation of {self.kind}({', '.join(given)})")

    def check(self) -> None:
        """Raise an error for wrong arguments, without communication."""
        check_on_error(self.on_error)
        if self.on_lost_rank not in ("abort", "raise"):
            raise ValueError(
                f"expected on_lost_rank 'abort' or 'raise', found "
                f"{self.on_lost_rank!r}; choose one"
            )
        if self.survives and self.progress_thread:
            raise ValueError(
                "expected no progress thread with on_lost_rank='raise', found one, "
                "which could not handle the loss of a rank; omit one of the two options"
            )
        self._check_replica()
        each = self.replicas_per_worker
        if each is not None and not isinstance(each, numbers.Integral):
            raise TypeError(
                f"expected an integer as replicas_per_worker, found {each!r}; pass "
                "None for one worker per node"
            )
        if each is not None and each < 1:
            raise ValueError(
                f"expected replicas_per_worker >= 1 or None, found {each}; pass None "
                "for one worker per node"
            )
        replicas = self.logical_replicas
        whole = isinstance(replicas, numbers.Integral)
        whole = whole and not isinstance(replicas, bool)
        if replicas is not None and (not whole or replicas < 1):
            raise ValueError(
                f"expected an integer logical_replicas >= 1, found {replicas!r}; leave "
                "it out for one replica on each rank"
            )
        if not isinstance(self.settings, (Settings, type(None))):
            raise TypeError(
                f"expected Settings as settings, found {self.settings!r}; pass "
                "hs.Settings(...), or leave them out"
            )
        if self.comm is not None and not _is_intracomm(self.comm):
            raise TypeError(
                f"expected an intracommunicator of mpi4py as comm, found "
                f"{self.comm!r}; pass one, or leave it out for all ranks of the job"
            )

    def _check_replica(self) -> None:
        """Raise ValueError for options that replicas of several ranks do not have."""
        options = {"on_error": self.on_error, "on_lost_rank": self.on_lost_rank}
        for name, found in options.items():
            if self.ranks_per_replica > 1 and found != "abort":
                raise ValueError(
                    f"expected {name}='abort' with replicas of several ranks, found "
                    f"{found!r}; leave it out, and continue from a checkpoint after an "
                    "error"
                )


def _is_intracomm(comm: Any) -> bool:
    # The test looks for methods, not for a class, because MPI is not loaded yet.
    # ``bool(COMM_NULL)`` is False.
    return bool(comm) and hasattr(comm, "Iallgather") and not comm.Is_inter()


_OF_RUN = "the arrays in the arguments of run"
_OF_MODULE = "the inputs of a replicated PyTorch module"


@dataclass(frozen=True, slots=True)
class ReplicaConnections:
    """The connections of strategies whose replicas have several ranks.

    ``inside`` connects the ranks of this rank's replica, and ``across`` the ranks at
    the same position of all replicas.
    """

    inside: Connection
    across: Connection


class Connection:
    """A topology with its channel, and the number of strategies that use them.

    Collective over ``topology.replica_comm``. ``settings`` are resolved, and equal on
    every rank. The topology is freed when its last strategy is closed.
    """

    def __init__(
        self, topology: Topology, settings: Settings, replicas_per_worker: int | None
    ) -> None:
        self.topology = topology
        self.settings = settings
        self.devices = Devices(topology, settings, replicas_per_worker)
        self._replicas_per_worker = replicas_per_worker
        self.channel: Channel | None = None
        if topology.num_replicas > 1:
            self.channel = Channel(topology, native=bool(settings.native))
        self._record()
        self.copies: MirroredCopies | None = None
        self.users = 0
        # The connections of replicas of several ranks, by the number of these ranks.
        self._divided: dict[int, ReplicaConnections] = {}
        try:
            self._watch(topology, settings)
        except Exception:
            if topology.survives:
                # Another rank may have died, so no collective call is made.
                self.abandon(None)
            elif self.channel is not None:
                job_timeline.stop(topology, together=False)
                exits.unregister(self.channel)
                self.channel.close()
            raise
        self.run_inputs = EqualInputs(topology, 0, _OF_RUN, must_change=True)
        self.module_inputs = EqualInputs(topology, 1, _OF_MODULE, must_change=False)

    def enter_device(self) -> None:
        """Make this rank's GPU the current CUDA device of the calling thread."""
        if self.topology.gpu is not None:
            library.use(self.topology.gpu.index)

    def _watch(self, topology: Topology, settings: Settings) -> None:
        """Start divergence checks, the watchdog, and the reports about late ranks."""
        if self.channel is not None:
            self.copies = MirroredCopies(self.channel, settings)
            if settings.divergence != "off":
                self.channel.position.copy_check = self.copies
            exits.register(self.channel)
            watchdog.register(self.channel, settings)
            lateness.watch(self.channel.arrivals, settings)

    def _record(self) -> None:
        """Start a timeline if the settings request one."""
        channel = self.channel
        comm = None if channel is None else channel.arrivals.comm
        directory = self.settings.timeline or ""
        if not directory and not self.settings.nvtx:
            return
        try:
            job_timeline.start(directory, self.settings, self.topology, comm)
        except OSError:
            # Every rank raises this error, and frees its channel.
            if channel is not None:
                channel.close()
            raise

    def divided(self, ranks_per_replica: int) -> ReplicaConnections:
        """Return the connections of replicas of several ranks; make them once.

        Collective over ``topology.replica_comm``. The ranks of a replica are neighbors
        in rank order. Raises ValueError on every rank if the ranks cannot be divided,
        and TopologyError if the nodes divide them differently at different positions.
        """
        comm, count = self.topology.replica_comm, ranks_per_replica
        if comm.size % count:
            raise ValueError(
                f"expected a number of ranks that is a multiple of {count}, the ranks "
                f"of a replica, found {comm.size} ranks; launch {comm.size // count} x "
                f"{count} = {comm.size // count * count} ranks, or change the replica"
            )
        found = self._divided.get(count)
        if found is None:
            replica, position = divmod(comm.rank, count)
            with self._shared_file() as file:
                found = ReplicaConnections(
                    self._part(replica, file), self._part(position, file)
                )
            self._require_equal_layouts(found, count)
            self._divided[count] = found
        found.inside.users += 1
        found.across.users += 1
        return found

    def _require_equal_layouts(self, found: ReplicaConnections, count: int) -> None:
        """Raise TopologyError if workers have other replicas at other positions.

        The ranks at each position then add values of replicas in other orders, and the
        results on the ranks of a replica have different bits.
        """
        across = found.across.topology
        layout = across.replica_comm.allgather(across.worker_id)
        layouts = self.topology.replica_comm.allgather(layout)
        position = next((p for p in range(count) if layouts[p] != layouts[0]), None)
        if position is None:
            return
        for connection in (found.inside, found.across):
            connection.users = 1
            connection.close(None)
        raise TopologyError(
            "expected the same replicas on each node at all positions of a replica, "
            f"found nodes {layouts[0]} of replicas at position 0 and "
            f"{layouts[position]} at position {position}; give each node a multiple of "
            f"{count} ranks, the ranks of a replica"
        )

    @contextlib.contextmanager
    def _shared_file(self) -> Iterator[SharedFile]:
        """Yield a file for segments of all ranks of this node; collective."""
        whole: Any = self.topology.replica_comm
        node = whole.Split_type(self.topology.mpi.COMM_TYPE_SHARED, whole.rank)
        try:
            with contextlib.closing(SharedFile(node)) as file:
                yield file
        finally:
            node.Free()

    def _part(self, color: int, file: SharedFile) -> Connection:
        """Return a connection of the ranks that pass the same number; collective."""
        whole = self.topology.replica_comm
        comm: Any = whole.Split(color, self.topology.replica_id)
        each = self._replicas_per_worker
        try:
            topology = Topology(comm, replicas_per_worker=each, file=file)
        finally:
            comm.Free()
        for name in ("gpu", "shares_gpu", "mpi_reads_gpu", "nccl"):
            setattr(topology, name, getattr(self.topology, name))
        return Connection(topology, self.settings, each)

    def leave_divided(self, ranks_per_replica: int) -> None:
        """Undo one call of `divided`; collective over ``topology.replica_comm``."""
        found = self._divided[ranks_per_replica]
        if found.inside.users == 1:
            del self._divided[ranks_per_replica]
        found.inside.close(None)
        found.across.close(None)

    def close(self, key: Any) -> None:
        """Free the topology and the channel, if no other strategy uses them.

        Collective over ``topology.replica_comm``. ``key`` is from `connect`."""
        self.users -= 1
        if self.users:
            return
        self._forget(key)
        # A program with few steps has not yet compared its inputs.
        for inputs in (self.run_inputs, self.module_inputs):
            inputs.look()
            inputs.stop()
        # `lateness.conclude` and `job_timeline.stop` need an open channel.
        if self.channel is not None:
            lateness.conclude(self.channel.arrivals)
        job_timeline.stop(self.topology)
        if self.channel is not None:
            # `exits` and the watchdog read the channel until it is unregistered.
            exits.unregister(self.channel)
            watchdog.unregister(self.channel)
            self.channel.close()
        self.topology.close()

    def abandon(self, key: Any) -> None:
        """Free all resources without collective calls, because ranks have died."""
        self._forget(key)
        for inputs in (self.run_inputs, self.module_inputs):
            inputs.stop()
        job_timeline.stop(self.topology, together=False)
        if self.channel is not None and not self.channel.closed:
            lateness.forget(self.channel.arrivals)
            exits.unregister(self.channel)
            watchdog.unregister(self.channel)
            self.channel.abandon()
        self.topology.abandon()

    def _forget(self, key: Any) -> None:
        # The key may also be that of another connection: of the connection that this
        # one divides, or of a newer one of the remaining ranks.
        if _connections.get(key) is self:
            del _connections[key]


# Strategies over all ranks share a topology, so that an error is raised if ranks make
# collective calls of two strategies in different orders.
_connections: dict[Any, Connection] = {}


def num_calls() -> int:
    """Return the number of collective calls of this rank on open connections."""
    channels = [connection.channel for connection in _connections.values()]
    return sum(channel.num_calls for channel in channels if channel is not None)


def _agree_on_settings(topology: Topology, given: Settings) -> Settings:
    """Return replica 0's settings; if these are wrong, raise the error on all ranks."""
    found: Settings | Exception | None = None
    if topology.replica_id == 0:
        try:
            found = given.resolved()
        except (TypeError, ValueError) as error:
            found = error
    # Settings may differ between hosts, because environment variables do.
    found = topology.replica_comm.bcast(found)
    if isinstance(found, Exception):
        raise found from found.__cause__
    assert found is not None
    return found


def as_loss(topology: Topology, error: Exception) -> Exception:
    """Return a RankLostError if an error reports a dead rank, else the error itself."""
    if not topology.survives or not is_loss(topology.mpi, error, topology.replica_comm):
        return error
    found = RankLostError(
        "expected all ranks to form a strategy, found that one was lost; form another "
        "one of the remaining ranks"
    )
    found.__cause__ = error
    return found


def _formed(request: StrategyRequest) -> Connection:
    """Return a new connection: a topology and its channel."""
    each = request.replicas_per_worker
    topology = Topology(
        request.comm, replicas_per_worker=each, survives=request.survives
    )
    try:
        settings = _agree_on_settings(topology, request.settings or Settings())
        return Connection(topology, settings, each)
    except Exception as error:
        found = as_loss(topology, error)
        if isinstance(found, RankLostError):
            topology.abandon()
        else:
            topology.close()
        raise found from found.__cause__


def _job_channel() -> Channel | None:
    """Return an open channel over all ranks of the job, or None."""
    for connection in _connections.values():
        if connection.channel is not None and connection.topology.spans_job:
            return connection.channel
    return None


def _meet(
    creation: Creation, request: StrategyRequest, problem: Exception | None
) -> None:
    """Wait for all ranks; raise an error on all ranks if their strategies differ."""
    mpi = start_mpi()
    world = Topology.world()
    good = request.comm is None or _is_intracomm(request.comm)
    comm = request.comm if good and request.comm is not None else world
    call = describe_call(f"creation of {request.kind}")
    if problem is None:
        call = request.call(world.size)
    channel = _job_channel()
    if channel is None or comm.size < world.size:
        creation.meet(
            mpi, comm, call, problem, survives=request.survives, guesses=not good
        )
        return
    # From here on, the channel's watchdog, not ``creation``, reports missing ranks.
    creation.pause(True)
    if problem is not None:
        channel.failures.fail(call.text, problem)
        raise problem
    # The open channel also detects a rank that makes another collective call.
    channel.failures.meet()
    channel.agree(call)
    creation.pause(False)


def subset(ranks: Sequence[int]) -> Any:
    """Return a communicator of some ranks of the job, in the order of ``ranks``.

    Collective over these ranks. If a rank is missing, the wait ends with an error that
    names it, as in the creation of a strategy.
    """
    with Creation("creation of a group", Settings()) as creation:
        creation.join(start_mpi(), ranks, "creation of a group")
        return Topology.subset(ranks)


def connect(
    request: StrategyRequest, problem: Exception | None = None
) -> tuple[Any, Connection]:
    """Return the connection that a strategy requests, and its key.

    Collective over ``request.comm``; the start of MPI is collective over all ranks of
    the job. The connection's number of users increases by one. ``problem`` is an error
    that prevents this rank from making the strategy: this rank raises it, and the other
    ranks raise a ReplicaError.
    """
    refuse_children()
    refuse_inner(f"the constructor of {request.kind}")
    given = request.settings if isinstance(request.settings, Settings) else Settings()
    with Creation(f"creation of {request.kind}", given) as creation:
        if problem is None:
            try:
                request.check()
            except Exception as error:
                problem = error
        # `prepare_mpi` is called before MPI starts, because MPI looks for a GPU only
        # during its start; see `gpu.binding.foresee`.
        if problem is None:
            prepare_mpi(given, request.devices)
        world = start_mpi(threads=bool(request.progress_thread)).COMM_WORLD
        if world.size > 1:
            # From here on an uncaught error on one rank ends the job.
            exits.install()
        _meet(creation, request, problem)
        key = request.key
        return key, _found(key, request)


def _found(key: Any, request: StrategyRequest) -> Connection:
    """Return the open connection for this request, or a new one."""
    connection, settings = _connections.get(key), request.settings
    if connection is not None and connection.channel is not None:
        # Pending calls end first: the calls below use the same communicators.
        connection.channel.pending.drain()
    if connection is None:
        connection = _formed(request)
        _connections[key] = connection
    elif connection.topology.survives is not request.survives:
        raise ValueError(
            "expected on_lost_rank as in the strategies that are open, found "
            f"{request.on_lost_rank!r}; pass the same to all, or close them first"
        )
    # Replica 0 compares its settings and sends the result, so that either all ranks
    # raise the error or none does.
    elif connection.topology.replica_comm.bcast(
        settings is not None and settings.differ_from(connection.settings)
    ):
        raise ValueError(
            "expected the settings of the strategies that are open, "
            f"{connection.settings}, found {settings}; close them first, or pass the "
            "settings to the first strategy"
        )
    elif connection.channel is not None:
        connection.channel.failures.meet()
    connection.users += 1
    if request.progress_thread and connection.channel is not None:
        try:
            connection.channel.pending.use_thread(connection.enter_device)
        except TopologyError:
            # All ranks raise this error, so all ranks close the connection.
            connection.close(key)
            raise
    return connection
