"""`Inside`: the ranks of one replica, if a replica consists of several ranks."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import as_array, to_host
from hpcstrat.engine.calls.field_moves import grid_lines
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.call_state import Position
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.tree import flatten
from hpcstrat.engine.typing import Array, Tree
from hpcstrat.errors import CollectiveError
from hpcstrat.variables.divided import Split

__all__ = ["Inside", "parse_shape"]

# The only axis of a replica that is given by its number of ranks.
_AXIS = "ranks"
# An error names at most this number of values or ranks.
_MOST_NAMED = 4
_ADVICE = (
    "finish sums inside of the replica by strategy.inside.sum, or use "
    "strategy.inside.broadcast; for values that stay divided, see "
    "strategy.inside.divided"
)


def parse_shape(ranks: Any, shape: Any) -> dict[str, int]:
    """Return the axes of a replica's ranks, from ``ranks_per_replica`` or a shape.

    Raises TypeError or ValueError for wrong arguments.
    """
    if ranks is not None and shape is not None:
        raise ValueError(
            "expected ranks_per_replica or replica_shape, found both; leave one out"
        )
    if shape is None:
        shape = {_AXIS: 1 if ranks is None else ranks}
    if not isinstance(shape, Mapping) or not shape:
        raise TypeError(
            f"expected a dict of numbers of ranks as replica_shape, found {shape!r}; "
            'write replica_shape={"x": 2, "y": 2}, for example'
        )
    for axis, length in shape.items():
        whole = isinstance(length, (int, np.integer)) and not isinstance(length, bool)
        if not isinstance(axis, str) or not whole or length < 1:
            raise ValueError(
                f"expected a number of ranks >= 1 of the replica along {axis!r}, found "
                f"{length!r}; change it"
            )
    return {axis: int(length) for axis, length in shape.items()}


class Inside:
    """The ranks of one replica, and the calls among them.

    The strategy makes this object, its attribute ``inside``. The ranks of a replica are
    neighbors in rank order. Its calls are collective over the ranks of one replica:
    inside of ``run`` or outside, other replicas need not make them. Each call is
    checked, as all calls of a strategy are. If a replica is one rank, the calls return
    copies of their arguments.

    Parameters
    ----------
    shape : dict of str to int
        The number of ranks along each axis of the replica; the last axis varies
        fastest in rank order.
    collectives : Collectives
        The calls among the ranks of this replica.
    replica : int
        The number of this replica.

    Attributes
    ----------
    shape : dict of str to int
        The argument ``shape``.
    size : int
        The number of ranks of a replica.
    position : int
        The number of this rank among the ranks of its replica, from 0.
    coords : dict of str to int
        The position along each axis.
    collectives : Collectives
        For the library's own modules.
    """

    def __init__(
        self, shape: Mapping[str, int], collectives: Collectives, replica: int = 0
    ) -> None:
        self.shape = dict(shape)
        self.collectives = collectives
        self.size = collectives.size
        self.position = collectives.rank
        self.coords = self.coords_of(self.position)
        self._replica = replica
        # The step counts of the other channels of the strategy, which `run` and next()
        # increase as well: if a rank leaves out a call on one channel, all ranks notice
        # this in their next call on any other.
        self.counted: Sequence[Position] = ()
        self._comm: Any = None
        # Above 0 in blocks whose values may differ between positions.
        self._divided = 0
        self._lines: dict[str, Any] = {}

    def count_run(self) -> None:
        """Count a call of `run` on the other channels of the strategy."""
        for position in self.counted:
            position.enter_run()

    def count_next(self) -> None:
        """Count a request for a batch on the other channels of the strategy."""
        for position in self.counted:
            position.enter_next()

    def __repr__(self) -> str:
        return f"Inside(position {self.position} of {self.size}, shape {self.shape})"

    @property
    def comm(self) -> Any:
        """A communicator of mpi4py, of this replica's ranks, for the program's own use.

        The library makes no calls on it. The first access is collective over the ranks
        of the replica; `Strategy.close` frees it.
        """
        if self._comm is None:
            channel: Any = self.collectives.channel
            if channel is None:
                from hpcstrat.engine.topology.topology import start_mpi

                self._comm = start_mpi().COMM_SELF.Dup()
            else:
                self._comm = self.collectives.call(
                    "inside.comm", channel.topology.duplicate
                )
        return self._comm

    def coords_of(self, position: int) -> dict[str, int]:
        """Return the coordinates of a rank of the replica along each axis.

        Not collective.

        Parameters
        ----------
        position : int
            The position of the rank in the replica.

        Returns
        -------
        dict of str to int
            Its coordinate, from 0, along each axis of ``shape``.
        """
        found = np.unravel_index(position, tuple(self.shape.values()))
        return dict(zip(self.shape, map(int, found), strict=True))

    def part(
        self,
        length: int,
        along: str | None = None,
        *,
        unit: int = 1,
        position: int | None = None,
    ) -> slice:
        """Return the rows of this rank of an axis that is divided inside the replica.

        Not collective. Of ``n`` rows, position ``p`` of ``M`` has the rows from
        ``p * n // M`` to ``(p + 1) * n // M``: lengths differ by at most one.

        Parameters
        ----------
        length : int
            The number of rows of the whole axis, at least 0.
        along : str, optional
            The axis of ``shape`` whose ranks divide the rows; default: all ranks of the
            replica divide them.
        unit : int
            Rows are divided in groups of ``unit`` adjacent rows, as layers with a
            stride need it. Must divide ``length``.
        position : int, optional
            Another rank of the replica; default: this rank.

        Returns
        -------
        slice
            The rows, as in ``field[inside.part(len(field))]``.

        Raises
        ------
        ValueError
            If ``length`` is negative, no multiple of ``unit``, or there is no axis of
            this name.
        """
        count, unit = operator.index(length), operator.index(unit)
        if count < 0 or unit < 1 or count % unit:
            raise ValueError(
                f"expected a number of rows >= 0 that is a multiple of {unit}, found "
                f"{count}; change it"
            )
        place, ranks = self.position if position is None else position, self.size
        if along is not None:
            self.require_axis(along)
            place, ranks = self.coords_of(place)[along], self.shape[along]
        groups = count // unit
        low, high = place * groups // ranks, (place + 1) * groups // ranks
        return slice(low * unit, high * unit)

    # Calls among the ranks of the replica.

    def sum(self, value: Tree) -> Tree:
        """Return the sum of the values of this replica's ranks, on each of them.

        Collective over the ranks of the replica.

        Parameters
        ----------
        value : tree of array_like, each of shape (...)
            This rank's values; structure, shapes and dtypes are equal on all ranks.

        Returns
        -------
        tree of ndarray
            New arrays; equal bit for bit on all ranks of the replica.

        Raises
        ------
        CollectiveError
            If the ranks disagree on structure, shapes or dtypes. On each of them.
        """
        calls = self.collectives
        found = calls.repeat("inside.sum", ReduceOp.SUM, value, None)
        if found is not None:
            return found
        return calls.batch_reduce(ReduceOp.SUM, value, "inside.sum")

    def gather(self, value: Tree, axis: int) -> Tree:
        """Concatenate the arrays of this replica's ranks along an axis.

        Collective over the ranks of the replica.

        Parameters
        ----------
        value : tree of array_like
            This rank's arrays; their lengths along ``axis`` may differ between ranks.
        axis : int
            At least 0.

        Returns
        -------
        tree of ndarray
            New arrays, concatenated in the order of positions.

        Raises
        ------
        CollectiveError
            If the ranks disagree on dtypes or on other dimensions. On each of them.
        """
        return self.collectives.all_gather(value, axis, "inside.gather")

    def broadcast(self, value: Tree, position: int = 0) -> Tree:
        """Return the values of one rank of this replica, on all its ranks.

        Collective over the ranks of the replica.

        Parameters
        ----------
        value : tree of array_like
            Structure, shapes and dtypes are equal on all ranks.
        position : int
            The rank whose values are sent.

        Returns
        -------
        tree of ndarray
            New arrays.

        Raises
        ------
        CollectiveError
            If the ranks disagree on structure, shapes or dtypes. On each of them.
        """
        return self.collectives.broadcast(value, position, "inside.broadcast")

    def halo(
        self,
        value: Tree,
        axis: int,
        width: int | tuple[int, int],
        *,
        along: str | None = None,
        periodic: bool = False,
        out: Array | None = None,
    ) -> Tree:
        """Return this rank's rows between the rows of its neighbors.

        Collective over the ranks of the replica.

        Parameters
        ----------
        value : tree of array_like, each of shape (...)
            This rank's part of each field. The lengths along ``axis`` may differ
            between ranks, and may be 0.
        axis : int
            The axis along which the field is divided.
        width : int or tuple of int
            The number of rows before and after the own rows, or a pair of these two
            numbers. If a neighbor has fewer rows, the others come from the next ranks.
        along : str, optional
            The axis of ``shape`` whose ranks divide the field; default: all ranks.
        periodic : bool
            True: the first row of the field follows the last one. False: rows outside
            of the field are zero.
        out : ndarray, optional
            An array for the result of a single field, which saves the time to allocate
            it in each step, if it is contiguous; default: a new array.

        Returns
        -------
        tree of ndarray
            ``out``, or new arrays, longer along ``axis`` by both widths.

        Raises
        ------
        ValueError
            For a wrong axis, width or ``out``, or a periodic halo that is wider than
            the field.
        CollectiveError
            If the ranks disagree on the arguments, dtypes or other dimensions. On each
            of them.
        """
        fields, lines = self.collectives.fields, self.lines(along)
        how = {"periodic": periodic, "lines": lines, "out": out}
        return fields.halo(value, axis, width, **how)

    def halo_adjoint(
        self,
        value: Tree,
        axis: int,
        width: int | tuple[int, int],
        *,
        along: str | None = None,
        periodic: bool = False,
    ) -> Tree:
        """Return the adjoint of `halo`: add the rows of all halos to their owners.

        Collective over the ranks of the replica. For all arrays ``x`` and ``y`` of all
        ranks, the scalar product of ``halo(x)`` and ``y`` is that of ``x`` and
        ``halo_adjoint(y)``.

        Parameters
        ----------
        value : tree of array_like
            Arrays of the shapes that `halo` returns.
        axis : int
            As in `halo`.
        width : int or tuple of int
            As in `halo`.
        along : str, optional
            As in `halo`.
        periodic : bool
            As in `halo`.

        Returns
        -------
        tree of ndarray
            New arrays of the shapes of this rank's parts.

        Raises
        ------
        ValueError
            As `halo`, and for arrays that are shorter than their halo.
        CollectiveError
            As `halo`.
        """
        fields, lines = self.collectives.fields, self.lines(along)
        return fields.halo_adjoint(value, axis, width, periodic=periodic, lines=lines)

    def transpose(
        self, value: Tree, split: int, whole: int, *, along: str | None = None
    ) -> Tree:
        """Divide arrays along ``whole`` that are divided along ``split``.

        Collective over the ranks of the replica. The order of the axes remains. The
        adjoint is the same call with ``split`` and ``whole`` exchanged.

        Parameters
        ----------
        value : tree of array_like
            This rank's parts, with the lengths of `part` along ``split``.
        split, whole : int
            Two different axes.
        along : str, optional
            The axis of ``shape`` whose ranks divide the arrays; default: all ranks.

        Returns
        -------
        tree of ndarray
            New arrays, whole along ``split``, and with the lengths of `part` along
            ``whole``.

        Raises
        ------
        ValueError
            For wrong axes, or other lengths than those of `part`.
        CollectiveError
            If the ranks disagree on the arguments, dtypes or other dimensions. On each
            of them.
        """
        fields, lines = self.collectives.fields, self.lines(along)
        return fields.transpose(value, split, whole, lines=lines)

    def lines(self, along: str | None) -> Any:
        """Return the ranks of each line along an axis; None for one line of all.

        Not collective. For the library's own modules."""
        if along is None:
            return None
        found = self._lines.get(along)
        if found is None:
            self.require_axis(along)
            dimension = list(self.shape).index(along)
            found = grid_lines(tuple(self.shape.values()), dimension)
            self._lines[along] = found
        return found

    def require_axis(self, along: str) -> None:
        """Raise ValueError if the replica has no axis of this name."""
        if along not in self.shape:
            raise ValueError(
                f"expected an axis of {self.shape}, found {along!r}; name one of these"
            )

    # The values that leave a replica.

    @contextlib.contextmanager
    def divided(self) -> Iterator[None]:
        """Let calls of the strategy in this block take values that ranks have divided.

        Not collective. In general, a value that leaves a replica, in ``reduce`` or
        ``all_reduce`` for example, must be equal on all ranks of the replica. Inside of
        this block it may differ: then the ranks at one position of all replicas reduce
        or gather their values, and each position has its own result.

        Yields
        ------
        None
        """
        self._divided += 1
        try:
            yield
        finally:
            self._divided -= 1

    @property
    def is_divided(self) -> bool:
        """Whether this rank is in a `divided` block; for the library's own modules."""
        return self._divided > 0

    def require_whole(
        self,
        what: str,
        tree: Tree,
        names: Sequence[str] | None = None,
        *,
        advice: str = _ADVICE,
        splits: Sequence[Split] | None = None,
        error: type[CollectiveError] = CollectiveError,
    ) -> None:
        """Raise CollectiveError if values differ between the ranks of the replica.

        Collective over the ranks of the replica, except in `divided` blocks. For the
        library's own modules. ``names`` are names of the leaves for the message. With
        ``splits``, one for each leaf, ranks compare only leaves that are the same part
        of a divided array.
        """
        if self.size == 1 or self._divided:
            return
        leaves = flatten(tree)[0]
        # For each leaf, the rank with which each rank compares its value.
        firsts = [self.first_copies(split) for split in splits or [()] * len(leaves)]
        own = np.empty(len(leaves), np.uint64)
        parts = [np.empty_like(own) for _ in range(self.size)]

        def exchange() -> None:
            own[:] = [_digest(leaf) for leaf in leaves]
            self.collectives.moves.all_gather_into(own, parts, compared)

        # If a rank has a value of a type that is not supported, all ranks raise.
        compared = f"comparison of values of {what}"
        self.collectives.call(compared, exchange)
        if not splits and all(part.tobytes() == parts[0].tobytes() for part in parts):
            return
        differs = np.array(
            [
                [part[i] != parts[first[p]][i] for i, first in enumerate(firsts)]
                for p, part in enumerate(parts)
            ]
        )
        wrong = np.flatnonzero(differs.any(axis=0)).tolist()
        if not wrong:
            return
        channel: Any = self.collectives.channel
        ranks = channel.topology.job_ranks
        others = np.flatnonzero(differs.any(axis=1)).tolist()
        first = firsts[wrong[0]][others[0]]
        among = f"the {self.size} ranks of replica {self._replica}"
        if splits:
            among = f"the ranks of replica {self._replica} that have the same part"
        which = ""
        if names is not None or len(leaves) > 1:
            which = f" of {_some([names[i] if names else f'value {i}' for i in wrong])}"
        found = _some([f"rank {ranks[p]} (position {p})" for p in others])
        raise error(
            f"expected equal values{which} in {what} on {among}, found other values on "
            f"{found} than on rank {ranks[first]} (position {first}); {advice}",
            [ranks[position] for position in others],
        )

    def first_copies(self, split: Split) -> list[int]:
        """Return for each rank the first rank that has the same part of an array.

        Not collective. For the library's own modules.
        """
        axes = [along for _, along in split]
        if any(not isinstance(along, str) for along in axes):
            return list(range(self.size))
        parts = [
            [coords[axis] for axis in axes if isinstance(axis, str)]
            for coords in map(self.coords_of, range(self.size))
        ]
        return [parts.index(part) for part in parts]

    def has_copies(self, split: Split) -> bool:
        """Return whether several ranks of the replica have the same part of an array.

        Not collective. For the library's own modules.
        """
        return self.first_copies(split) != list(range(self.size))

    def region(
        self, whole: Sequence[int], split: Split, position: int | None = None
    ) -> tuple[slice, ...]:
        """Return the part of an array that a rank has, as one slice for each axis.

        Not collective. For the library's own modules.
        """
        slices = [slice(0, length) for length in whole]
        for axis, along in split:
            if isinstance(along, int):
                place = self.position if position is None else position
                slices[axis] = slice(0, whole[axis] if place == along else 0)
            else:
                slices[axis] = self.part(whole[axis], along, position=position)
        return tuple(slices)

    def whole_shape(self, shape: Sequence[int], split: Split) -> tuple[int, ...]:
        """Return the shape of an array of which the ranks have parts.

        Collective over the ranks of the replica. For the library's own modules. Raises
        ValueError on all of them if a part has another shape than `part` says.
        """
        what = "shapes of a divided array"
        shapes = [tuple(shape)]
        if self.size > 1:
            shapes = self.collectives.all_gather_object(tuple(shape), what)
        whole = list(shapes[0])
        for axis, along in split:
            line = [
                position
                for position in range(self.size)
                if not isinstance(along, str) or self._in_line(position, along)
            ]
            whole[axis] = sum(shapes[position][axis] for position in line)
        for position, found in enumerate(shapes):
            slices = self.region(whole, split, position)
            expected = tuple(s.stop - s.start for s in slices)
            if found != expected:
                raise ValueError(
                    f"expected a part of shape {expected} of an array of shape "
                    f"{tuple(whole)} at position {position}, found shape {found}; take "
                    "the rows of strategy.inside.part"
                )
        return tuple(whole)

    def _in_line(self, position: int, along: str) -> bool:
        coords = self.coords_of(position)
        return all(not place for axis, place in coords.items() if axis != along)

    def assembled(self, own: Array, whole: Sequence[int], split: Split) -> Array:
        """Return the whole array of which the ranks have parts, on each rank.

        Collective over the ranks of the replica. For the library's own modules.
        """
        flat = self.collectives.all_gather(own.reshape(-1), 0, "inside.gather")
        result = np.empty(tuple(whole), own.dtype)
        start = 0
        for position in range(self.size):
            target = result[self.region(whole, split, position)]
            target[...] = flat[start : start + target.size].reshape(target.shape)
            start += target.size
        return result

    def close(self) -> None:
        """Free the program's communicator; collective over the ranks of the replica."""
        if self._comm is not None:
            self._comm.Free()
            self._comm = None
        self.collectives.close()


def _some(names: Sequence[str]) -> str:
    """Return the first of these names as a text."""
    return ", ".join([*names[:_MOST_NAMED], *["..."] * (len(names) > _MOST_NAMED)])


def _digest(leaf: Any) -> int:
    """Return a hash of a value's dtype, shape and elements."""
    if isinstance(leaf, IndexedSlices):
        pair = _digest(leaf.values), _digest(leaf.indices)
        return xxh3_64_intdigest(repr(pair).encode())
    array = to_host(as_array(leaf))
    about = xxh3_64_intdigest(f"{array.dtype}{array.shape}".encode())
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return xxh3_64_intdigest(data.data, about)
