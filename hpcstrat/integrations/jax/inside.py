"""Calls of the ranks of a replica on JAX's arrays, inside and outside of jit.

A field is an array that is divided along an axis among the ranks of a replica. The
gradient of each call is that of the sum of all ranks' results, so that each call and
its gradient are adjoint linear functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from hpcstrat.engine.algorithms.field_blocks import part
from hpcstrat.engine.typing import Array, Tree
from hpcstrat.integrations.jax import collective_calls
from hpcstrat.integrations.jax.primitive import TreeOperation, bind
from hpcstrat.strategies.current import get_strategy

__all__ = ["broadcast", "gather", "halo", "sum", "transpose"]


@dataclasses.dataclass(frozen=True)
class _Ranks:
    """The ranks of a replica, as a strategy of which each rank is a replica."""

    inside: Any
    logical = 0
    meetings = None

    @property
    def collectives(self) -> Any:
        return self.inside.collectives

    @property
    def num_replicas_in_sync(self) -> int:
        size: int = self.inside.size
        return size

    @property
    def replica_id(self) -> int:
        position: int = self.inside.position
        return position

    @property
    def topology(self) -> Any:
        return self.collectives.channel.topology


@dataclasses.dataclass(frozen=True)
class _HaloOperation(TreeOperation):
    """A halo, or its adjoint, along axis ``place``."""

    width: tuple[int, int] = (0, 0)
    periodic: bool = False
    lines: Any = None

    @property
    def what(self) -> str:
        return self.kind

    @property
    def keeps_shapes(self) -> bool:
        return self.width == (0, 0)

    def transposed(self) -> TreeOperation:
        kind = "halo_adjoint" if self.kind == "halo" else "halo"
        return dataclasses.replace(self, kind=kind)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        before, after = self.width
        added = before + after if self.kind == "halo" else -before - after
        length = shape[self.place] + added
        return *shape[: self.place], length, *shape[self.place + 1 :]

    def results(self, leaves: list[Array], outs: list[Array] | None) -> list[Array]:
        fields = self.strategy.collectives.fields
        call = fields.halo if self.kind == "halo" else fields.halo_adjoint
        rule = {"periodic": self.periodic, "lines": self.lines}
        found = call(self._named(leaves), self.place, self.width, **rule)
        return self._taken(found, outs, self.strategy.replica_id)


@dataclasses.dataclass(frozen=True)
class _Transpose(TreeOperation):
    """A division along axis ``whole`` instead of along axis ``place``."""

    whole: int = 0
    # The lengths of the field along the two axes.
    lengths: tuple[int, int] = (0, 0)
    lines: Any = None

    @property
    def what(self) -> str:
        return self.kind

    @property
    def keeps_shapes(self) -> bool:
        return False

    def transposed(self) -> TreeOperation:
        return dataclasses.replace(
            self, place=self.whole, whole=self.place, lengths=self.lengths[::-1]
        )

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        found = list(shape)
        found[self.place] = self.lengths[0]
        found[self.whole] = len(_part(self.strategy, self.lines, self.lengths[1]))
        return tuple(found)

    def results(self, leaves: list[Array], outs: list[Array] | None) -> list[Array]:
        call = self.strategy.collectives.fields.transpose
        axes = self.place, self.whole
        # Ranks compare the text: each of them knows the lengths of the field.
        what = f"transpose of {self.lengths} rows"
        found = call(self._named(leaves), *axes, lines=self.lines, what=what)
        return self._taken(found, outs, self.strategy.replica_id)


def _part(ranks: Any, lines: Any, length: int) -> range:
    """Return this rank's rows of a field that is divided along a line of ranks."""
    lines = lines or (tuple(range(ranks.num_replicas_in_sync)),)
    [line] = (line for line in lines if ranks.replica_id in line)
    return part(length, line.index(ranks.replica_id), len(line))


