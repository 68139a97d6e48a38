"""Sharded variables: each rank stores only a part of the elements.

The elements of a variable are divided evenly between the ranks, in C order. An
optimizer's state then uses 1/N of the memory on each of N ranks, as in ZeRO stage 1
(Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054).
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

# Arrays of up to this size share one message; larger arrays are sent without a copy.
_SMALL_BYTES = 64 << 10


def part_of_rank(size: int, strategy: Replicas, rank: int | None = None) -> slice:
    """Return the range of ``size`` elements that a rank (default: this rank) stores."""
    rank = strategy.rank if rank is None else rank
    ranks = strategy.num_ranks
    return slice(rank * size // ranks, (rank + 1) * size // ranks)


class ShardedVariable(DistributedVariable):
    """A variable for the state of optimizers: each rank stores a part of its elements.

    Reading the value, and an assignment that returns the new value, are collective over
    the strategy's replicas."""

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
            # If all strides are 0, `whole` is a single element that is repeated;
            # ``reshape`` would allocate memory for all repetitions.
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
        """Return the whole value, gathered from all ranks, as a new array.

        Collective over the strategy's replicas."""
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
    """Return the values of sharded variables of one strategy, by one collective call.

    Collective over the strategy's replicas, unless ``variables`` is empty."""
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
    """Exchange parts of arrays in place: each rank sends the part that it has written.

    Collective over ``topology.replica_comm``. Afterwards every rank has the whole
    arrays. The arrays must be contiguous; `part_of_rank` defines the parts. ``seconds``
    is the timeout for late ranks.
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
        for flat in flats:
            if flat.nbytes > _SMALL_BYTES:
                _exchange_large(comm, strategy, flat)
        if packed.size:
            first = sum(sizes[: comm.rank])
            own = packed[first : first + sizes[comm.rank]]
            np.concatenate(parts(comm.rank), out=own)
            comm.Allgatherv(packed, sizes)
    start = 0
    for rank in ranks:
        for part in parts(rank) if small else ():
            part[...] = packed[start : start + part.nbytes]
            start += part.nbytes


def _exchange_large(comm: Any, strategy: Replicas, flat: Array) -> None:
    """Exchange the ranks' parts of one array in place."""
    spans = [part_of_rank(flat.size, strategy, rank) for rank in range(comm.size)]
    sizes = [(span.stop - span.start) * flat.itemsize for span in spans]
    comm.Allgatherv(flat.view(np.uint8), sizes)
