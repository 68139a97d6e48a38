"""The algorithms that users may name: how values are summed over the replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.collectives import select
from hpcstrat.engine.collectives.reduce_to_one import reduce_to_one
from hpcstrat.engine.collectives.select import Choice
from hpcstrat.engine.context import current
from hpcstrat.engine.options import CommunicationOptions, ReduceOp
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.engine.typing import Array

if TYPE_CHECKING:
    from hpcstrat.engine.gpu.transports.device_group import DeviceGroup

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "MpiAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "SharedMemoryAllReduce",
]


_HOOKS = "reduce_implementation", "batch_reduce_implementation"
_HOOK_OF_BROADCASTS = "broadcast_implementation"

# Pairs of a value and its destinations.
Pairs = Sequence[tuple[Any, Any]]


class CrossDeviceOps:
    """The library's own choice, by size and topology.

    A subclass chooses among the algorithms of the library by `choose`, or does the work
    itself: strategies call its ``reduce_implementation`` and
    ``batch_reduce_implementation`` for all of their sums, and its
    ``broadcast_implementation`` for ``extended.broadcast_to``, as those of
    tf.distribute do. There a PerReplica has the values of all replicas, here this
    rank's own. What a subclass does not override is done by its algorithm.
    """

    _details = ""
    """Parameters that ranks must agree on, which `describe` names."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse the private hook of tf.distribute, which nothing here would call."""
        super().__init_subclass__(**options)
        if "_gather_implementation" in vars(cls):
            raise TypeError(
                "expected a CrossDeviceOps that overrides choose or "
                f"{', '.join((*_HOOKS, _HOOK_OF_BROADCASTS))}, found that "
                f"{cls.__name__} has _gather_implementation of tf.distribute, which "
                "is never called; leave it out"
            )

    def overrides(self, *names: str) -> bool:
        """Whether one of these methods is a subclass's; for the library's own modules.

        Without names: a hook by which it reduces.
        """
        return any(
            getattr(type(self), name) is not getattr(CrossDeviceOps, name)
            for name in names or _HOOKS
        )

    @property
    def collectives(self) -> Any:
        """The calls between the replicas of the current strategy.

        For the library's own modules.
        """
        return _current().collectives

    @collective
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combine the replicas' values by this algorithm.

        Collective over the replicas of the current strategy, whatever algorithm that
        one has.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            ``SUM`` or ``MEAN``.
        per_replica_value : PerReplica or array_like of shape (...)
            A plain value is this rank's contribution.
        destinations : variable, distributed value or str
            Where the result is wanted.
        options : CommunicationOptions, optional
            For this call.

        Returns
        -------
        Mirrored or ndarray
            Mirrored for a variable or distributed value of several replicas.

        Raises
        ------
        RuntimeError
            Outside of every scope, or in replica context.
        ValueError
            As ``Strategy.reduce``.
        """
        op, options = ReduceOp.parse(reduce_op), options or CommunicationOptions()
        single, several = _HOOKS
        if self.overrides(several) and not self.overrides(single):
            pairs = [(per_replica_value, destinations)]
            return self.batch_reduce_implementation(op, pairs, options)[0]
        return self.reduce_implementation(op, per_replica_value, destinations, options)

    @collective
    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Pairs,
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combine several values at once, as `reduce` does one.

        Collective over the replicas of the current strategy.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            ``SUM`` or ``MEAN``.
        value_destination_pairs : sequence of (value, destinations)
            As for `reduce`.
        options : CommunicationOptions, optional
            For this call.

        Returns
        -------
        list
            Results in order.
        """
        op, options = ReduceOp.parse(reduce_op), options or CommunicationOptions()
        pairs = list(value_destination_pairs)
        single, several = _HOOKS
        if self.overrides(single) and not self.overrides(several):
            return [self.reduce_implementation(op, *pair, options) for pair in pairs]
        return self.batch_reduce_implementation(op, pairs, options)

    @collective
    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Give all replicas replica 0's value.

        Collective over the replicas of the current strategy.

        Parameters
        ----------
        tensor : array_like of any shape
            This rank's.
        destinations : variable, distributed value or str
            Where the value is wanted.

        Returns
        -------
        Mirrored
            The value; bare where there is one replica.
        """
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Do what `reduce` says; subclasses may override it.

        Collective over the replicas of the current strategy.

        Parameters
        ----------
        reduce_op : ReduceOp
            ``SUM`` or ``MEAN``.
        per_replica_value : PerReplica or array_like of shape (...)
            In calls of a strategy a PerReplica, in cross-replica context.
        destinations : variable, distributed value or str
            Where the result is wanted; in calls of a strategy the value itself.
        options : CommunicationOptions
            Of the call.

        Returns
        -------
        Mirrored or ndarray
            Of the shape of a replica's value.
        """
        pairs = [(per_replica_value, destinations)]
        found: list[Any] = _current().extended.reduce_by(
            self, reduce_op, pairs, options
        )
        return found[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Pairs,
        options: CommunicationOptions,
    ) -> list[Any]:
        """Do what `batch_reduce` says; subclasses may override it.

        Collective over the replicas of the current strategy.

        Parameters
        ----------
        reduce_op : ReduceOp
            ``SUM`` or ``MEAN``.
        value_destination_pairs : sequence of (value, destinations)
            As for `reduce_implementation`.
        options : CommunicationOptions
            Of the call.

        Returns
        -------
        list
            Results in order.
        """
        pairs = list(value_destination_pairs)
        found: list[Any] = _current().extended.reduce_by(
            self, reduce_op, pairs, options
        )
        return found

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Do what `broadcast` says; subclasses may override it.

        Collective over the replicas of the current strategy.

        Parameters
        ----------
        tensor : array_like of any shape
            This rank's.
        destinations : variable, distributed value or str
            Where the value is wanted.

        Returns
        -------
        Mirrored
            The value; bare where there is one replica.
        """
        del destinations
        return _current().extended.broadcast_by_rank(tensor)

    def choose(
        self, nbytes: int, topology: Topology, options: CommunicationOptions
    ) -> Choice:
        """Choose how to reduce a call's arrays.

        Not collective; the same on every rank.

        Parameters
        ----------
        nbytes : int
            Size of all arrays, in the types in which they are added.
        topology : Topology
            Where.
        options : CommunicationOptions
            Of the call.

        Returns
        -------
        Choice
            Algorithm and size of the pieces.

        Raises
        ------
        ValueError
            If the algorithm does not serve this topology. On every rank.
        """
        return self._on_host(nbytes, topology, options)

    def choose_on_gpu(
        self, nbytes: int, group: DeviceGroup, options: CommunicationOptions
    ) -> Choice:
        """Choose how to reduce a call's arrays that are on GPUs.

        Not collective; the same on every rank.

        Parameters
        ----------
        nbytes : int
            Size of all arrays, in the types in which they are added.
        group : DeviceGroup
            Where, and what can move arrays there.
        options : CommunicationOptions
            Of the call.

        Returns
        -------
        Choice
            Algorithm and size of the pieces.

        Raises
        ------
        ValueError
            If the algorithm does not serve this topology. On every rank.
        """
        return self._on_gpu(nbytes, group, options)

    def _on_host(
        self, nbytes: int, topology: Topology, options: CommunicationOptions
    ) -> Choice:
        return select.select(nbytes, topology, options)

    def _on_gpu(
        self, nbytes: int, group: DeviceGroup, options: CommunicationOptions
    ) -> Choice:
        from hpcstrat.engine.gpu.transports import transport_select

        if not self.overrides("choose", "_on_host"):
            return transport_select.select_on_gpu(nbytes, group, options)
        # An algorithm for host memory: arrays are copied there and back.
        return transport_select.staged(
            *(nbytes, group, options, self.choose), name=self.describe()
        )

    def describe(self) -> str:
        """Describe the algorithm, which must be the same on all ranks.

        Not collective.

        Returns
        -------
        str
            Name of the algorithm, with its parameters; empty for the library's choice.
        """
        name = "" if type(self) is CrossDeviceOps else type(self).__name__
        return name + self._details

    def __repr__(self) -> str:
        """Show kind and parameters."""
        return f"<{self.describe() or type(self).__name__}>"


class NcclAllReduce(CrossDeviceOps):
    """The all-reduce of NCCL, for arrays on GPUs; the library's own choice for others.

    Parameters
    ----------
    num_packs : int
        Accepted for tf.distribute's sake; ``CommunicationOptions.bytes_per_pack`` sets
        the size of the pieces.
    sums_in_half : bool
        Whether NCCL adds arrays of float16 and bfloat16 on GPUs in their own types,
        which halves what is sent. Each of its additions is rounded then, in an order
        of its own, so that the error grows with the number of replicas, and a sum of
        float16 may overflow; means do not. By default they are added in float32, and
        rounded once, as on CPUs.
    """

    def __init__(self, num_packs: int = 1, *, sums_in_half: bool = False) -> None:
        _check_num_packs(num_packs)
        self._sums_in_half = sums_in_half
        self._details = "(in half types)" if sums_in_half else ""

    def _on_gpu(
        self, nbytes: int, group: DeviceGroup, options: CommunicationOptions
    ) -> Choice:
        from hpcstrat.engine.gpu.transports import transport_select

        return transport_select.nccl(group, options, in_half=self._sums_in_half)


class MpiAllReduce(CrossDeviceOps):
    """The all-reduce of the MPI library, in messages of one piece.

    ``CommunicationOptions.bytes_per_pack`` is the size of a message.
    Of arrays on GPUs, whose sums MPI libraries make badly: sums made by kernels, of
    what MPI sends from rank to rank, where it moves such memory.
    """

    def _on_gpu(
        self, nbytes: int, group: DeviceGroup, options: CommunicationOptions
    ) -> Choice:
        from hpcstrat.engine.gpu.transports import transport_select

        if group.capabilities.mpi_sendrecv:
            return transport_select.ring(group, options)
        return super()._on_gpu(nbytes, group, options)

    def _on_host(
        self, nbytes: int, topology: Topology, options: CommunicationOptions
    ) -> Choice:
        return select.by_mpi(nbytes, topology, options)


class SharedMemoryAllReduce(CrossDeviceOps):
    """Reduction through memory that the replicas of one worker share.

    The sums are those of adding the replicas' values in their order, whatever the
    number of pieces, whose size is ``CommunicationOptions.bytes_per_pack``. Arrays on
    GPUs go by way of it. ValueError in calls over several workers.
    """

    def _on_host(
        self, nbytes: int, topology: Topology, options: CommunicationOptions
    ) -> Choice:
        if topology.num_workers > 1:
            raise ValueError(
                "expected the replicas of one worker for SharedMemoryAllReduce, found "
                f"{topology.num_workers} workers; use HierarchicalCopyAllReduce, or "
                "leave the choice to the library"
            )
        return select.shared_memory(nbytes, topology, options)


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Reduction inside each worker through shared memory, then between the workers.

    Every rank of a worker sends its part of the worker's sum to the ranks with the same
    position, so that all links are busy. For replicas of one worker it is
    `SharedMemoryAllReduce`.

    Parameters
    ----------
    num_packs : int
        Accepted for tf.distribute's sake; ``CommunicationOptions.bytes_per_pack`` sets
        the size of the pieces.
    """

    def __init__(self, num_packs: int = 1) -> None:
        _check_num_packs(num_packs)

    def _on_host(
        self, nbytes: int, topology: Topology, options: CommunicationOptions
    ) -> Choice:
        return select.hierarchical(nbytes, topology, options)


