"""Collective calls that move parts of a field, and their adjoints.

A field is an array that is divided along an axis among ranks. A halo adds rows of the
neighbors to each rank's rows, and a transpose divides the field along another axis.
See `hpcstrat.engine.algorithms.field_blocks`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.blocks import MoveBlocks
from hpcstrat.engine.algorithms.field_blocks import (
    Halo,
    Lines,
    Shapes,
    halo_adjoint_blocks,
    halo_blocks,
    part,
    transpose_blocks,
)
from hpcstrat.engine.algorithms.move_plan import copy_own_blocks
from hpcstrat.engine.arrays.casting import is_half
from hpcstrat.engine.arrays.kinds import (
    array_module,
    as_array,
    is_device,
    to_reducible,
)
from hpcstrat.engine.calls.repeated_moves import Move, RepeatedMoves
from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.channel.waitable import LengthsDifferError
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Array, Tree
from hpcstrat.errors import CollectiveError

__all__ = ["FieldMoves", "grid_lines"]

# Limit of the adjoints whose additions are kept.
_MOST_ADDITIONS = 1024
# Shapes and dtypes of new results.
_Kinds = list[tuple[tuple[int, ...], np.dtype[Any]]]
# Returns the blocks for the shapes of all ranks' arrays, and the new results.
_Plan = Callable[[Shapes], tuple[MoveBlocks, _Kinds]]
# Returns an error if the shapes of a line's arrays do not fit.
_Check = Callable[[Shapes, Sequence[int]], Exception | None]
Width = int | tuple[int, int]


def grid_lines(shape: Sequence[int], dimension: int) -> Lines:
    """Return the ranks of each line along a dimension of a grid of ranks.

    The last dimension of the grid varies fastest, as in ``numpy.unravel_index``. Not
    collective.
    """
    ranks = np.arange(math.prod(shape)).reshape(tuple(shape))
    rows = np.moveaxis(ranks, dimension, -1).reshape(-1, shape[dimension])
    return tuple(map(tuple, rows.tolist()))


class FieldMoves:
    """Calls in which ranks exchange rows of fields.

    All calls are collective over ``topology.replica_comm``, for an array or a tree of
    arrays in host memory. ``lines`` has the ranks among which a field is divided, in
    the order of its rows; each rank is in one line. By default there is one line, with
    all ranks. Lengths along the divided axis may differ between ranks, and be 0;
    `transpose` requires the lengths of `part`. Results are new arrays. In messages, a
    rank is a position.

    Raises CollectiveError on every rank if the ranks disagree on the call, on its
    arguments, on dtypes, numbers of dimensions, or on the other lengths in a line.
    Raises TypeError or ValueError if an argument of a rank is wrong by itself; the
    other ranks raise ReplicaError.
    """

    def __init__(self, collectives: Any) -> None:
        # The `Collectives` of the ranks.
        self.collectives = collectives
        self.size: int = collectives.size
        self.rank: int = collectives.rank
        self._line: Lines = (tuple(range(self.size)),)
        self._halos, self._adjoints, self._transposes = (
            RepeatedMoves(collectives) for _ in range(3)
        )
        # How an adjoint adds the values of pads, by its arguments, and by the shapes
        # and dtypes of its arrays: for the last plan that was made for these. Each
        # addition has an array, the index of rows of its sum, and a slice of values.
        self._additions: dict[Any, Sequence[tuple[int, Any, slice]]] = {}

    def close(self) -> None:
        """Forget the plans, which hold shared memory."""
        for moves in (self._halos, self._adjoints, self._transposes):
            moves.close()
        self._additions.clear()

    def halo(
        self,
        tree: Tree,
        axis: int,
        width: Width,
        *,
        periodic: bool = False,
        lines: Lines | None = None,
        out: Array | None = None,
        what: str = "halo",
    ) -> Tree:
        """Return each rank's rows between the rows of its neighbors.

        ``width`` is the number of rows before and after the own rows, or a pair of
        these two numbers. Rows outside of the field are zero; in a ``periodic`` field,
        the last row is followed by the first. If a halo is wider than the rows of a
        neighbor, the other rows come from the next ranks. Raises ValueError on every
        rank if a periodic halo is wider than the field. ``out`` receives the result of
        a single array.
        """
        lines, outs = lines or self._line, None if out is None else [out]
        name = _plain_name(axis, width, periodic, lines)
        found = self._repeat(self._halos, what, name, tree, outs)
        if found is not None:
            return found if out is None else out
        return self._halo(tree, name, (axis, width, periodic, lines), outs, what)

    @collective
    def _halo(
        self, tree: Tree, name: Any, given: Any, outs: list[Array] | None, what: str
    ) -> Tree:
        found = self._repeat(self._halos, what, name, tree, outs, True)
        if found is not None:
            return found if outs is None else outs[0]
        halo, lines = _checked_halo(*given[:3]), given[3]
        arrays, structure = _fields(tree, what, halo.axis)
        sizes = [array.itemsize for array in arrays]
        added = halo.before + halo.after
        results = [
            (_longer(array.shape, halo.axis, added), array.dtype) for array in arrays
        ]

        def plan(shapes: Shapes) -> tuple[MoveBlocks, _Kinds]:
            return halo_blocks(shapes, sizes, halo, lines, self.rank), results

        if outs is not None:
            _check_outs(outs, results)
        move = self._halos, (what, (*halo, lines), tree), outs
        text, fields = _halo_text(what, halo), (arrays, structure)
        check = functools.partial(_halo_problem, halo=halo, pads=0)
        found = self._move(text, fields, lines, (plan, check), move)
        return unflatten(structure, list(found))

    def halo_adjoint(
        self,
        tree: Tree,
        axis: int,
        width: Width,
        *,
        periodic: bool = False,
        lines: Lines | None = None,
        what: str = "halo_adjoint",
    ) -> Tree:
        """Return the adjoint of `halo`: the sums of all copies of each rank's rows.

        The arrays have the shapes of the results of `halo`. To the own rows, the rows
        in the pads of the ranks of the line are added in a fixed order: those of
        nearer ranks first, those of equally near ranks in their order. Half-precision
        values are added in float32. Raises ValueError for dtypes that have no sum.
        """
        lines = lines or self._line
        name = _plain_name(axis, width, periodic, lines)
        # The additions of a tree are found by its leaves.
        name = name if type(tree) is np.ndarray else None
        found = self._repeat(self._adjoints, what, name, tree)
        if found is None:
            given = axis, width, periodic, lines
            return self._halo_adjoint(tree, name, given, what)
        return self._added(found, (name, (tree.shape,), (tree.dtype,)))[0]

    @collective
    def _halo_adjoint(self, tree: Tree, name: Any, given: Any, what: str) -> Tree:
        found = self._repeat(self._adjoints, what, name, tree, None, True)
        if found is not None:
            key: Any = name, (tree.shape,), (tree.dtype,)
            return self._added(found, key)[0]
        halo, lines = _checked_halo(*given[:3]), given[3]
        arrays, structure = _fields(tree, what, halo.axis)
        arrays = [to_reducible(array) for array in arrays]
        pads = halo.before + halo.after
        for array in arrays:
            if array.shape[halo.axis] < pads:
                raise ValueError(
                    f"expected at least {pads} rows along axis {halo.axis}, as a halo "
                    f"of width {halo[1:3]} adds, found shape {array.shape}; pass an "
                    "array of the shape that halo returns"
                )
        sizes = [array.itemsize for array in arrays]
        key = (
            (*halo, lines),
            tuple(a.shape for a in arrays),
            tuple(a.dtype for a in arrays),
        )

        def plan(shapes: Shapes) -> tuple[MoveBlocks, _Kinds]:
            if len(self._additions) >= _MOST_ADDITIONS:
                # The plans need the additions: forget these, too.
                self.close()
            blocks, additions, counts = halo_adjoint_blocks(
                shapes, sizes, halo, lines, self.rank
            )
            before = (slice(None),) * halo.axis
            self._additions[key] = [
                (i, (*before, slice(rows.start, rows.stop)), slice(*values))
                for i, rows, values in additions
            ]
            kinds: _Kinds = []
            for array, count in zip(arrays, counts, strict=True):
                kinds.append((_longer(array.shape, halo.axis, -pads), array.dtype))
                kinds.append(((count,), array.dtype))
            return blocks, kinds

        move = self._adjoints, (what, key[0], tree), None
        text, fields = _halo_text(what, halo), (arrays, structure)
        check = functools.partial(_halo_problem, halo=halo, pads=pads)
        found = self._move(text, fields, lines, (plan, check), move)
        return unflatten(structure, self._added(found, key))

    def _added(self, found: Sequence[Array], key: Any) -> list[Array]:
        """Add the values of pads to the own rows, in an order that all ranks know."""
        sums = list(found[::2])
        halves = [i for i, own in enumerate(sums) if is_half(own.dtype)]
        for i in halves:
            sums[i] = sums[i].astype(np.float32)
        for i, rows, values in self._additions[key]:
            target = sums[i][rows]
            target += found[2 * i + 1][values].reshape(target.shape)
        for i in halves:
            sums[i] = sums[i].astype(found[2 * i].dtype)
        return sums

    def transpose(
        self,
        tree: Tree,
        split: int,
        whole: int,
        *,
        lines: Lines | None = None,
        what: str = "transpose",
    ) -> Tree:
        """Divide arrays that are divided along ``split`` along ``whole`` instead.

        The order of the axes remains. The lengths along ``split`` must be those of
        `part`; ValueError on every rank if they are not. The results have the lengths
        of `part` along ``whole``. The adjoint is the same call with the axes exchanged.
        """
        lines = lines or self._line
        plain = type(split) is type(whole) is int
        name = (split, whole, lines) if plain else None
        found = self._repeat(self._transposes, what, name, tree)
        if found is not None:
            return found
        return self._transpose(tree, name, (split, whole, lines), what)

    @collective
    def _transpose(self, tree: Tree, name: Any, given: Any, what: str) -> Tree:
        found = self._repeat(self._transposes, what, name, tree, None, True)
        if found is not None:
            return found
        split, whole, lines = given
        arrays, structure = _fields(tree, what, split, whole)
        if split == whole:
            raise ValueError(
                f"expected two different axes for {what}, found {split} twice; change "
                "one of them"
            )
        sizes = [array.itemsize for array in arrays]
        [line] = (line for line in lines if self.rank in line)
        position = line.index(self.rank)

        def plan(shapes: Shapes) -> tuple[MoveBlocks, _Kinds]:
            results: _Kinds = []
            for i, array in enumerate(arrays):
                lengths = list(array.shape)
                lengths[split] = sum(shapes[rank][i][split] for rank in line)
                lengths[whole] = len(part(lengths[whole], position, len(line)))
                results.append((tuple(lengths), array.dtype))
            axes = split, whole
            return transpose_blocks(shapes, sizes, axes, lines, self.rank), results

        move = self._transposes, (what, given, tree), None
        text, fields = f"{what}(split={split}, whole={whole})", (arrays, structure)
        check = functools.partial(_transpose_problem, split=split)
        found = self._move(text, fields, lines, (plan, check), move)
        return unflatten(structure, list(found))

    @collective
    def gather(self, array: Array, axis: int, what: str) -> tuple[Array, list[int]]:
        """Concatenate the ranks' arrays; return also the lengths along the axis."""
        array = as_array(array)
        _check_axes([array], what, axis)
        own = np.full((1,) * array.ndim, array.shape[axis], np.int64)
        calls: Any = self.collectives
        whole, lengths = calls.all_gather([array, own], axis, what)
        return whole, lengths.reshape(-1).tolist()

    def gather_adjoint(
        self, array: Array, axis: int, lengths: Sequence[int], what: str
    ) -> Array:
        """Return this rank's part, along an axis, of the sum of all ranks' arrays."""
        start = sum(lengths[: self.rank])
        rows = (slice(None),) * axis + (slice(start, start + lengths[self.rank]),)
        own: Array = self._total(array, what)[rows].copy()
        return own

    @collective
    def broadcast(self, array: Array, root: int, what: str) -> Array:
        """Return the root's array on every rank."""
        self._check_root(root)
        calls: Any = self.collectives
        found: Array = calls.broadcast(array, root, what)
        return found

    @collective
    def broadcast_adjoint(self, array: Array, root: int, what: str) -> Array:
        """Return the sum of all ranks' arrays on the root, and zeros elsewhere."""
        self._check_root(root)
        total = self._total(array, what)
        if self.rank == root:
            return total
        zeros: Array = array_module(total).zeros_like(total)
        return zeros

    def _total(self, array: Array, what: str) -> Array:
        calls: Any = self.collectives
        total: Array = calls.batch_reduce(ReduceOp.SUM, array, what)
        return total

    def _check_root(self, root: int) -> None:
        if not _is_int(root) or not 0 <= root < self.size:
            raise ValueError(
                f"expected a position from 0 to {self.size - 1}, found {root!r}; "
                "change it"
            )

    @staticmethod
    def _repeat(
        moves: RepeatedMoves,
        what: str,
        name: Any,
        tree: Tree,
        outs: list[Array] | None = None,
        *nested: bool,
    ) -> Any:
        """Repeat a call in the kernel; return None if Python code must make it."""
        if name is None:
            return None
        try:
            return moves.repeat(what, name, tree, outs, *nested)
        except LengthsDifferError as error:
            return moves.change(error)

    def _move(
        self,
        text: str,
        fields: tuple[list[Array], Any],
        lines: Lines,
        rules: tuple[_Plan, _Check],
        repeated: tuple[RepeatedMoves, tuple[str, Any, Any], list[Array] | None],
    ) -> Sequence[Array]:
        """Make a call whose blocks depend on the shapes of all ranks' arrays."""
        (arrays, structure), (plan, check) = fields, rules
        moves, given, outs = repeated
        own = tuple(array.shape for array in arrays)
        if self.collectives.channel is None:
            if (problem := check([own], lines[0])) is not None:
                raise problem
            blocks, kinds = plan([own])
            results = outs or [np.empty(*kind) for kind in kinds]
            plain = [np.require(array, requirements="C") for array in arrays]
            copy_own_blocks(blocks, plain, results)
            return results

        def read_shapes(rows: Any) -> Any:
            shapes = tuple(_divided(row, own) for row in rows)
            problems = (check(shapes, line) for line in lines)
            return next((one for one in problems if one is not None), shapes)

        equal = (own,) * self.size
        # Ranks first expect that the shapes of all are equal, unless that is an error.
        expected = None if check(equal, min(lines, key=len)) else equal
        kinds_text = ", ".join(f"{a.dtype} of {a.ndim} dimensions" for a in arrays)
        if len(arrays) > 1:
            kinds_text += f" in {structure}"
        if len(lines) > 1:
            kinds_text += f" in lines {lines}"
        call = describe_call(text, kinds_text, sum(array.nbytes for array in arrays))
        integers = [n for shape in own for n in shape]
        return moves.make(
            Move(call, arrays, outs, own, plan, given, integers, read_shapes, expected)
        )