def halo(
    tree: Tree,
    axis: int,
    width: int | tuple[int, int],
    *,
    along: str | None = None,
    periodic: bool = False,
    inside: Any = None,
) -> Tree:
    """Return this rank's rows of fields between the rows of its neighbors.

    Collective over the ranks of the replica, each time that the call runs, and so is
    its gradient; inside or outside of jit.

    Parameters
    ----------
    tree : tree of jax.Array
        This rank's rows. Their number may differ between ranks, and be 0.
    axis : int
        The axis along which the fields are divided, at least 0.
    width : int or pair of int
        The number of rows before and after the own rows, equal on all ranks. It may be
        larger than the number of rows of a neighbor.
    along : str, optional
        The dimension of the replica's shape along which the fields are divided; needed
        if there are several.
    periodic : bool
        Whether the last row of a field is followed by its first row. If not, rows
        outside of the field are zero.
    inside : Inside, optional
        The ranks of the replica; default: those of the current strategy's replica.

    Returns
    -------
    tree of jax.Array
        New arrays, longer along ``axis`` by the two widths. Each row's gradient is the
        sum of the gradients of all its copies, on all ranks.

    Raises
    ------
    TypeError
        For an axis or a width that is no integer.
    ValueError
        For an axis that an array does not have, or a negative width; the other ranks
        raise ReplicaError. On every rank, if a periodic halo is wider than the field.
    CollectiveError
        On every rank, if ranks disagree on the arguments, on dtypes, or on lengths
        along other axes. Inside of jit, JAX raises its own RuntimeError with the text
        of the error when the program waits for the result.
    NotImplementedError
        Inside of ``vmap``.
    """
    ranks, lines = _ranks(inside), None

    def prepare() -> Any:
        nonlocal lines
        pair = tuple(width) if isinstance(width, (tuple, list)) else (width, width)
        if len(pair) != 2 or not all(isinstance(one, int) for one in pair):
            raise TypeError(
                f"expected an integer or a pair of integers as width, found {width!r}; "
                "change it"
            )
        if min(pair) < 0:
            raise ValueError(
                f"expected a width of at least 0, found {width!r}; change it"
            )
        lines = ranks.inside.lines(along)
        return pair

    pair = collective_calls.checked(ranks, "halo", prepare)
    names, leaves, structure = _leaves(tree, ranks, "halo", axis)
    operation = _HaloOperation(ranks, "halo", names, axis, pair, bool(periodic), lines)
    return structure.unflatten(bind(operation, leaves))


def transpose(
    x: jax.Array,
    split: int,
    whole: int,
    *,
    length: int | None = None,
    along: str | None = None,
    inside: Any = None,
) -> jax.Array:
    """Divide a field that is divided along ``split`` along ``whole`` instead.

    Collective over the ranks of the replica, each time that the call runs, and so is
    its gradient; inside or outside of jit.

    Parameters
    ----------
    x : jax.Array
        This rank's part of the field: along ``split`` the rows that ``part`` gives this
        rank, and all along ``whole``.
    split, whole : int
        Two axes, at least 0. The order of the axes remains.
    length : int, optional
        The length of the whole field along ``split``; default: this rank's length times
        the number of ranks. JAX must know it before the call.
    along : str, optional
        As for `halo`.
    inside : Inside, optional
        As for `halo`.

    Returns
    -------
    jax.Array
        A new array: along ``whole`` the rows that ``part`` gives this rank, and all
        along ``split``.

    Raises
    ------
    ValueError
        For equal axes, axes that ``x`` does not have, or a length along ``split`` other
        than that of ``part``; the other ranks raise ReplicaError. `halo` describes the
        other errors.
    """
    ranks = _ranks(inside)
    names, [leaf], _ = _leaves(x, ranks, "transpose", split, whole)

    def prepare() -> Any:
        if split == whole:
            raise ValueError(
                f"expected two different axes for transpose, found {split} twice; "
                "change one of them"
            )
        lines = ranks.inside.lines(along)
        count = ranks.num_replicas_in_sync if lines is None else len(lines[0])
        rows = leaf.shape[split]
        total = rows * count if length is None else length
        own = len(_part(ranks, lines, total))
        if own != rows:
            raise ValueError(
                f"expected {own} rows along axis {split} at position "
                f"{ranks.replica_id}, as part({total}, {split}) divides {total} rows, "
                f"found {rows}; pass the length of the whole field"
            )
        return total, lines

    total, lines = collective_calls.checked(ranks, "transpose", prepare)
    lengths = total, leaf.shape[whole]
    operation = _Transpose(ranks, "transpose", names, split, whole, lengths, lines)
    [found] = bind(operation, [leaf])
    return found


