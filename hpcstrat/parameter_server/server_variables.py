"""Variables whose values are on parameter servers, whole or in shards."""

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
    """An initial value whose rows a function makes on the server that stores them.

    Use it for tables that do not fit into the memory of one rank.

    Parameters
    ----------
    shape : sequence of int
        Shape of the whole variable.
    dtype : dtype
        Data type of the variable.
    make : callable
        ``make(first, stop)`` returns the rows from ``first`` up to ``stop``, without
        ``stop``. It runs on a server. Each call makes at most 64 MiB of rows, but at
        least one row.
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
    """A range of rows of a variable, and the server that holds these rows."""

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
    """A variable on parameter servers, shared by the coordinator and all workers.

    The coordinator makes it by ``hs.Variable`` in the scope of a
    ParameterServerStrategy; scheduled functions use variables that they capture or get
    as arguments. The server makes the updates: a read of a shard never returns a
    half-made update, and a worker's updates are made in the order of its program. A
    scheduled function waits for its updates when it ends; the coordinator waits after
    each update. ``assign`` and similar methods return the variable.
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
        # The component has the right shape and type, but only one zero in memory.
        return np.broadcast_to(np.zeros((), kind), shape)

    def _made(self) -> None:
        """Create the shards of this variable on servers."""
        given = self.__dict__.pop("_given")
        strategy = self._strategy
        told = strategy.told_of(self)
        if told is not None:
            self._number, self._shards = told
            self._attach()
            return
        # Numbers of this variable and its shards; servers free the shards when this
        # object is freed.
        self._shards, self._held = [], list[int]()
        weakref.finalize(self, strategy.forget, self._held).atexit = False
        try:
            for start, stop in self._ranges():
                if isinstance(given, Rows):
                    # Send the function, which makes the rows on the server.
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
        """Create a shard on a server, by default on the next server in turn.

        ``value`` is an array, a pickled function, or None for zeros.
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
        """Register the variable under a new number, which identifies it in handles."""
        self._number = next(_numbers)
        self._held.append(self._number)
        self._attach()
        self._strategy.known(self._number, self)

    def move_from(self, lost: Collection[int], places: Mapping[int, int]) -> bool:
        """Recreate the shards of lost servers on other servers, filled with zeros.

        Return whether any shard was on a lost server. ``places`` maps a lost server to
        the rank that replaces it. Called on the coordinator while no function runs. For
        the library's own modules.
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
        """Yield each shard with its part of an array that has the variable's shape."""
        for shard in self._shards:
            yield shard, array[shard.start : shard.stop] if self.ndim else array

    @property
    def num_shards(self) -> int:
        """Number of shards of this variable."""
        return len(self._shards)

    def _attach(self) -> None:
        """Map the shards that are on servers of this node into this process."""
        client = self._strategy.client
        for shard in self._shards:
            shape = (shard.stop - shard.start, *self.shape[1:]) if self.ndim else ()
            shard.reader = client.reader(shard.server, shard.place, shape, self.dtype)

    def _handle(self) -> tuple[str, int, Any]:
        """Return the handle from which another rank makes its own variable object."""
        kept = ("name", "trainable", "aggregation", "synchronization", "_shards")
        state = {name: self.__dict__[name] for name in kept}
        return "variable", self._number, (type(self), state, self.shape, self.dtype)

    @classmethod
    def _from_handle(cls, strategy: Any, number: int, parts: Any) -> ServerVariable:
        """Make this rank's object for a variable, from a handle of another rank."""
        kind, state, shape, dtype = parts
        self: ServerVariable = object.__new__(kind)
        self.__dict__.update(state, _strategy=strategy, _number=number)
        self._component = np.broadcast_to(np.zeros((), dtype), shape)
        self._attach()
        return self

    @property
    def number(self) -> int:
        """The number of this variable, which is unique and the same on every rank.

        For the library's own modules.
        """
        return self._number

    @property
    def component(self) -> Array:
        """A read-only copy of the value, read from the servers."""
        return self.value()

    @property
    def device(self) -> str:
        """The rank that holds the first shard, such as ``"rank:1"``."""
        return f"rank:{self._shards[0].server}"

    def value(self) -> Array:
        """Return a read-only copy of the value.

        Not collective.

        Returns
        -------
        ndarray
            A read-only array. Each shard is read between two updates of the shard.
        """
        array = self.read_value()
        array.flags.writeable = False
        return array

    def pieces(self, slot: tuple[int, str, float] | None = None) -> ServerBytes:
        """Return an object that reads and writes the value's bytes on servers.

        If ``slot`` is given, the object is for this optimizer state instead of the
        value. For the library's own modules.
        """
        parts = [
            (each.server, each.number, each.start, each.stop, each.reader)
            for each in self._shards
        ]
        return ServerBytes(self._strategy.client, self.shape, self.dtype, parts, slot)

    def read_value(self) -> Array:
        """Return a copy of the value; a rank on the server's node reads shared memory.

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
        """Do nothing: any rank may update the variable, which all ranks share."""

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
            # Sum the rows with equal indices, so that each row is sent once.
            indices, values = summed_rows(indices, values)
        client = self._strategy.client
        with client.lock:
            for shard, chosen in self._by_shard(indices):
                own, part = indices[chosen] - shard.start, values[chosen]
                client.post(shard.server, "scatter", shard.number, method, own, part)
            client.done()
        return self

    def _by_shard(self, indices: Array) -> Iterator[tuple[_ShardLocation, Any]]:
        """Yield each shard with rows in ``indices``, and the mask of these indices."""
        if len(self._shards) == 1:
            yield self._shards[0], slice(None)
            return
        for shard in self._shards:
            chosen = (indices >= shard.start) & (indices < shard.stop)
            if chosen.any():
                yield shard, chosen

    def read_rows(self, indices: Array) -> Array:
        """Return some rows of the value; a server sends a repeated row only once.

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
            If an index is out of range.
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
        """Yield each shard's server, its number, and its part of a gradient.

        A sparse gradient also yields shards for which it has no rows, because a step
        changes the optimizer's state of all shards. For the library's own modules.
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
        """Return a table for notebooks, without a request to the servers."""
        rows = {
            "type": f"{self.dtype}{list(self.shape)}",
            "trainable": self.trainable,
            "on ranks": self._servers(),
        }
        return table(f"{type(self).__name__} {self.name}", rows)


class ShardedVariable(ServerVariable):
    """A variable that is cut into shards along its first dimension.

    ``hs.Variable`` makes it if the strategy has a ``variable_partitioner``. The servers
    get shards in turn. Reading, assigning, scattering and `embedding_lookup` act on the
    whole variable. An update is atomic only within each shard.
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
        # If rows remain, the first shards get one more row, as in tf.distribute.
        least, more = divmod(length, count)
        start = 0
        for index in range(count):
            stop = start + least + (index < more)
            yield start, stop
            start = stop

    @property
    def shard_rows(self) -> tuple[tuple[int, int], ...]:
        """For each shard, its first row and the row after its last."""
        return tuple((shard.start, shard.stop) for shard in self._shards)


class _Make:
    """Fills a new shard, on its server, with rows that ``make`` returns in pieces."""

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