def _check_outs(outs: Sequence[Any], kinds: _Kinds) -> None:
    """Raise ValueError if arrays cannot receive results of these shapes and dtypes."""
    if len(outs) != len(kinds):
        raise ValueError(
            f"expected a single array with out, found {len(kinds)} arrays; call halo "
            "for each of them"
        )
    for out, (shape, dtype) in zip(outs, kinds, strict=True):
        is_array = isinstance(out, np.ndarray)
        if not is_array or (out.shape, out.dtype) != (shape, dtype):
            found = f"{out.dtype}{list(out.shape)}" if is_array else type(out).__name__
            raise ValueError(
                f"expected {dtype}{list(shape)} as out, found {found}; pass such an "
                "array, or leave it out"
            )
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise ValueError(
                "expected a contiguous, writable array as out, found strides "
                f"{out.strides} and writeable={out.flags.writeable}; pass a new array"
            )


def _halo_text(what: str, halo: Halo) -> str:
    width = f"({halo.before}, {halo.after})"
    return f"{what}(axis={halo.axis}, width={width}, periodic={halo.periodic})"


def _plain_name(axis: Any, width: Any, periodic: Any, lines: Lines) -> Any:
    """Return the name of a call for the kernel; None if an argument may be wrong."""
    pair = type(width) is tuple and len(width) == 2
    before, after = width if pair else (width, width)
    plain = type(axis) is type(before) is type(after) is int and type(periodic) is bool
    return (axis, before, after, periodic, lines) if plain else None