def sum(tree: Tree, *, inside: Any = None) -> Tree:  # noqa: A001
    """Return the sums of the arrays of all ranks of the replica.

    Collective over the ranks of the replica, with the errors of ``all_reduce``.

    Parameters
    ----------
    tree : tree of jax.Array
        The same structure, shapes and dtypes on all ranks.
    inside : Inside, optional
        As for `halo`.

    Returns
    -------
    tree of jax.Array
        The sums, with the same bits on all ranks.
    """
    return collective_calls.all_reduce(tree, "sum", _ranks(inside))


def gather(tree: Tree, axis: int, *, inside: Any = None) -> Tree:
    """Concatenate the arrays of all ranks of the replica, in the order of positions.

    Collective over the ranks of the replica, with the errors of ``all_gather``.

    Parameters
    ----------
    tree : tree of jax.Array
        The same structure, shapes and dtypes on all ranks: JAX must know the shape of
        the result before the call.
    axis : int
        An axis of all arrays, at least 0.
    inside : Inside, optional
        As for `halo`.

    Returns
    -------
    tree of jax.Array
        The arrays, equal on all ranks.
    """
    return collective_calls.all_gather(tree, axis, _ranks(inside))


def broadcast(tree: Tree, position: int = 0, *, inside: Any = None) -> Tree:
    """Return the arrays of one rank on all ranks of the replica.

    Collective over the ranks of the replica, with the errors of ``broadcast``.

    Parameters
    ----------
    tree : tree of jax.Array
        The same structure, shapes and dtypes on all ranks.
    position : int
        The rank whose arrays are returned, by its position.
    inside : Inside, optional
        As for `halo`.

    Returns
    -------
    tree of jax.Array
        The arrays, equal on all ranks.
    """
    return collective_calls.broadcast(tree, position, _ranks(inside))


def _ranks(inside: Any) -> _Ranks:
    if inside is None:
        strategy: Any = get_strategy()
        inside = strategy.inside
    return _Ranks(inside)


def _leaves(
    tree: Tree, ranks: _Ranks, what: str, *axes: Any
) -> tuple[tuple[str, ...], list[Any], Any]:
    """Return the names and the leaves of a tree, and its structure."""

    def prepare() -> Any:
        named, structure = jax.tree_util.tree_flatten_with_path(tree)
        if not named:
            raise ValueError(f"expected an array for {what}, found {tree!r}; pass one")
        names = collective_calls.leaf_names([path for path, _ in named])
        return names, [collective_calls.to_leaf(leaf) for _, leaf in named], structure

    def check() -> None:
        for axis in axes:
            if not isinstance(axis, int) or isinstance(axis, bool):
                raise TypeError(
                    f"expected an integer as axis, found {axis!r}; change it"
                )
            for leaf in leaves:
                if not 0 <= axis < leaf.ndim:
                    raise ValueError(
                        f"expected 0 <= axis < {leaf.ndim}, the dimensions of the "
                        f"array for {what}, found axis {axis}; change it"
                    )

    checked: Callable[..., Any] = collective_calls.checked
    names, leaves, structure = checked(ranks, what, prepare)
    checked(ranks, what, check)
    return names, leaves, structure
