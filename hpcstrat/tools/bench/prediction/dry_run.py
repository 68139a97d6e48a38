"""A dry run of one replica's work in a reduction, without any other replica.

The dry run uses the plan of `hpcstrat.engine.calls` and the algorithms of
`hpcstrat.engine.algorithms`, so a change of pieces or messages there also changes the
prediction. It passes the algorithm arrays without memory, and a channel that only
records the algorithm's requests.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from hpcstrat.engine.algorithms.header_sum import fits_header, header_bytes
from hpcstrat.engine.algorithms.work import Work
from hpcstrat.engine.arrays.packing import Piece, Run, cut, wire_dtype
from hpcstrat.engine.calls.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.channel.waitable import HEADER
from hpcstrat.engine.channel.wire_headers import room_bytes
from hpcstrat.engine.options import CommunicationOptions
from hpcstrat.engine.topology.topology import slot_bytes
from hpcstrat.errors import HpcstratError

__all__ = [
    "AllReduced",
    "Announced",
    "Begun",
    "Ended",
    "Event",
    "MemoryCopy",
    "Phantom",
    "SimulatedJob",
    "Stepped",
    "Traffic",
    "Turned",
    "dry_run",
]

_IN_PLACE = object()


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """The replicas of a job on equal hosts, with one worker on each host."""

    num_workers: int
    replicas_per_worker: int = 1
    # Cores for the replicas of a worker; 0: one core for each replica.
    cores_per_worker: int = 0
    # The largest piece in shared memory; 0: the topology's default.
    slot_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Announced:
    """The header of a call, which the replicas exchange and compare."""

    # Size of the values of each worker that are sent in the header.
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Turned:
    """The point at which the algorithm begins the next piece."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """A synchronization of all replicas of a worker."""


@dataclass(frozen=True, slots=True)
class MemoryCopy:
    """Copies or sums in memory, which read and write this number of bytes."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class AllReduced:
    """MPI's nonblocking all-reduce, over all replicas or over cross-worker ranks."""

    nbytes: int
    num_ranks: int
    in_place: bool


@dataclass(frozen=True, slots=True)
class Begun:
    """The start of messages between replicas with the same position on their workers.

    A pair in ``sent`` or ``received`` is: the other worker, the bytes of the message.
    """

    tag: int
    sent: tuple[tuple[int, int], ...]
    received: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the wait for messages that ``begun`` started."""

    begun: Begun


Event = Announced | Turned | Stepped | MemoryCopy | AllReduced | Begun | Ended


class Traffic:
    """Counts the bytes that were read and written since the last call of `take`."""

    def __init__(self) -> None:
        self._nbytes = 0

    def add(self, *arrays: Any) -> None:
        """Add the sizes of arrays that an operation reads or writes."""
        self._nbytes += sum(getattr(array, "nbytes", 0) for array in arrays)

    def take(self) -> int:
        """Return the number of bytes, and reset it to 0."""
        nbytes, self._nbytes = self._nbytes, 0
        return nbytes


class Phantom:
    """A flat array that has a length and a data type, but no memory and no values.

    The algorithms use it like a NumPy array of any size, but nothing is computed. It
    has only the operations that the algorithms use on flat arrays.
    """

    __slots__ = ("_traffic", "dtype", "size")

    def __init__(self, size: int, dtype: np.dtype[Any], traffic: Traffic) -> None:
        self.size, self.dtype, self._traffic = size, dtype, traffic

    @property
    def nbytes(self) -> int:
        """Size in bytes of a real array of this length and type."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        """Return the number of elements."""
        return self.size

    def __getitem__(self, part: slice) -> Phantom:
        """Return a slice, whose operations are counted in the same `Traffic`."""
        start, stop, _ = part.indices(self.size)
        return Phantom(max(0, stop - start), self.dtype, self._traffic)

    def __setitem__(self, part: Any, values: Any) -> None:
        """Count a copy of values into the whole array."""
        assert part is ...
        self._traffic.add(values, self)

    def view(self, dtype: np.dtype[Any]) -> Phantom:
        """Return a view of the same bytes with another data type."""
        wanted = np.dtype(dtype)
        return Phantom(self.nbytes // wanted.itemsize, wanted, self._traffic)

    def copy(self) -> Phantom:
        """Count a copy into new memory, and return the copy."""
        self._traffic.add(self, self)
        return self[:]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Count a copy into a real array, and return an array of zeros."""
        del dtype, copy
        self._traffic.add(self, self)
        return np.broadcast_to(np.zeros((), self.dtype), self.size)

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: tuple[Any, ...]
    ) -> Any:
        """Count the bytes that a sum or quotient reads and writes."""
        del ufunc, method
        self._traffic.add(*inputs, *out)
        return out[0]

    def __array_function__(
        self, function: Any, types: Any, args: Any, kwargs: Any
    ) -> Any:
        """Implement np.empty_like and np.may_share_memory for arrays of this class."""
        del types, kwargs
        if function is np.may_share_memory:
            return args[0] is args[1]
        if function is np.empty_like:
            return self[:]
        return NotImplemented