def _checked_halo(axis: Any, width: Any, periodic: Any) -> Halo:
    pair = isinstance(width, (tuple, list)) and len(width) == 2
    before, after = width if pair else (width, width)
    for one in (before, after):
        if not _is_int(one):
            raise TypeError(
                f"expected an integer or a pair of integers as width, found {width!r}; "
                "change it"
            )
        if one < 0:
            raise ValueError(
                f"expected a width of at least 0, found {width!r}; change it"
            )
    if not isinstance(periodic, (bool, np.bool_)):
        raise TypeError(f"expected True or False as periodic, found {periodic!r}")
    return Halo(axis, int(before), int(after), bool(periodic))


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _fields(tree: Tree, what: str, *axes: Any) -> tuple[list[Array], Any]:
    """Return the arrays of a tree that have these axes, and the tree's structure."""
    leaves, structure = flatten(tree)
    if not leaves:
        raise ValueError(f"expected an array for {what}, found {tree!r}; pass one")
    arrays = [as_array(leaf) for leaf in leaves]
    if any(map(is_device, arrays)):
        raise NotImplementedError(
            f"expected arrays in host memory for {what}, found one on a GPU; copy it "
            "to the host"
        )
    _check_axes(arrays, what, *axes)
    return arrays, structure


def _check_axes(arrays: Sequence[Array], what: str, *axes: Any) -> None:
    for axis, array in itertools.product(axes, arrays):
        if not _is_int(axis):
            raise TypeError(f"expected an integer as axis, found {axis!r}; change it")
        if not 0 <= axis < array.ndim:
            raise ValueError(
                f"expected 0 <= axis < {array.ndim}, the dimensions of the array for "
                f"{what}, found axis {axis}; change it"
            )


