"""Central variables, with one copy in the shared memory of each worker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.slices import lay_out, write_between
from hpcstrat.engine.algorithms.work import slice_of
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import as_array, is_device
from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.typing import Array
from hpcstrat.engine.values import Adopted, HostValue
from hpcstrat.variables.replicated import MirroredVariable
from hpcstrat.variables.variable import apply_into, scatter_into


class CentralVariable(MirroredVariable):
    """A variable with one copy in the shared memory of each worker.

    In the scope of a `CentralStorageStrategy` every `Variable` is a central variable. A
    central variable is used like a mirrored variable, but every update is collective
    over the strategy's replicas, in every context: each replica writes one slice, after
    all replicas have begun the call and before the call returns on any replica. So no
    replica reads a half-updated variable.
    """

    _kind = "central"
    _danger = "the replicas would overwrite one another's value"

    def _initialize(self, initial_value: Any, dtype: Any) -> Array:
        what = f"creation of variable {self.name!r}"
        component: Array = self._strategy.collectives.call(
            what, self._made_of, initial_value, dtype, what
        )
        return component

    def _made_of(self, initial_value: Any, dtype: Any, what: str) -> Array:
        value = self._first_value(initial_value)
        sends = not (type(value) is HostValue and value.is_own)
        array = value.array if type(value) in (HostValue, Adopted) else value
        array = as_array(array, dtype)
        if is_device(array) or type(value) is Adopted:
            found = "one on a GPU" if is_device(array) else "memory to adopt"
            raise ValueError(
                f"expected an array in host memory, to be copied into central storage, "
                f"for variable {self.name!r}, found {found}; copy it, or use "
                "MirroredStrategy"
            )
        self._require_type(array.dtype)
        return self._laid_out(array, what, sends=sends)

    def _laid_out(self, array: Array, what: str, *, sends: bool) -> Array:
        """Return a copy of an array in memory that the worker's ranks share.

        Collective over the strategy's replicas."""
        collectives = self._strategy.collectives
        channel = collectives.channel
        if channel is None:
            own: Array = np.array(array, order="C")
            return own
        call = describe_call(what, f"{array.dtype}{list(array.shape)}", array.nbytes)
        made: list[Array] = []
        steps = lay_out(
            array, self._strategy.allocator, made, call, channel, sends=sends
        )
        channel.drive(steps, call, collectives.timeout_seconds)
        return made[0]

    def _made(self) -> None:
        # With a single worker, divergence checks have no second copy to compare.
        if self._strategy.topology.num_workers > 1:
            super()._made()

    def _communicates(self) -> bool:
        return True

    def _apply(self, method: str, array: Array, read_value: bool) -> Any:
        flat, given = self._component.reshape(-1), self._apart(array).reshape(-1)

        def write(own: slice) -> None:
            apply_into(flat[own], method, given[own])

        self._write(method, flat.size, write)
        return self._component.copy() if read_value else None

    def _scatter_own(self, method: str, rows: IndexedSlices) -> Any:
        values, indices = self._apart(self._rows(method, rows)), rows.indices

        def write(own: slice) -> None:
            kept = (indices >= own.start) & (indices < own.stop)
            if kept.any():
                part = indices[kept] - own.start
                scatter_into(self._component[own], method, part, values[kept])

        self._write(method, self.shape[0] if self.shape else 0, write)
        return self._component.copy()

    def _apart(self, array: Array) -> Array:
        """Return an array that does not change while ranks write to the variable."""
        # Another rank could overwrite shared elements before this rank reads them.
        shares = np.may_share_memory(array, self._component)
        return array.copy() if shares else array

    def _write(self, method: str, count: int, write: Callable[[slice], None]) -> None:
        """Call ``write`` for this rank's slice of ``count`` elements; collective."""
        collectives: Any = self._strategy.collectives
        channel = collectives.channel
        if channel is None:
            write(slice(0, count))
            return
        comm = channel.topology.worker_comm
        own = functools.partial(write, slice_of(count, comm.rank, comm.size))
        call = describe_call(f"{method} of variable {self.name!r}")
        steps = write_between(own, call, channel)
        channel.drive(steps, call, collectives.timeout_seconds)

    def _copied(self) -> Array:
        """Return a copy of the value in the worker's shared memory; collective."""
        what, lay = f"copy of variable {self.name!r}", self._laid_out
        own: Array = self._strategy.collectives.call(
            what, functools.partial(lay, self._component, what, sends=False)
        )
        return own
