"""The base of strategies on MPI, beside their connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.logical.replica_sums import require_no_wire_dtype
from hpcstrat.engine.logical.threads import fix_threads
from hpcstrat.engine.options import CommunicationOptions
from hpcstrat.engine.reduction.cross_device_ops import (
    CrossDeviceOps,
    ReductionToOneDevice,
)
from hpcstrat.engine.reduction.replica_collectives import Collectives
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.topology.survival import is_loss
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.errors import RankLostError
from hpcstrat.safety.divergence.step_digests import StepDigests
from hpcstrat.safety.watchdog import watchdog
from hpcstrat.strategies.base import Strategy
from hpcstrat.strategies.connection import StrategyRequest, connect
from hpcstrat.strategies.own_reductions import HookedCollectives
from hpcstrat.variables import MirroredVariable

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiStrategy"]


def _require_ops(ops: Any) -> None:
    if not isinstance(ops, (CrossDeviceOps, type(None))):
        raise TypeError(
            f"expected a CrossDeviceOps as cross_device_ops, found {ops!r:.80}; pass "
            "hs.ReductionToOneDevice(), for example, or leave it out"
        )


def _require_any_order(ops: CrossDeviceOps | None, options: Any) -> None:
    """Refuse sums that would depend on the number of ranks, with logical replicas."""
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


class MpiStrategy(Strategy):
    """A strategy with one MPI rank per replica.

    Collective over ``comm``. `MultiWorkerMirroredStrategy` describes the arguments.
    Subclasses add ``devices`` that the program has named, ``own`` arguments, in which
    all ranks must agree, and a ``problem`` that they have found on this rank: it is
    raised here, once the other ranks know.

    Raises on every rank if the environment has a ``HPCSTRAT_`` variable that is unknown
    (ValueError), if another strategy over the same ranks is open with other settings
    (ValueError), and if ranks make different strategies, or one does not come in time
    (CollectiveError). A wrong argument on another rank is a ReplicaError.
    """

    # Whether `experimental_local_results` has those of all ranks of this worker.
    _gathers_results = False

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
        logical_replicas: int | None = None,
        own: Mapping[str, Any] | None = None,
        problem: Exception | None = None,
    ) -> None:
        # Whatever is wrong with an argument is found before the ranks meet, and told
        # there: one that raised here alone would leave the others waiting.
        if problem is None:
            try:
                _require_ops(cross_device_ops)
                Collectives(None, cross_device_ops, communication_options)
                if logical_replicas is not None:
                    _require_any_order(cross_device_ops, communication_options)
            except Exception as error:
                problem = error
        request = StrategyRequest(
            kind=type(self).__name__,
            comm=comm,
            replicas_per_worker=replicas_per_worker,
            on_error=on_error,
            on_lost_rank=on_lost_rank,
            progress_thread=progress_thread,
            settings=settings,
            devices=devices,
            logical_replicas=logical_replicas,
            own=own or {},
        )
        self._key, connection = connect(request, problem)
        self._connection = connection
        # A strategy may be closed while its connection lives on with others.
        self._closed = False
        collectives: Collectives
        if cross_device_ops is not None and cross_device_ops.overrides():
            collectives = HookedCollectives(
                connection.channel, cross_device_ops, communication_options
            )
            collectives.strategy = self
        else:
            collectives = Collectives(
                connection.channel, cross_device_ops, communication_options
            )
        ranks = connection.topology.num_replicas
        if logical_replicas is not None and logical_replicas < ranks:
            # On every rank, as all have asked for the same number.
            connection.close(self._key)
            raise ValueError(
                f"expected logical_replicas >= {ranks}, the number of ranks, found "
                f"{logical_replicas}; launch fewer ranks, or ask for more replicas"
            )
        super().__init__(
            collectives,
            connection.topology.replica_id,
            logical_replicas=logical_replicas,
            on_error=on_error,
        )

        self._thread_limits: Any = None
        if self.logical:
            self._thread_limits = fix_threads(
                self.settings.math_threads or 1, self.num_replicas_in_sync
            )
        if self.settings.step_digests and self.rank == 0:
            self.digests = StepDigests(self.settings.step_digests)

    def _require_devices(
        self, names: Sequence[str] | None, least: int, argument: str
    ) -> None:
        """Refuse another number of named devices than replicas, or fewer different.

        Collective over ``topology.replica_comm``, where it raises, as all do.
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
        """Give each rank its device; every strategy does so when it is made."""
        try:
            self._devices = self._connection.devices.bind(names)
        except Exception as error:
            # The ranks agree on devices, so that all are here; but after a loss closing
            # would wait for the lost.
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
        if self.logical and self.topology.gpu is not None:
            from hpcstrat.engine.gpu.replica_device import ReplicaDevice

            self.replicas.listeners.append(ReplicaDevice(self.topology.gpu.index))
        # A GPU that was found by itself serves the program's arrays that are there
        # already; only one that was asked for takes variables and batches.
        named = names is not None or self.settings.device == "gpu"
        self.puts_on_gpu = named and self.device.startswith("GPU:")

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices of this worker's replicas."""
        if self.meetings is None:
            return self._devices
        return tuple(map(self.device_of, self._worker_replicas()))

    def device_of(self, replica: int) -> str:
        """Return the device of a replica of this worker.

        Not collective. For the library's own modules.
        """
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
    def settings(self) -> Settings:
        """The settings of the watch over the ranks; the same on every replica."""
        return self._connection.settings

    def variable_made(self, variable: MirroredVariable) -> None:
        """Take a variable among those whose copies are compared.

        Logically collective over the strategy's replicas. For the library's own
        modules.
        """
        if self._connection.copies is not None:
            self._connection.copies.add(variable)
        if self.digests is not None:
            self.digests.add(variable)

    def _local_results(
        self, value: Any, parts: list[Any], distributed: bool
    ) -> tuple[Any, ...]:
        if not self._gathers_results:
            return super()._local_results(value, parts, distributed)
        # A value may be distributed on some ranks only: None is not.
        found = self.collectives.all_gather_object(
            (distributed, parts), "experimental_local_results"
        )
        if not any(wrapped for wrapped, _ in found):
            return (value,)
        ranks = self.topology.worker_replicas
        return tuple(part for rank in ranks for part in found[rank][1])

    def expect_slow(self, seconds: float) -> AbstractContextManager[None]:
        # Checks the argument.
        super().expect_slow(seconds)
        return watchdog.expect_slow(seconds)

    @collective
    def check_divergence(self) -> None:
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
        error = None if channel is None else channel.failures.rank_loss.error
        return None if error is None else error.ranks

    def abandon(self) -> None:
        """Let go of everything but the communicators, also where ranks have died.

        Not collective. All strategies over these ranks can make no call afterwards, and
        ranks that are in one raise RankLostError where the loss of ranks is survived.
        For the library's own modules.
        """
        self._closed = True
        self._close_meetings()
        self._connection.abandon(self._key)

    def _close_meetings(self) -> None:
        if self.digests is not None:
            self.digests.close()
        if self.meetings is not None:
            self.meetings.close()

    @collective
    def close(self) -> None:
        # Nothing collective ends any more once a rank is lost.
        if not self._closed and self.lost_ranks is not None:
            self.abandon()
        if not self._closed:
            # Ranks that have left out a step are to meet here nevertheless.
            if self._connection.channel is not None:
                self._connection.channel.failures.meet()
            self.collectives.barrier("close")
            self._closed = True
            # Its plans hold shared memory of the topology: they go before it.
            self.collectives.close()
            self._close_meetings()
            if self._connection.copies is not None:
                self._connection.copies.leave_out(self)
            self._connection.close(self._key)
