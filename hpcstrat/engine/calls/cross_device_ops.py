"""Algorithms for sums over the replicas that users can pass to a strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hpcstrat.engine.algorithms import select
from hpcstrat.engine.algorithms.reduce_to_one import reduce_to_one
from hpcstrat.engine.algorithms.select import Choice
from hpcstrat.engine.channel.entries import collective
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
    """The library's own choice of an algorithm, by message size and topology.

    A subclass can override `choose` to select another algorithm of the library. Or a
    subclass can do the work itself: strategies call its ``reduce_implementation`` and
    ``batch_reduce_implementation`` for all of their sums, and its
    ``broadcast_implementation`` for ``extended.broadcast_to``, as strategies of
    tf.distribute do. In tf.distribute a PerReplica has the values of all replicas; in
    this library it has only this rank's value. Methods that a subclass does not
    override use the algorithm of `choose`.
    """

    _details = ""
    """Text about parameters that must be equal on all ranks, for `describe`."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse ``_gather_implementation``, which this library would never call."""
        super().__init_subclass__(**options)
        if "_gather_implementation" in vars(cls):
            raise TypeError(
                "expected a CrossDeviceOps that overrides choose or "
                f"{', '.join((*_HOOKS, _HOOK_OF_BROADCASTS))}, found that "
                f"{cls.__name__} has _gather_implementation of tf.distribute, which "
                "is never called; leave it out"
            )

    def overrides(self, *names: str) -> bool:
        """Return whether a subclass overrides one of the methods ``names``.

        If none is given, test the methods that reduce. For the library's own modules.
        """
        return any(
            getattr(type(self), name) is not getattr(CrossDeviceOps, name)
            for name in names or _HOOKS
        )

    @property
    def collectives(self) -> Any:
        """The object with the collective calls of the current strategy.

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
        """Sum or average the replicas' values by this algorithm.

        Collective over the replicas of the current strategy, even if that strategy has
        another algorithm.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            An operation, as in ``Strategy.reduce``.
        per_replica_value : PerReplica or array_like of shape (...)
            A plain value is this rank's contribution.
        destinations : variable, distributed value or str
            The object, or device, on whose replicas the result is needed.
        options : CommunicationOptions, optional
            Options of this call.

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
        """Sum or average several values in one call.

        Collective over the replicas of the current strategy.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            An operation, as in ``Strategy.reduce``.
        value_destination_pairs : sequence of (value, destinations)
            As for `reduce`.
        options : CommunicationOptions, optional
            Options of this call.

        Returns
        -------
        list
            The results, in the order of the pairs.
        """
        op, options = ReduceOp.parse(reduce_op), options or CommunicationOptions()
        pairs = list(value_destination_pairs)
        single, several = _HOOKS
        if self.overrides(single) and not self.overrides(several):
            return [self.reduce_implementation(op, *pair, options) for pair in pairs]
        return self.batch_reduce_implementation(op, pairs, options)

    @collective
    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Return replica 0's value on all replicas.

        Collective over the replicas of the current strategy.

        Parameters
        ----------
        tensor : array_like of any shape
            This rank's value.
        destinations : variable, distributed value or str
            The object, or device, on whose replicas the value is needed.

        Returns
        -------
        Mirrored
            The value; a plain array if there is one replica.
        """
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Do the work of `reduce`; subclasses may override this method.

        Collective over the replicas of the current strategy.

        Parameters
        ----------
        reduce_op, per_replica_value, destinations, options : as for `reduce`
            A strategy passes a PerReplica, in cross-replica context, and the value
            itself as destinations.

        Returns
        -------
        Mirrored or ndarray
            The result, with the shape of a replica's value.
        """
        reduce = _current().extended.reduce_by
        return reduce(self, reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Pairs,
        options: CommunicationOptions,
    ) -> list[Any]:
        """Do the work of `batch_reduce`; subclasses may override this method.

        Collective over the replicas of the current strategy.

        Parameters
        ----------
        reduce_op, value_destination_pairs, options : as for `batch_reduce`
            The pairs are as for `reduce_implementation`.

        Returns
        -------
        list
            The results, in the order of the pairs.
        """
        extended, pairs = _current().extended, list(value_destination_pairs)
        found: list[Any] = extended.reduce_by(self, reduce_op, pairs, options)
        return found

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Do the work of `broadcast`; subclasses may override this method.

        Collective over the replicas of the current strategy.

        Parameters
        ----------
        tensor, destinations : as for `broadcast`
            The value, and the object or device on whose replicas it is needed.

        Returns
        -------
        Mirrored
            The value; a plain array if there is one replica.
        """
        del destinations
        return _current().extended.broadcast_by_rank(tensor)

    def choose(
        self, nbytes: int, topology: Topology, options: CommunicationOptions
    ) -> Choice:
        """Return the algorithm and the piece size for the arrays of a call.

        Not collective; the result is the same on every rank.

        Parameters
        ----------
        nbytes : int
            Total size of the arrays in bytes, in the dtypes in which they are added.
        topology : Topology
            The topology of the strategy.
        options : CommunicationOptions
            Options of the call.

        Returns
        -------
        Choice
            Algorithm and size of the pieces.

        Raises
        ------
        ValueError
            On every rank, if the algorithm does not support this topology.
        """
        return select.select(nbytes, topology, options)

    def choose_on_gpu(
        self, nbytes: int, group: DeviceGroup, options: CommunicationOptions
    ) -> Choice:
        """Return the algorithm and the piece size for a call's arrays on GPUs.

        Not collective; the result is the same on every rank, also its ValueError.

        Parameters
        ----------
        nbytes : int
            Size of the arrays, as for `choose`.
        group : DeviceGroup
            The GPUs of the replicas, and the transports between them.
        options : CommunicationOptions
            Options of the call.

        Returns
        -------
        Choice
            Algorithm and size of the pieces.
        """
        from hpcstrat.engine.gpu.transports import transport_select

        if not self.overrides("choose"):
            return transport_select.select_on_gpu(nbytes, group, options)
        # The algorithm needs host memory: arrays are copied to the host and back.
        return transport_select.staged(
            *(nbytes, group, options, self.choose), name=self.describe()
        )

    def describe(self) -> str:
        """Return the name and the parameters of the algorithm, equal on all ranks.

        Not collective.

        Returns
        -------
        str
            Name of the algorithm, with its parameters; empty for the library's choice.
        """
        name = "" if type(self) is CrossDeviceOps else type(self).__name__
        return name + self._details

    def __repr__(self) -> str:
        """Show the class and its parameters."""
        return f"<{self.describe() or type(self).__name__}>"


class NcclAllReduce(CrossDeviceOps):
    """The allreduce of NCCL for arrays on GPUs; the library's choice for host arrays.

    Parameters
    ----------
    num_packs : int
        Ignored; accepted because tf.distribute has it. Set the size of the pieces by
        ``CommunicationOptions.bytes_per_pack``.
    sums_in_half : bool
        Whether NCCL adds float16 and bfloat16 arrays in their own dtypes, which halves
        the bytes sent. NCCL then rounds after each addition, in its own order, so that
        the error grows with the number of replicas, and a sum of float16 may overflow
        (a mean does not). By default the arrays are added in float32 and rounded once,
        as on CPUs.
    """

    def __init__(self, num_packs: int = 1, *, sums_in_half: bool = False) -> None:
        _check_num_packs(num_packs)
        self._sums_in_half = sums_in_half
        self._details = "(in half types)" if sums_in_half else ""

    def choose_on_gpu(
        self, nbytes: int, group: DeviceGroup, options: CommunicationOptions
    ) -> Choice:
        from hpcstrat.engine.gpu.transports import transport_select

        return transport_select.nccl(group, options, in_half=self._sums_in_half)


class MpiAllReduce(CrossDeviceOps):
    """The allreduce of the MPI library, in messages of one piece.

    ``CommunicationOptions.bytes_per_pack`` is the size of a message. The allreduce of
    MPI libraries is often slow or wrong for GPU memory. So MPI only sends arrays on
    GPUs from rank to rank, if it can send GPU memory, and CUDA kernels add the arrays.
    """

    def choose_on_gpu(
        self, nbytes: int, group: DeviceGroup, options: CommunicationOptions
    ) -> Choice:
        from hpcstrat.engine.gpu.transports import transport_select

        if group.capabilities.mpi_sendrecv:
            return transport_select.ring(group, options)
        return super().choose_on_gpu(nbytes, group, options)

    def choose(
        self, nbytes: int, topology: Topology, options: CommunicationOptions
    ) -> Choice:
        return select.by_mpi(nbytes, topology, options)


class SharedMemoryAllReduce(CrossDeviceOps):
    """Reduction through memory that the replicas of one worker share.

    Values are added in replica order, so that the result does not depend on the size
    of the pieces, ``CommunicationOptions.bytes_per_pack``. Arrays on GPUs are copied to
    this memory and back. Calls over several workers raise ValueError.
    """

    def choose(
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

    Every rank of a worker sends its part of the worker's sum to the ranks of the same
    position in the other workers, so that all network links are busy. With one worker,
    this algorithm is the same as `SharedMemoryAllReduce`.

    Parameters
    ----------
    num_packs : int
        Ignored; accepted because tf.distribute has it. Set the size of the pieces by
        ``CommunicationOptions.bytes_per_pack``.
    """

    def __init__(self, num_packs: int = 1) -> None:
        _check_num_packs(num_packs)

    def choose(
        self, nbytes: int, topology: Topology, options: CommunicationOptions
    ) -> Choice:
        return select.hierarchical(nbytes, topology, options)


