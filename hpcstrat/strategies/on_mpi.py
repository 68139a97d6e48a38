"""The base class of strategies whose replicas are MPI ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from hpcstrat.engine.calls.cross_device_ops import (
    CrossDeviceOps,
    ReductionToOneDevice,
)
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.logical.replica_sums import require_no_wire_dtype
from hpcstrat.engine.logical.threads import fix_threads
from hpcstrat.engine.options import CommunicationOptions, VariableOptions
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.engine.typing import Tree
from hpcstrat.errors import DivergenceError, RankLostError, TopologyError
from hpcstrat.safety.divergence.copies import MirroredCopies
from hpcstrat.safety.divergence.first_difference import ADVICE, Names
from hpcstrat.safety.divergence.step_digests import StepDigests
from hpcstrat.safety.watchdog import watchdog
from hpcstrat.strategies.all_ranks import AllRanks
from hpcstrat.strategies.base import Strategy
from hpcstrat.strategies.connection import (
    Connection,
    ReplicaConnections,
    StrategyRequest,
    as_loss,
    connect,
)
from hpcstrat.strategies.inside import Inside, parse_shape
from hpcstrat.strategies.logical_devices import LogicalDevices
from hpcstrat.strategies.own_reductions import HookedCollectives
from hpcstrat.strategies.update_backends import Copies, PositionCopies
from hpcstrat.strategies.whole_values import WholeCollectives
from hpcstrat.variables import DividedVariable, MirroredVariable


def _require_ops(ops: Any) -> None:
    if not isinstance(ops, (CrossDeviceOps, type(None))):
        raise TypeError(
            f"expected a CrossDeviceOps as cross_device_ops, found {ops!r:.80}; pass "
            "hs.ReductionToOneDevice(), for example, or leave it out"
        )


def _require_any_order(ops: CrossDeviceOps | None, options: Any) -> None:
    """Refuse ops and options whose sums would depend on the number of ranks."""
    if options is not None:
        require_no_wire_dtype(options)
    found = None
    if isinstance(ops, ReductionToOneDevice) and ops.combines:
        found = "an accumulation_fn"
    elif ops is not None and ops.overrides():
        found = f"the hooks of {type(ops).__name__}"
    if found is not None:
        raise ValueError(
            "expected sums with logical replicas, which are added in the order of a "
            f"tree, found {found}; leave it out, or use merge_call and all_gather"
        )


def _problem(request: StrategyRequest, ops: Any, options: Any) -> Exception | None:
    """Return the error in the options of calls, or None."""
    try:
        _require_ops(ops)
        Collectives(None, ops, options)
        if request.logical_replicas is not None:
            _require_any_order(ops, options)
        if request.ranks_per_replica > 1 and ops is not None and ops.overrides():
            raise ValueError(
                "expected an algorithm of the library with replicas of several ranks, "
                f"found the hooks of {type(ops).__name__}; leave them out"
            )
    except Exception as error:
        return error
    return None


def checked_shape(ranks: Any, shape: Any) -> tuple[Exception | None, dict[str, int]]:
    """Return the error in arguments for the ranks of a replica, or None, and its shape.

    The constructor raises the error after it has notified the other ranks."""
    try:
        return None, parse_shape(ranks, shape)
    except (TypeError, ValueError) as error:
        return error, parse_shape(None, None)


class MpiStrategy(LogicalDevices, Strategy):
    """Base class of strategies whose replicas run on MPI ranks.

    Collective over ``comm``. The arguments are described at
    `MultiWorkerMirroredStrategy`; ``arguments`` are fields of `StrategyRequest`, among
    them ``own``: arguments that only this subclass has, equal on all ranks. ``problem``
    is an error in the arguments that the subclass found on this rank; the constructor
    raises it after it has notified the other ranks.

    Every rank raises ValueError if the environment has an unknown ``HPCSTRAT_``
    variable, or if an open strategy over the same ranks has other settings. Every rank
    raises CollectiveError if ranks make different strategies, or if a rank does not
    make the strategy in time. If one rank has wrong arguments, the others raise
    ReplicaError.
    """

    # True if `experimental_local_results` gathers the values of this worker's ranks.
    _gathers_results = False

    def __init__(
        self,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        problem: Exception | None = None,
        **arguments: Any,
    ) -> None:
        request = StrategyRequest(kind=type(self).__name__, **arguments)
        logical_replicas = request.logical_replicas
        # Errors in arguments are passed to `connect`, which raises an error on all
        # ranks: if this rank alone raised an error, the other ranks would wait for it.
        if problem is None:
            problem = _problem(request, cross_device_ops, communication_options)
        self._key, self._everyone = connect(request, problem)
        # Only with replicas of several ranks: further connections, calls of all ranks,
        # and the comparison of copies inside of the replica.
        self._inner: ReplicaConnections | None = None
        self._all_ranks: AllRanks | None = None
        self._copies_inside: MirroredCopies | None = None
        # The divided variables of which several ranks of a replica have the same part.
        self._same_parts = weakref.WeakValueDictionary[int, MirroredVariable]()
        self._num_same_parts = 0
        # Other strategies may still use the connection after this strategy is closed.
        self._closed = False
        connection = self._connection = self._divided_connection(request)
        ops, options = cross_device_ops, communication_options
        channel = connection.channel
        collectives: Collectives
        if self.inside.size > 1:
            collectives = WholeCollectives(channel, ops, options, self.inside)
        elif ops is not None and ops.overrides():
            hooked = collectives = HookedCollectives(channel, ops, options)
            hooked.strategy = self
        else:
            collectives = Collectives(channel, ops, options)
        ranks = connection.topology.num_replicas
        if logical_replicas is not None and logical_replicas < ranks:
            # Every rank raises this error, because all ranks requested the same number.
            self._close_connections()
            raise ValueError(
                f"expected logical_replicas >= {ranks}, the number of ranks, found "
                f"{logical_replicas}; launch fewer ranks, or ask for more replicas"
            )
        super().__init__(
            collectives,
            connection.topology.replica_id,
            logical_replicas=logical_replicas,
            on_error=request.on_error,
        )
        self.run_inputs = connection.run_inputs
        self.module_inputs = connection.module_inputs
        self._thread_limits: Any = None
        if self.logical:
            self._thread_limits = fix_threads(
                self.settings.math_threads or 1, self.num_replicas_in_sync
            )
        if self.settings.step_digests and self.rank == self.inside.position == 0:
            self.digests = StepDigests(self.settings.step_digests)

    def _divided_connection(self, request: StrategyRequest) -> Connection:
        """Return the connection of this position in all replicas; make ``inside``.

        If a replica is one rank, this is the connection of all ranks.
        """
        count, shape = request.ranks_per_replica, request.replica_shape
        if count == 1:
            self.inside = Inside(shape or parse_shape(None, None), Collectives(None))
            return self._everyone
        try:
            inner = self._everyone.divided(count)
        except (ValueError, TopologyError):
            # All ranks raise this error.
            self._everyone.close(self._key)
            raise
        replica = self._everyone.topology.replica_id // count
        self.inside = Inside(shape, Collectives(inner.inside.channel), replica)
        channels = [c.channel for c in (inner.inside, self._everyone)]
        self.inside.counted = [c.position for c in channels if c is not None]
        self._copies_inside = copies = inner.inside.copies
        if copies is not None:
            ranks = inner.inside.topology.job_ranks
            copies.names = Names("rank", f"all ranks of replica {replica}", ranks)
        everyone = self._everyone
        self._all_ranks = AllRanks(
            Collectives(everyone.channel), everyone.topology, everyone.settings
        )
        self._inner = inner
        return inner.across

    @property
    def _connections(self) -> list[Connection]:
        """This strategy's connections: across replicas, inside, and of all ranks."""
        if self._inner is None:
            return [self._everyone]
        return [self._inner.across, self._inner.inside, self._everyone]

    def _close_connections(self) -> None:
        """Leave the connections; collective over all ranks of the strategy."""
        if self._inner is not None:
            self.inside.close()
            self.all_ranks.collectives.close()
            self._everyone.leave_divided(self.inside.size)
        self._everyone.close(self._key)

    def variable_class(self, options: VariableOptions) -> Any:
        if options.split is None or self.inside.size == 1:
            return super().variable_class(options)
        return DividedVariable

    def update_backend(self) -> type[Copies]:
        return PositionCopies if self.inside.size > 1 else super().update_backend()

    def _require_devices(
        self, names: Sequence[str] | None, least: int, argument: str
    ) -> None:
        """Raise ValueError if the program named a wrong number of devices.

        There must be one name per replica, and at least ``least`` different names.
        Before the error, all ranks close the strategy, which is collective over
        ``topology.replica_comm``.
        """
        count = self.num_replicas_in_sync
        if names is None or (len(names) == count and len(set(names)) >= least):
            return
        self.close()
        raise ValueError(
            f"expected {count} different devices, one for each rank, found {names}; "
            f"launch with mpirun -n {max(1, len(set(names)))}, or leave {argument} out"
        )

    def _bind(self, names: Sequence[str] | None = None) -> None:
        """Assign a device to each rank, at the end of the constructor."""
        try:
            self._devices = self._everyone.devices.bind(names)
        except Exception as error:
            # All ranks raise this error, so all close the strategy, or abandon it after
            # the loss of a rank, because `close` would wait for the lost rank.
            found = as_loss(self.topology, error)
            if isinstance(found, RankLostError):
                self.abandon()
            else:
                self.close()
            raise found from found.__cause__
        self.device = self._devices[self._everyone.topology.worker_comm.rank]
        if self.logical and self.topology.gpu is not None:
            from hpcstrat.engine.gpu.replica_device import ReplicaDevice

            self.replicas.listeners.append(ReplicaDevice(self.topology.gpu.index))
        # Variables and batches are put on the GPU only if the program or the settings
        # request a GPU. A GPU that the library found by itself is used only for arrays
        # that the program has put on it.
        named = names is not None or self.settings.device == "gpu"
        self.puts_on_gpu = named and self.device.startswith("GPU:")

    @property
    def devices(self) -> tuple[str, ...]:
        if self.meetings is None:
            return self._devices
        return tuple(map(self.device_of, self._worker_replicas()))

    def device_of(self, replica: int) -> str:
        if self.meetings is None or not self.device.startswith("CPU:"):
            return self.device
        if len(self._devices) == self.num_replicas_in_sync:
            return self._devices[replica]
        return f"CPU:{self._worker_replicas().index(replica)}"

    def _worker_replicas(self) -> list[int]:
        """Return the logical replicas of the ranks of this worker."""
        ranks = self.topology.worker_replicas
        return [n for rank in ranks for n in self.replicas.order.block(rank)]

    @property
    def all_ranks(self) -> Any:
        return self if self._all_ranks is None else self._all_ranks

    @property
    def settings(self) -> Settings:
        return self._connection.settings

    def variable_made(self, variable: MirroredVariable) -> None:
        copies = [self._connection.copies]
        if variable.split is None:
            # The copies of the replica's ranks must be equal, too.
            copies.append(self._copies_inside)
        elif self.inside.has_copies(variable.split):
            self._num_same_parts += 1
            self._same_parts[self._num_same_parts] = variable
        for compared in copies:
            if compared is not None:
                compared.add(variable)
        if self.digests is not None:
            self.digests.add(variable)
        # Parameters are in variables, so plain arguments of `run` are not parameters.
        self._connection.run_inputs.counts |= bool(variable.trainable)

    def _local_results(
        self, value: Any, parts: list[Any], distributed: bool
    ) -> tuple[Any, ...]:
        if not self._gathers_results:
            return super()._local_results(value, parts, distributed)
        # All ranks exchange whether their value is distributed, because it may be None,
        # which is never distributed, on some ranks only.
        found = self.collectives.all_gather_object(
            (distributed, parts), "experimental_local_results"
        )
        if not any(wrapped for wrapped, _ in found):
            return (value,)
        ranks = self.topology.worker_replicas
        return tuple(part for rank in ranks for part in found[rank][1])

    def expect_slow(self, seconds: float) -> AbstractContextManager[None]:
        # The base class checks the argument.
        super().expect_slow(seconds)
        return watchdog.expect_slow(seconds)

    def check_equal(self, tree: Tree) -> None:
        self._require_cross("check_equal")
        self.inside.require_whole("check_equal", tree)
        super().check_equal(tree)

    @collective
    def check_divergence(self) -> None:
        self._require_cross("check_divergence")
        for copies in (self._connection.copies, self._copies_inside):
            if copies is not None:
                copies.check()
        if self._num_same_parts:
            self._check_same_parts("check_divergence")

    def _check_same_parts(self, what: str) -> None:
        """Raise DivergenceError if ranks with the same part have other values of it.

        Collective over the ranks of the replica.
        """
        alive = dict(sorted(self._same_parts.items()))
        # The garbage collector may have freed a variable on some of the ranks.
        told = self.inside.collectives.all_gather_object(list(alive), what)
        variables = [v for n, v in alive.items() if all(n in own for own in told)]
        self.inside.require_whole(
            what,
            [variable.component for variable in variables],
            [f"variable {variable.name!r}" for variable in variables],
            advice=ADVICE,
            splits=[variable.split for variable in variables],
            error=DivergenceError,
        )

    @property
    def topology(self) -> Topology:
        return self._connection.topology

    @property
    def lost_ranks(self) -> tuple[int, ...] | None:
        channel = self._connection.channel
        return None if channel is None else channel.failures.lost

    def abandon(self) -> None:
        """Free everything but the communicators; works even if ranks have died.

        Afterwards no strategy over these ranks can make a collective call. With
        ``on_lost_rank="raise"``, ranks that are in a collective call raise
        RankLostError. For the library's own modules.
        """
        self._closed = True
        self._close_meetings()
        for connection in self._connections:
            connection.abandon(self._key)

    def _close_meetings(self) -> None:
        if self.digests is not None:
            self.digests.close()
        if self.meetings is not None:
            self.meetings.close()

    @collective
    def close(self) -> None:
        # After the loss of a rank, a collective call cannot succeed.
        if not self._closed and self.lost_ranks is not None:
            self.abandon()
        if not self._closed:
            # After an error, step counts may differ between ranks. They are reset here,
            # because different counts would stop the collective close with an error.
            for connection in self._connections:
                if connection.channel is not None:
                    connection.channel.failures.meet()
                    if self._inner is not None:
                        # An error on one channel may have left the counts of another.
                        connection.channel.position.steps = 0, 0, 0
            self.collectives.barrier("close")
            self._closed = True
            # The collectives are closed before the connection, because their plans use
            # shared memory of the topology.
            self.collectives.close()
            self._close_meetings()
            for copies in (self._connection.copies, self._copies_inside):
                if copies is not None:
                    copies.leave_out(self)
            self._close_connections()