class _DryRunTopology:
    """Stands in for a `Topology`, with only the attributes that a dry run reads."""

    def __init__(self, job: SimulatedJob, worker: int, position: int) -> None:
        each = job.replicas_per_worker
        self.num_workers, self.worker_id = job.num_workers, worker
        self.num_replicas = job.num_workers * each
        self.replica_id = worker * each + position
        self.smallest_worker = each
        self.shares_cores = each > (job.cores_per_worker or each)
        self.slot_bytes = job.slot_bytes or slot_bytes(each, job.num_workers)
        self.worker_comm = SimpleNamespace(size=each, rank=position)
        self.replica_comm = SimpleNamespace(
            size=self.num_replicas, rank=self.replica_id
        )
        self.cross_worker_comm = SimpleNamespace(size=job.num_workers, rank=worker)
        self.mpi = SimpleNamespace(IN_PLACE=_IN_PLACE, SUM="sum")


class _Places:
    """Replaces the ring buffers of a worker's replicas; places may have any size."""

    def __init__(self, topology: _DryRunTopology, traffic: Traffic) -> None:
        self._topology, self._traffic = topology, traffic

    def place_bytes(self, nbytes: int) -> int:
        return nbytes

    def take(self, place_bytes: int) -> int:
        del place_bytes
        return 0

    def rows(self, run: Run, place: int) -> list[Phantom]:
        del place
        ranks = range(self._topology.worker_comm.size)
        return [Phantom(run.size, run.dtype, self._traffic) for _ in ranks]

    def scratch(self, dtype: np.dtype[Any]) -> Phantom:
        size = self._topology.slot_bytes // dtype.itemsize
        return Phantom(size, dtype, self._traffic)


class _DryRunChannel:
    """Replaces a channel, and records the requests of an algorithm to it."""

    def __init__(self, topology: _DryRunTopology) -> None:
        self.topology, self.traffic = topology, Traffic()
        workers = topology.num_workers
        self.wire = SimpleNamespace(room_bytes=room_bytes(workers))
        self.rings = _Places(topology, self.traffic)
        self.events: list[Event] = []
        # Started messages. They arrive in the order in which they were started.
        self.under_way: deque[_DryRunMessages] = deque()

    def wait(self, awaited: Any) -> None:
        """Let messages arrive until the condition that an algorithm awaits is true."""
        while not awaited.agreed():
            self.under_way.popleft().come()

    def note(self, event: Event) -> None:
        nbytes = self.traffic.take()
        if nbytes:
            self.events.append(MemoryCopy(nbytes))
        self.events.append(event)

    def step(self, call: Any) -> _Come:
        del call
        self.note(Stepped())
        return _Come()

    def interruptible(self, comm: Any) -> _Comm:
        return _Comm(comm, self)


class _Come:
    """An awaitable condition that is always true."""

    def agreed(self) -> bool:
        return True