class ReductionToOneDevice(CrossDeviceOps):
    """Reduction on one replica, in replica order, which sends the result to all.

    The values are added in host memory, to which arrays on GPUs are copied.

    Parameters
    ----------
    reduce_to_device : int or str, optional
        The replica that adds: its number, or a device name such as ``"CPU:1"``, which
        stands for replica 1. Default: replica 0.
    accumulation_fn : callable, optional
        A function that is called with a list of one flat array per replica, and returns
        their element-wise combination. Default: the sum. ``MEAN`` divides the
        function's result by the number of replicas.
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
        """True if the program has passed an ``accumulation_fn``."""
        return self._accumulate is not None

    def choose(
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
        # Use one piece for all arrays. The 64 KiB are for gaps, because the values of
        # each dtype begin at a multiple of 64 bytes.
        return Choice(algorithm, nbytes + (64 << 10), starts=False)


def _check_num_packs(num_packs: int) -> None:
    if num_packs < 0:
        raise ValueError(f"expected num_packs >= 0, found {num_packs}; leave it out")


def _current() -> Any:
    """Return the current scope's strategy; raise RuntimeError if there is no scope."""
    active = current()
    if active is None:
        raise RuntimeError(
            "expected a CrossDeviceOps to be used by itself in the scope of a "
            "strategy, whose replicas it is for, found none; write it in a block "
            "'with strategy.scope():'"
        )
    return active.strategy
