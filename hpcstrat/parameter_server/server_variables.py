"""Variables that live on parameter servers, whole or in shards."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.row_updates import summed_rows
from hpcstrat.engine.html import table
from hpcstrat.engine.typing import Array
from hpcstrat.engine.values import Adopted, HostValue
from hpcstrat.parameter_server.handles import pickled
from hpcstrat.parameter_server.pieces import ServerBytes
from hpcstrat.parameter_server.shared_files import FilePlace, Reader
from hpcstrat.variables import Variable

_PIECE_BYTES = 64 << 20
_numbers = itertools.count()


class Rows:
    """An initial value that servers make, each its own rows.

    For tables that fit into no other rank's memory.

    Parameters
    ----------
    shape : sequence of int
        Shape of the whole variable.
    dtype : dtype
        Type of the variable.
    make : callable
        Takes the first row and the row after the last, and returns these rows. It runs
        on a server, for at most 64 MiB or one row at a time.
    """

    def __init__(
        self, shape: Sequence[int], dtype: Any, make: Callable[[int, int], Array]
    ) -> None:
        self.shape = tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype)
        self.make = make

    def __repr__(self) -> str:
        return f"Rows({self.shape}, {self.dtype})"


@dataclass
class _ShardLocation:
    """Rows of a variable, and the server that holds them."""

    server: int
    number: int
    start: int
    stop: int
    place: FilePlace
    reader: Reader | None = field(default=None, repr=False)

    def __getstate__(self) -> tuple[Any, ...]:
        return (self.server, self.number, self.start, self.stop, self.place)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.server, self.number, self.start, self.stop, self.place = state
        self.reader = None


class ServerVariable(Variable):
    """A variable on a parameter server, the same for the coordinator and all workers.

    The coordinator makes it by ``hs.Variable`` in the scope of a
    ParameterServerStrategy; scheduled functions use variables that they capture, or get
    as arguments. The server makes updates: no read sees half of one, and updates of one
    worker are made in the order of its program. A function waits at its end for its
    updates, the coordinator after each. ``assign`` and the like return the variable.
    """

    is_remote = True
    _shards: list[_ShardLocation]
    _number: int

    def _initialize(self, initial_value: Any, dtype: Any) -> Array:
        value = initial_value() if callable(initial_value) else initial_value
        if type(value) is Adopted:
            raise ValueError(
                f"expected a value for variable {self.name!r}, which goes to a server, "
                "found memory to adopt; adopt it outside of the strategy's scope"
            )
        value = value.array if type(value) is HostValue else value
        if isinstance(value, Rows):
            self._given: Any = value
            shape, kind = value.shape, value.dtype
        else:
            self._given = super()._initialize(value, dtype)
            shape, kind = self._given.shape, self._given.dtype
        # A view of one zero: it has shape and type, and takes no memory.
        return np.broadcast_to(np.zeros((), kind), shape)

    def _made(self) -> None:
        """Put the shards on servers."""
        given = self.__dict__.pop("_given")
        strategy = self._strategy
        told = strategy.told_of(self)
        if told is not None:
            self._number, self._shards = told
            self._attach()
            return
        # Numbers under which servers keep the shards.
        self._shards, self._held = [], list[int]()
        weakref.finalize(self, strategy.forget, self._held).atexit = False
        try:
            for start, stop in self._ranges():
                if isinstance(given, Rows):
                    # Only the server makes these rows.
                    value: Any = pickled(_Make(given.make, start))
                else:
                    value = given[start:stop] if self.ndim else given
                self._shards.append(self._placed(start, stop, value))
        except BaseException as error:
            strategy.not_made(error)
            raise
        self._begin()

    def _placed(
        self, start: int, stop: int, value: Any, server: int | None = None
    ) -> _ShardLocation:
        """Put rows on a server, by default the next: an array, a function, or None for
        zeros.
        """
        if server is None:
            server = self._strategy.next_server()
        number = next(_numbers)
        shape = (stop - start, *self.shape[1:]) if self.ndim else ()
        place = self._strategy.client.ask(
            server, "create", number, self.name, shape, self.dtype, value
        )
        self._held.append(number)
        return _ShardLocation(server, number, start, stop, place)

    def _begin(self) -> None:
        """Announce the variable at its present place."""
        self._number = next(_numbers)
        self._held.append(self._number)
        self._attach()
        self._strategy.known(self._number, self)

    def move_from(self, lost: Collection[int], places: Mapping[int, int]) -> bool:
        """Move the shards of lost servers to others, as zeros; return whether there
        were any.

        On the coordinator, while no function is under way. For the library's own
        modules.
        """
        if not any(shard.server in lost for shard in self._shards):
            return False
        for index, shard in enumerate(self._shards):
            if shard.server in lost:
                place = places.get(shard.server)
                self._shards[index] = self._placed(shard.start, shard.stop, None, place)
        self._begin()
        return True

    def _ranges(self) -> Iterator[tuple[int, int]]:
        yield 0, self.shape[0] if self.shape else 1

    def _parts(self, array: Array) -> Iterator[tuple[_ShardLocation, Array]]:
        """Yield the shards with their parts of an array of the variable's shape."""
        for shard in self._shards:
            yield shard, array[shard.start : shard.stop] if self.ndim else array

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self._shards)

    def _attach(self) -> None:
        """Map the shards that are in shared memory of this node."""
        client = self._strategy.client
        for shard in self._shards:
            shape = (shard.stop - shard.start, *self.shape[1:]) if self.ndim else ()
            shard.reader = client.reader(shard.server, shard.place, shape, self.dtype)

    def _handle(self) -> tuple[str, int, Any]:
        """Return the data from which another rank makes its own object."""
        kept = ("name", "trainable", "aggregation", "synchronization", "_shards")
        state = {name: self.__dict__[name] for name in kept}
        return "variable", self._number, (type(self), state, self.shape, self.dtype)

    @classmethod
    def _from_handle(cls, strategy: Any, number: int, parts: Any) -> ServerVariable:
        """Return a variable that the coordinator has made."""
        kind, state, shape, dtype = parts
        self: ServerVariable = object.__new__(kind)
        self.__dict__.update(state, _strategy=strategy, _number=number)
        self._component = np.broadcast_to(np.zeros((), dtype), shape)
        self._attach()
        return self

    @property
    def number(self) -> int:
        """A number that only this variable has, the same on every rank.

        For the library's own modules.
        """
        return self._number

    @property
    def component(self) -> Array:
        """A read-only copy of the value, which is on servers."""
        return self.value()

    @property
    def device(self) -> str:
        """The rank that holds the variable, or its first shard."""
        return f"rank:{self._shards[0].server}"

    def value(self) -> Array:
        """Return a read-only copy of the value.

        Not collective.

        Returns
        -------
        ndarray
            Read-only. Each shard is as it was between two updates.
        """
        array = self.read_value()
        array.flags.writeable = False
        return array

    def pieces(self, slot: tuple[int, str, float] | None = None) -> ServerBytes:
        """Return the value's bytes on servers, or those of an optimizer's state.

        For the library's own modules.
        """
        parts = [
            (each.server, each.number, each.start, each.stop, each.reader)
            for each in self._shards
        ]
        return ServerBytes(self._strategy.client, self.shape, self.dtype, parts, slot)

    def read_value(self) -> Array:
        """Return a copy of the value, from shared memory on the server's node.

        Not collective.

        Returns
        -------
        ndarray
            A fresh array.
        """
        out = np.empty(self.shape, self.dtype)
        client = self._strategy.client
        for shard, part in self._parts(out):
            client.read(shard.server, shard.number, shard.reader, part)
        return out

    def numpy(self) -> Array:
        return self.read_value()

    def _require_alone(self, method: str) -> None:
        """Allow all ranks to update the variable, which they share."""

    def _apply(self, method: str, array: Array, read_value: bool) -> Any:
        client = self._strategy.client
        with client.lock:
            for shard, part in self._parts(array):
                client.post(shard.server, method, shard.number, part)
            client.done()
        return self if read_value else None

    def _scatter_own(self, method: str, rows: IndexedSlices) -> Any:
        values, indices = self._rows(method, rows), rows.indices
        if method in ("scatter_add", "scatter_sub"):
            # Each row is sent once.
            indices, values = summed_rows(indices, values)
        client = self._strategy.client
        with client.lock:
            for shard, chosen in self._by_shard(indices):
                own, part = indices[chosen] - shard.start, values[chosen]
                client.post(shard.server, "scatter", shard.number, method, own, part)
            client.done()
        return self

    def _by_shard(self, indices: Array) -> Iterator[tuple[_ShardLocation, Any]]:
        """Yield the shards of some rows, with a mask of the rows in each."""
        if len(self._shards) == 1:
            yield self._shards[0], slice(None)
            return
        for shard in self._shards:
            chosen = (indices >= shard.start) & (indices < shard.stop)
            if chosen.any():
                yield shard, chosen

    def read_rows(self, indices: Array) -> Array:
        """Return rows; a row that comes several times is sent once.

        Not collective.

        Parameters
        ----------
        indices : ndarray of int of shape (n,)
            Numbers of the rows.

        Returns
        -------
        ndarray of shape (n, ...)
            A fresh array.

        Raises
        ------
        ValueError
            For an index out of range.
        """
        length = self.shape[0] if self.shape else 0
        if indices.size and (indices.min() < 0 or indices.max() >= length):
            raise ValueError(
                f"expected indices from 0 to {length - 1} for variable {self.name!r}, "
                f"found {indices.min()} to {indices.max()}; check the rows"
            )
        client = self._strategy.client
        if len(self._shards) == 1:
            one = self._shards[0]
            rows: Array = client.read_rows(one.server, one.number, one.reader, indices)
            return rows
        out = np.empty((len(indices), *self.shape[1:]), self.dtype)
        for shard, chosen in self._by_shard(indices):
            out[chosen] = client.read_rows(
                shard.server, shard.number, shard.reader, indices[chosen] - shard.start
            )
        return out

    def gradient_parts(self, gradient: Any) -> Iterator[tuple[int, int, Any]]:
        """Yield each shard's server, number and part of a gradient.

        Shards without a row of a sparse gradient are included: a step changes all of an
        optimizer's state, whatever the number of shards. For the library's own modules.
        """
        if not isinstance(gradient, IndexedSlices):
            for shard, part in self._parts(gradient):
                yield shard.server, shard.number, part
            return
        chosen_of = {
            shard.number: chosen for shard, chosen in self._by_shard(gradient.indices)
        }
        nothing = np.empty(0, np.int64)
        for shard in self._shards:
            chosen = chosen_of.get(shard.number, nothing)
            rows = gradient.indices[chosen] - shard.start
            yield shard.server, shard.number, (rows, gradient.values[chosen])

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            f"expected a variable to copy, found {self.name!r}, which is on parameter "
            "servers; make another of variable.numpy()"
        )

    def _servers(self) -> str:
        return ", ".join(str(shard.server) for shard in self._shards)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name!r} {self.dtype}{list(self.shape)} on "
            f"ranks {self._servers()}>"
        )

    def _repr_html_(self) -> str:
        """Return a table for notebooks, without asking the servers."""
        rows = {
            "type": f"{self.dtype}{list(self.shape)}",
            "trainable": self.trainable,
            "on ranks": self._servers(),
        }
        return table(f"{type(self).__name__} {self.name}", rows)