class _DryRunMessages:
    """Started messages, which arrive when `come` is called."""

    def __init__(self, begun: Begun, channel: _DryRunChannel) -> None:
        self._begun, self._channel = begun, channel
        self._here = False

    def come(self) -> None:
        self._here = True
        self._channel.note(Ended(self._begun))

    def agreed(self) -> bool:
        return self._here


class _Comm:
    """A communicator that records its messages; see `InterruptibleComm`."""

    def __init__(self, comm: Any, channel: _DryRunChannel) -> None:
        self.size, self.rank, self._channel = comm.size, comm.rank, channel
        self.mpi = channel.topology.mpi

    def Allreduce(self, send: Any, receive: Any, op: Any) -> None:  # noqa: N802
        del op
        noted = AllReduced(receive.nbytes, self.size, send is _IN_PLACE)
        self._channel.note(noted)

    def Iallreduce(self, send: Any, receive: Any, op: Any) -> _Come:  # noqa: N802
        self.Allreduce(send, receive, op)
        return _Come()

    def start(
        self, sent: Mapping[int, Any], received: Mapping[int, Any], tag: int
    ) -> _DryRunMessages:
        channel = self._channel
        begun = Begun(tag, _sizes(sent), _sizes(received))
        channel.note(begun)
        messages = _DryRunMessages(begun, channel)
        channel.under_way.append(messages)
        return messages

    def empty(self, shape: tuple[int], dtype: np.dtype[Any]) -> Phantom:
        return Phantom(shape[0], dtype, self._channel.traffic)


def _sizes(arrays: Mapping[int, Any]) -> tuple[tuple[int, int], ...]:
    return tuple((rank, array.nbytes) for rank, array in arrays.items())


def dry_run(
    shapes: Sequence[tuple[int, ...]],
    job: SimulatedJob,
    *,
    worker: int = 0,
    position: int = 0,
    ops: CrossDeviceOps | None = None,
    options: CommunicationOptions | None = None,
) -> list[Event]:
    """Return the events of one replica during a sum of float32 arrays of these shapes.

    All arrays are reduced in one call, like the gradients of an optimizer, and the
    results are in new memory. Raises HpcstratError if values are sent in half
    precision, or if the algorithm makes a request that a dry run does not support.
    """
    options = options or CommunicationOptions()
    if options.wire_dtype is not None:
        raise HpcstratError(
            "expected a reduction that sends full precision, found "
            f"wire_dtype={options.wire_dtype!r}; omit it"
        )
    float32 = np.dtype(np.float32)
    signatures = tuple((float32, shape) for shape in shapes)
    sizes = [math.prod(shape) for shape in shapes]
    nbytes = sum(sizes) * wire_dtype(float32, means=False)[0].itemsize
    topology = _DryRunTopology(job, worker, position)
    channel = _DryRunChannel(topology)
    if topology.num_replicas == 1:
        return []
    choice = (ops or CrossDeviceOps()).choose(nbytes, cast("Any", topology), options)
    pieces = tuple(itertools.islice(cut(signatures, False, choice.piece_bytes), 2))
    inline = topology.num_workers > 1 and choice.small and len(pieces) == 1
    if inline and fits_header(pieces[0], cast("Any", channel)):
        return [MemoryCopy(2 * nbytes), Announced(header_bytes(pieces[0]))]
    arrays: Any = [Phantom(size, float32, channel.traffic) for size in sizes]
    work = Work(
        describe_call("rehearsal"),
        pieces=_noted(cut(signatures, False, choice.piece_bytes), channel),
        sources=arrays,
        results=[array[:] for array in arrays],
        piece_bytes=choice.piece_bytes,
    )
    for awaited in choice.algorithm(work, cast("Any", channel)):
        if awaited is HEADER:
            channel.note(Announced())
        else:
            channel.wait(awaited)
    channel.note(Turned())
    return channel.events


def _noted(pieces: Iterable[Piece], channel: _DryRunChannel) -> Iterator[Piece]:
    for piece in pieces:
        channel.note(Turned())
        yield piece