class ReductionToOneDevice(CrossDeviceOps):
    """Reduces on one replica, in replica order, and sends the result to all.

    In host memory, where arrays on GPUs are copied to.

    Parameters
    ----------
    reduce_to_device : int or str, optional
        The replica that adds, as a number, or as a device such as ``"CPU:1"``, whose
        number is taken; default: replica 0.
    accumulation_fn : callable, optional
        Takes a list with a flat array of each replica and returns their element-wise
        combination; default: the sum. ``MEAN`` divides its result by the number of
        replicas.
    """

    def __init__(
        self,
        reduce_to_device: int | str | None = None,
        accumulation_fn: Callable[[list[Array]], Any] | None = None,
    ) -> None:
        number = str(reduce_to_device or 0).rpartition(":")[2]
        if not number.isdecimal():
            raise ValueError(
                "expected a replica's number or a device such as 'CPU:0', found "
                f"{reduce_to_device!r}; pass None for replica 0"
            )
        self._root = int(number)
        self._accumulate = accumulation_fn
        own = "" if accumulation_fn is None else ", own accumulation_fn"
        self._details = f"(on replica {self._root}{own})"

    @property
    def combines(self) -> bool:
        """Whether a function of the program combines the values."""
        return self._accumulate is not None

    def _on_host(
        self, nbytes: int, topology: Topology, options: CommunicationOptions
    ) -> Choice:
        del options
        if self._root >= topology.num_replicas:
            raise ValueError(
                f"expected reduce_to_device below {topology.num_replicas}, the number "
                f"of replicas, found {self._root}; choose one of them"
            )
        algorithm = functools.partial(
            reduce_to_one, root=self._root, accumulate=self._accumulate
        )
        # Runs of other types begin at multiples of 64 bytes.
        return Choice(algorithm, nbytes + (64 << 10), starts=False)


def _check_num_packs(num_packs: int) -> None:
    if num_packs < 0:
        raise ValueError(f"expected num_packs >= 0, found {num_packs}; leave it out")


def _current() -> Any:
    """Return the strategy in whose scope this is."""
    entry = current()
    if entry is None:
        raise RuntimeError(
            "expected a CrossDeviceOps to be used by itself in the scope of a "
            "strategy, whose replicas it is for, found none; write it in a block "
            "'with strategy.scope():'"
        )
    return entry.strategy