def _longer(shape: tuple[int, ...], axis: int, more: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] + more, *shape[axis + 1 :])


def _divided(row: list[int], like: Sequence[tuple[int, ...]]) -> Any:
    """Return a rank's integers as shapes with the numbers of dimensions of ``like``."""
    ends = [0, *itertools.accumulate(map(len, like))]
    return tuple(tuple(row[low:high]) for low, high in itertools.pairwise(ends))


def _line_problem(shapes: Shapes, axis: int, line: Sequence[int]) -> Exception | None:
    """Return an error if lengths differ in a line, other than those along the axis."""
    for rank, i in itertools.product(line, range(len(shapes[0]))):
        one, other = shapes[line[0]][i], shapes[rank][i]
        if _longer(one, axis, -one[axis]) != _longer(other, axis, -other[axis]):
            return CollectiveError(
                f"expected equal lengths along all axes except axis {axis}, found "
                f"shape {one} at position {line[0]} and {other} at position {rank}; "
                "make them equal"
            )
    return None


def _halo_problem(
    shapes: Shapes, line: Sequence[int], *, halo: Halo, pads: int
) -> Exception | None:
    """Return an error if a halo does not fit; ``shapes`` have pads of this length."""
    axis = halo.axis
    if problem := _line_problem(shapes, axis, line):
        return problem
    width = max(halo.before, halo.after)
    for i in range(len(shapes[0])) if halo.periodic else ():
        length = sum(shapes[rank][i][axis] - pads for rank in line)
        if width > length:
            return ValueError(
                "expected a periodic halo that is at most as wide as the field, found "
                f"width {width} and {length} rows along axis {axis} on positions "
                f"{list(line)}; make it narrower"
            )
    return None


def _transpose_problem(
    shapes: Shapes, line: Sequence[int], *, split: int
) -> Exception | None:
    """Return an error if lengths are not those of `part`."""
    if problem := _line_problem(shapes, split, line):
        return problem
    for i in range(len(shapes[0])):
        lengths = [shapes[rank][i][split] for rank in line]
        whole, count = sum(lengths), len(line)
        wanted = [len(part(whole, position, count)) for position in range(count)]
        if lengths != wanted:
            return ValueError(
                f"expected {wanted} rows along axis {split} on positions {list(line)}, "
                f"as part({whole}, {split}) divides {whole} rows, found {lengths}; "
                "divide the array by part"
            )
    return None
