"""Sharded variables: each rank has a part of the elements, which ranks can exchange.

The elements of a variable are divided evenly between the ranks, in C order. The state
of an optimizer then takes 1/N of the memory, as in ZeRO stage 1 (Rajbhandari et al.
2020, https://arxiv.org/abs/1910.02054).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import as_array, is_device
from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.engine.values import HostValue
from hpcstrat.variables.replicated import DistributedVariable
from hpcstrat.variables.variable import apply_into

# Smaller arrays are packed into one message; larger ones are sent in place.
_SMALL_BYTES = 64 << 10
_LARGE_BYTES = 1 << 30


def part_of_rank(size: int, strategy: Replicas, rank: int | None = None) -> slice:
    """Return the elements of a variable that belong to a rank; default: this one."""
    rank = strategy.rank if rank is None else rank
    ranks = strategy.num_ranks
    return slice(rank * size // ranks, (rank + 1) * size // ranks)


class ShardedVariable(DistributedVariable):
    """A flat part of a variable on each rank, for the state of optimizers.

    Reading or assigning the value is collective over the strategy's replicas.
    """

    is_sharded = True

    def _initialize(self, initial_value: Any, dtype: Any) -> Array:
        value = initial_value
        if type(value) is HostValue:
            value = value.array
        whole = as_array(value, dtype)
        if is_device(whole):
            raise NotImplementedError(
                "expected a variable in host memory to divide its state between the "
                f"ranks, found {self.name!r} on a GPU; leave out sharded=True"
            )
        self._shape = whole.shape
        self.part = part_of_rank(math.prod(whole.shape), self._strategy)
        length = self.part.stop - self.part.start
        if not any(whole.strides) and whole.size:
            # `whole` repeats one element; copying a slice of it would make it whole.
            return np.full(length, whole.flat[0], whole.dtype)
        return np.array(whole.reshape(-1)[self.part])

    def _communicates(self) -> bool:
        return True

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole value."""
        return self._shape

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of elements on all ranks together."""
        return math.prod(self._shape)

    def own_part(self, value: Array) -> Array:
        """Return this rank's elements of an array of the variable's shape."""
        return value.reshape(-1)[self.part]

    @collective
    def value(self) -> Array:
        """Return the whole value from the parts of all ranks: a fresh array.

        Collective over the strategy's replicas.
        """
        return read_sharded([self])[0]

    def _update(self, method: str, value: Any, read_value: bool) -> Any:
        array = np.asarray(value, self.dtype)
        if array.shape != self._shape:
            raise ValueError(
                f"expected shape {self._shape} in {method} of variable {self.name!r}, "
                f"found {array.shape}; nothing is broadcast"
            )
        apply_into(self._component, method, self.own_part(array))
        return self.value() if read_value else None


def read_sharded(variables: Sequence[Any]) -> list[Array]:
    """Return the values of sharded variables of one strategy, in one call.

    Collective over the strategy's replicas, if there are any.
    """
    if not variables:
        return []
    names = ", ".join(variable.name for variable in variables)
    own = [variable.component for variable in variables]
    collectives = variables[0]._strategy.collectives
    parts = collectives.all_gather(own, 0, f"reading of variables {names}")
    return [
        part.reshape(variable.shape)
        for part, variable in zip(parts, variables, strict=True)
    ]


def exchange_parts(
    strategy: Replicas, arrays: Sequence[Array], what: str, seconds: float | None
) -> None:
    """Give all ranks the parts that each rank has written of some arrays, in place.

    Collective over ``topology.replica_comm``. The arrays are contiguous, and divided as
    in `part_of_rank`; ``seconds`` is how long to wait for late ranks.
    """
    channel: Any = strategy.collectives.channel
    if channel is None:
        return
    flats = [array.reshape(-1) for array in arrays]
    small = [flat for flat in flats if flat.nbytes <= _SMALL_BYTES]
    ranks = range(strategy.num_ranks)

    def parts(rank: int) -> list[Array]:
        return [
            flat[part_of_rank(flat.size, strategy, rank)].view(np.uint8)
            for flat in small
        ]

    sizes = [sum(part.nbytes for part in parts(rank)) for rank in ranks]
    packed = np.empty(sum(sizes), np.uint8)
    call = describe_call(what, "", sum(flat.nbytes for flat in flats))
    channel.agree(call, seconds)
    with channel.moving(call) as comm:
        byte = comm.mpi.BYTE
        for flat in flats:
            if flat.nbytes > _SMALL_BYTES:
                _exchange_large(comm, strategy, flat)
        if packed.size:
            own = np.concatenate(parts(comm.rank))
            comm.Allgatherv([own, byte], [packed, sizes, byte])
    start = 0
    for rank in ranks:
        for part in parts(rank) if small else ():
            part[...] = packed[start : start + part.nbytes]
            start += part.nbytes


def _exchange_large(comm: Any, strategy: Replicas, flat: Array) -> None:
    """Exchange the parts of an array in place."""
    whole, width = flat.view(np.uint8), flat.itemsize
    spans = [part_of_rank(flat.size, strategy, rank) for rank in range(comm.size)]
    if whole.nbytes < _LARGE_BYTES:
        sizes = [(span.stop - span.start) * width for span in spans]
        comm.Allgatherv(comm.mpi.IN_PLACE, [whole, sizes, comm.mpi.BYTE])
        return
    # Many MPIs have no displacements above 2**31 - 1 bytes: one rank after the other.
    for rank, span in enumerate(spans):
        comm.cast_array(whole[span.start * width : span.stop * width], rank)
