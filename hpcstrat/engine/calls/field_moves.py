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
from dataclasses import replace
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.blocks import MoveBlocks
from hpcstrat.engine.algorithms.field_blocks import (
    Halo,
    Lines,
    Shapes,
    halo_adjoint_blocks,
    halo_blocks,
    longer,
    part,
    transpose_blocks,
)
from hpcstrat.engine.algorithms.plan import Kinds
from hpcstrat.engine.arrays.casting import is_half
from hpcstrat.engine.arrays.kinds import to_reducible
from hpcstrat.engine.calls.field_checks import (
    checked_fields,
    checked_halo,
    halo_problem,
    plain_name,
    transpose_problem,
)
from hpcstrat.engine.calls.reduction_arrays import require_fitting
from hpcstrat.engine.calls.repeated_moves import Move, RepeatedMoves
from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.tree import unflatten
from hpcstrat.engine.typing import Array, Tree

__all__ = ["FieldMoves", "grid_lines"]

# Limit of the adjoints whose additions are kept.
_MOST_ADDITIONS = 1024
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
        self._moves: RepeatedMoves = collectives.repeated
        # How an adjoint adds the values of pads, by its arguments, and by the shapes
        # and dtypes of its arrays: for the last plan that was made for these. Each
        # addition has an array, the index of rows of its sum, and a slice of values.
        self._additions: dict[Any, Sequence[tuple[int, Any, slice]]] = {}

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
        name, about = plain_name(axis, width, periodic, lines), (axis, width, periodic)
        call = self._halo, what, name, tree, outs
        found = self._moves.call(*call, about, lines)
        return found if out is None else out

    def _halo(self, what: str, _: Any, *given: Any) -> Tree:
        tree, outs, about, lines = given
        halo = checked_halo(*about)
        arrays, structure = checked_fields(tree, what, halo.axis)
        sizes, added = [a.itemsize for a in arrays], halo.before + halo.after
        results = [(longer(a.shape, halo.axis, added), a.dtype) for a in arrays]

        def plan(shapes: Shapes) -> tuple[MoveBlocks, Kinds]:
            return halo_blocks(shapes, sizes, halo, lines, self.rank), results

        if outs is not None and len(arrays) > 1:
            raise ValueError(
                f"expected a single array with out, found {len(arrays)} arrays; call "
                "halo for each of them"
            )
        if outs is not None:
            require_fitting(outs, results, False)
        check = functools.partial(halo_problem, halo=halo, pads=0)
        text, fields = _halo_text(what, halo), (arrays, structure, lines)
        given = what, (*halo, lines), tree
        move = self._move(text, fields, given, plan=plan, check=check)
        return unflatten(structure, list(self._moves.make(replace(move, outs=outs))))

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
        # The additions of a tree are found by its leaves.
        alone, about = type(tree) is np.ndarray, (axis, width, periodic)
        name = plain_name(axis, width, periodic, lines) if alone else ""
        call = self._halo_adjoint, what, name, tree, None
        found = self._moves.call(*call, about, lines)
        if alone and type(found) is list:
            # These are the results of the kernel.
            [found] = self._added(found, (name, (tree.shape,), (tree.dtype,)))
        return found

    def _halo_adjoint(self, what: str, _: Any, *given: Any) -> Tree:
        tree, _, about, lines = given
        halo = checked_halo(*about)
        arrays, structure = checked_fields(tree, what, halo.axis)
        arrays = [to_reducible(array) for array in arrays]
        pads = halo.before + halo.after
        for array in arrays:
            if array.shape[halo.axis] < pads:
                raise ValueError(
                    f"expected at least {pads} rows along axis {halo.axis}, as a halo "
                    f"of width {halo[1:3]} adds, found shape {array.shape}; pass an "
                    "array of the shape that halo returns"
                )
        name, sizes = (*halo, lines), [array.itemsize for array in arrays]
        key = name, tuple(a.shape for a in arrays), tuple(a.dtype for a in arrays)

        def plan(shapes: Shapes) -> tuple[MoveBlocks, Kinds]:
            if len(self._additions) >= _MOST_ADDITIONS:
                # The plans need the additions: forget these, too.
                self._moves.close()
                self._additions.clear()
            blocks, additions, counts = halo_adjoint_blocks(
                shapes, sizes, halo, lines, self.rank
            )
            before = (slice(None),) * halo.axis
            self._additions[key] = [
                (i, (*before, slice(rows.start, rows.stop)), slice(*values))
                for i, rows, values in additions
            ]
            kinds = list[tuple[tuple[int, ...], Any]]()
            for array, count in zip(arrays, counts, strict=True):
                kinds.append((longer(array.shape, halo.axis, -pads), array.dtype))
                kinds.append(((count,), array.dtype))
            return blocks, kinds

        check = functools.partial(halo_problem, halo=halo, pads=pads)
        text, fields = _halo_text(what, halo), (arrays, structure, lines)
        move = self._move(text, fields, (what, name, tree), plan=plan, check=check)
        return unflatten(structure, self._added(self._moves.make(move), key))

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
        name = (split, whole, lines) if type(split) is type(whole) is int else ""
        call = self._transpose, what, name, tree, None
        return self._moves.call(*call, split, whole, lines)

    def _transpose(self, what: str, _: Any, tree: Tree, *given: Any) -> Tree:
        _, split, whole, lines = given
        arrays, structure = checked_fields(tree, what, split, whole)
        if split == whole:
            raise ValueError(
                f"expected two different axes for {what}, found {split} twice; change "
                "one of them"
            )
        sizes = [array.itemsize for array in arrays]
        [line] = (line for line in lines if self.rank in line)

        def plan(shapes: Shapes) -> tuple[MoveBlocks, Kinds]:
            results = list[tuple[tuple[int, ...], Any]]()
            for i, array in enumerate(arrays):
                lengths = list(array.shape)
                lengths[split] = sum(shapes[rank][i][split] for rank in line)
                rows = part(lengths[whole], line.index(self.rank), len(line))
                lengths[whole] = len(rows)
                results.append((tuple(lengths), array.dtype))
            axes = split, whole
            return transpose_blocks(shapes, sizes, axes, lines, self.rank), results

        check = functools.partial(transpose_problem, split=split)
        text, fields = f"{what}({split=!s}, {whole=!s})", (arrays, structure, lines)
        given = what, (split, whole, lines), tree
        move = self._move(text, fields, given, plan=plan, check=check)
        return unflatten(structure, list(self._moves.make(move)))

    def _move(
        self,
        text: str,
        fields: tuple[list[Array], Any, Lines],
        given: tuple[str, Any, Any],
        *,
        plan: Callable[[Shapes], tuple[MoveBlocks, Kinds]],
        check: Callable[[Shapes, Sequence[int]], Exception | None],
    ) -> Move:
        """Return a call whose blocks depend on the shapes of all ranks' arrays.

        ``fields`` are the arrays, their structure, and the lines of ranks. ``check``
        returns an error if the shapes of a line's arrays do not fit.
        """
        arrays, structure, lines = fields
        kinds = ", ".join(f"{a.dtype} of {a.ndim} dimensions" for a in arrays)
        if len(arrays) > 1:
            kinds += f" in {structure}"
        if len(lines) > 1:
            kinds += f" in lines {lines}"
        call = describe_call(text, kinds, sum(array.nbytes for array in arrays))
        own = tuple(array.shape for array in arrays)
        ends = [0, *itertools.accumulate(map(len, own))]

        def read_shapes(rows: Any) -> Any:
            shapes = tuple(
                tuple(row[low:high] for low, high in itertools.pairwise(ends))
                for row in rows
            )
            problems = (check(shapes, line) for line in lines)
            return next((one for one in problems if one is not None), shapes)

        equal = (own,) * self.size
        # Ranks first expect that the shapes of all are equal, unless that is an error.
        expected = None if check(equal, min(lines, key=len)) else equal
        integers = [n for shape in own for n in shape]
        lengths: Any = integers, read_shapes, expected
        return Move(call, arrays, None, own, plan, given, *lengths)


def _halo_text(what: str, halo: Halo) -> str:
    return f"{what}(axis={halo.axis}, width={halo[1:3]}, periodic={halo.periodic})"
