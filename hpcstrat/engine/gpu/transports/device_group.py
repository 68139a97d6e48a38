"""The transports between a topology's GPUs, created at the first call with GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from hpcstrat.engine.arrays.kinds import device_of
from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, EveryRankError, WaitSteps
from hpcstrat.engine.gpu.capabilities import Ability, Capabilities, gather
from hpcstrat.engine.gpu.streams import Lane
from hpcstrat.engine.gpu.transports.byte_movers import StagedMover
from hpcstrat.engine.gpu.transports.device_reduction import Transport
from hpcstrat.engine.gpu.transports.nccl_group import NcclGroup
from hpcstrat.engine.gpu.transports.nccl_transport import NcclTransport
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.engine.typing import Array

__all__ = ["DeviceGroup", "device_group"]

_Made = TypeVar("_Made", bound=Transport | StagedMover)


class DeviceGroup:
    """The GPU transports of a topology with at least two replicas, and their lane.

    Collective over ``topology.replica_comm``. Raises EveryRankError on every rank if a
    rank cannot use its GPU. All transports use one lane, so that calls of two
    transports never run at the same time.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        problem = ""
        if topology.gpu is None:
            problem = "was given no GPU when the strategy was made"
        else:
            try:
                self.lane = Lane(urgent=True)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        problems = topology.replica_comm.allgather(problem)
        if any(problems):
            found = "; ".join(
                f"rank {rank}: {text}" for rank, text in enumerate(problems) if text
            )
            raise EveryRankError(
                f"expected every rank to have its GPU, found {found}; import cupy "
                "before the strategy is made, or set HPCSTRAT_DEVICE=gpu; hpcstrat "
                "doctor shows what there is"
            )
        self.capabilities: Capabilities = gather(topology)
        # The NCCL transport, which has passed its trial; None without NCCL.
        self.nccl: NcclTransport | None = None
        # The last logged text about the chosen transport, with the reason.
        self.reason = ""
        # The transports, and the `StagedMover`, by name.
        self._transports: dict[str, Transport | StagedMover] = {}

    def try_nccl(self, limit_seconds: float) -> WaitSteps:
        """Create the NCCL communicator; if that fails, no rank uses NCCL.

        Collective over ``topology.replica_comm``; a rank waits at most
        ``limit_seconds`` for other ranks. Does nothing if the ranks cannot use NCCL.
        """
        able, topology = self.capabilities, self.topology
        if not able.nccl:
            return
        comm, survives = topology.replica_comm, topology.survives
        group = NcclGroup(topology.mpi, comm, self.lane, survives=survives)
        try:
            # Only a trial shows whether NCCL works with this network and driver.
            yield from group.connect(limit_seconds)
        except EveryRankError as error:
            self.capabilities = replace(able, nccl=Ability(False, str(error)))
            if topology.replica_id == 0:
                get_logger("device").warning("NCCL is left out: %s", error)
            return
        self.nccl = self._transports["nccl"] = NcclTransport(group, self.lane)

    def require_own(self, array: Array) -> None:
        """Raise ValueError unless an array is on this rank's GPU."""
        gpu = self.topology.gpu
        # An empty array may be on any GPU.
        if gpu is not None and array.size and device_of(array) != f"GPU:{gpu.index}":
            raise ValueError(
                f"expected an array on this rank's GPU:{gpu.index}, found one on "
                f"{device_of(array)}; make the strategy before the first array, or "
                f"choose cupy.cuda.Device({gpu.index})"
            )

    def transport(self, name: str, make: Callable[[], _Made]) -> _Made:
        """Return the transport or mover with this name; not collective.

        ``make`` creates the transport or mover at its first use.
        """
        if name not in self._transports:
            self._transports[name] = make()
        found: _Made = self._transports[name]  # type: ignore[assignment]
        return found

    def explain(self, name: str, reason: str) -> None:
        """Log on replica 0, once, which transport is used, and why."""
        text = f"{name}: {reason}"
        if text != self.reason:
            self.reason = text
            if self.topology.replica_id == 0:
                get_logger("device").info("arrays on GPUs are reduced by %s", text)

    def abandon(self) -> None:
        """Abandon all transports on this rank, because another rank has died."""
        for made in self._transports.values():
            made.abandon()
        self._transports.clear()

    def close(self) -> None:
        """Close all transports; every rank must call this method."""
        # Wait for the lane, because its work must not write to memory freed below.
        self.lane.synchronize()
        for made in self._transports.values():
            made.close()
        self._transports.clear()


def device_group(
    channel: Channel, what: str, timeout_seconds: float | None
) -> DeviceGroup:
    """Return the device group of a channel; the ranks create it at the first use.

    Collective over ``topology.replica_comm`` at the first use, then not collective.
    Raises ValueError on every rank if a rank cannot use its GPU.
    """
    if channel.device_group is None:
        call = describe_call(f"{what}: first use of arrays on a GPU")
        channel.drive(_make(channel), call, timeout_seconds)
    group: DeviceGroup = channel.device_group
    return group


def _make(channel: Channel) -> WaitSteps:
    yield HEADER
    group = channel.device_group = DeviceGroup(channel.topology)
    yield from group.try_nccl(channel.waiter.limit_seconds)