class ShardedVariable(ServerVariable):
    """A variable in shards by its first dimension, which servers get in turn.

    Made by ``hs.Variable`` if the strategy has a ``variable_partitioner``. Reading,
    assigning, scattering and `embedding_lookup` use all its shards. Updates are whole
    for each shard.
    """

    def _ranges(self) -> Iterator[tuple[int, int]]:
        parts = self._strategy.variable_partitioner(self.shape, self.dtype)
        if any(count != 1 for count in parts[1:]):
            raise ValueError(
                f"expected a partitioner that cuts variable {self.name!r} along its "
                f"first dimension, found parts {list(parts)}; change it"
            )
        length = self.shape[0] if self.shape else 1
        count = parts[0] if self.shape else 1
        # As tf.distribute does: the first shards have a row more.
        least, more = divmod(length, count)
        start = 0
        for index in range(count):
            stop = start + least + (index < more)
            yield start, stop
            start = stop

    @property
    def shard_rows(self) -> tuple[tuple[int, int], ...]:
        """First row, and the row after the last, of each shard."""
        return tuple((shard.start, shard.stop) for shard in self._shards)


class _Make:
    """Makes the rows of a shard, on its server, in pieces."""

    def __init__(self, make: Callable[[int, int], Array], start: int) -> None:
        self._make, self._start = make, start

    def __call__(self, array: Array) -> None:
        row_bytes = array.nbytes // max(len(array), 1)
        each = max(_PIECE_BYTES // max(row_bytes, 1), 1)
        for first in range(0, len(array), each):
            part = array[first : first + each]
            start, stop = self._start + first, self._start + first + len(part)
            rows = np.asarray(self._make(start, stop))
            if rows.shape != part.shape:
                raise ValueError(
                    f"expected rows of shape {part.shape}, found {rows.shape}; make "
                    f"those from {start} to {stop}"
                )
            part[...] = rows
