"""Checks of the arguments and the arrays of calls that move parts of a field."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.field_blocks import Halo, Lines, Shapes, longer, part
from hpcstrat.engine.arrays.kinds import as_array, is_device
from hpcstrat.engine.tree import flatten
from hpcstrat.engine.typing import Array, Tree
from hpcstrat.errors import CollectiveError

__all__ = [
    "check_axes",
    "checked_fields",
    "checked_halo",
    "halo_problem",
    "is_int",
    "plain_name",
    "transpose_problem",
]


def plain_name(axis: Any, width: Any, periodic: Any, lines: Lines) -> Any:
    """Return the name of a call for the kernel; "" if an argument may be wrong."""
    pair = type(width) is tuple and len(width) == 2
    before, after = width if pair else (width, width)
    plain = type(axis) is type(before) is type(after) is int and type(periodic) is bool
    return (axis, before, after, periodic, lines) if plain else ""


def checked_halo(axis: Any, width: Any, periodic: Any) -> Halo:
    pair = isinstance(width, (tuple, list)) and len(width) == 2
    before, after = width if pair else (width, width)
    for one in (before, after):
        if not is_int(one):
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


def is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def checked_fields(tree: Tree, what: str, *axes: Any) -> tuple[list[Array], Any]:
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
    check_axes(arrays, what, *axes)
    return arrays, structure


def check_axes(arrays: Sequence[Array], what: str, *axes: Any) -> None:
    for axis, array in itertools.product(axes, arrays):
        if not is_int(axis):
            raise TypeError(f"expected an integer as axis, found {axis!r}; change it")
        if not 0 <= axis < array.ndim:
            raise ValueError(
                f"expected 0 <= axis < {array.ndim}, the dimensions of the array for "
                f"{what}, found axis {axis}; "
                + ("change it" if array.ndim else "give scalars a dimension first")
            )


def _line_problem(shapes: Shapes, axis: int, line: Sequence[int]) -> Exception | None:
    """Return an error if lengths differ in a line, other than those along the axis."""
    for rank, i in itertools.product(line, range(len(shapes[0]))):
        one, other = shapes[line[0]][i], shapes[rank][i]
        if longer(one, axis, -one[axis]) != longer(other, axis, -other[axis]):
            return CollectiveError(
                f"expected equal lengths along all axes except axis {axis}, found "
                f"shape {one} at position {line[0]} and {other} at position {rank}; "
                "make them equal"
            )
    return None


def halo_problem(
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


def transpose_problem(
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
