"""Calls of the ranks of a replica on tensors, with gradients of any order.

A field is a tensor that is divided along a dimension among the ranks of a replica. The
gradient of each call is that of the sum of all ranks' results, so that each call and
its gradient are adjoint linear functions. All ranks must build equal graphs, because
backward makes a call for each call of forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hpcstrat.engine.arrays.kinds import array_module, is_device
from hpcstrat.engine.calls.field_checks import check_axes, is_int
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.integrations.torch.tensors import as_tensor, memory_of, torchs_stream
from hpcstrat.strategies.current import get_strategy

__all__ = ["broadcast", "gather", "halo", "sum", "transpose"]

_Move = Callable[[Array], Array]


class _Linear(torch.autograd.Function):
    """A linear function of all ranks' arrays, whose gradient is its adjoint."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, calls: _ReplicaCalls, move: _Move, adjoint: _Move
    ) -> Any:
        ctx.given = calls, adjoint, move
        return calls.moved(x, move)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _Linear.apply(gradient, *ctx.given), None, None, None


class _ReplicaCalls:
    """The calls of a replica's ranks; ``what`` names the call in errors."""

    def __init__(self, inside: Any, what: str, *, on_host: bool = False) -> None:
        if inside is None:
            strategy: Any = get_strategy()
            inside = strategy.inside
        self.inside, self.what, self._on_host = inside, what, on_host
        self.collectives = inside.collectives
        self.fields = inside.collectives.fields

    def lines(self, along: str | None) -> Any:
        """Return the ranks of each line of the replica along a named dimension."""
        return self.inside.lines(along)

    def apply(self, x: torch.Tensor, move: _Move, adjoint: _Move) -> torch.Tensor:
        """Call ``move`` with a tensor's array, as a function with a gradient."""
        apply: Callable[..., torch.Tensor] = _Linear.apply
        return apply(x, self, move, adjoint)

    def moved(self, x: torch.Tensor, move: _Move) -> torch.Tensor:
        """Return the result of ``move``; if a rank fails, all ranks raise errors."""

        def carry_out() -> torch.Tensor:
            given = x.cpu() if self._on_host else x
            array = memory_of(given.detach().resolve_conj().resolve_neg())
            with torchs_stream():
                found = move(array)
            own = found if is_device(found) else np.asarray(found)
            return as_tensor(own).to(x.device)

        made: torch.Tensor = self.collectives.call(self.what, carry_out)
        return made

    def summed(self, array: Array) -> Array:
        """Return the sum of all ranks' arrays."""
        total: Array = self.collectives.batch_reduce(ReduceOp.SUM, array, self.what)
        return total


def halo(
    x: torch.Tensor,
    dim: int,
    width: int | tuple[int, int],
    *,
    along: str | None = None,
    periodic: bool = False,
    inside: Any = None,
) -> torch.Tensor:
    """Return this rank's rows of a field between the rows of its neighbors.

    Collective over the ranks of the replica, and so is its backward.

    Parameters
    ----------
    x : torch.Tensor of any dtype
        This rank's rows. Their number may differ between ranks, and be 0. A tensor on a
        GPU is copied to the host and back.
    dim : int
        The dimension along which the field is divided, at least 0.
    width : int or pair of int
        The number of rows before and after the own rows, equal on all ranks. It may be
        larger than the number of rows of a neighbor.
    along : str, optional
        The dimension of the replica's shape along which the field is divided; needed if
        there are several.
    periodic : bool
        Whether the last row of the field is followed by its first row. If not, rows
        outside of the field are zero.
    inside : Inside, optional
        The ranks of the replica; default: those of the current strategy's replica.

    Returns
    -------
    torch.Tensor
        A new tensor, longer along ``dim`` by the two widths. In backward, each row
        receives the sum of the gradients of all its copies, on all ranks.

    Raises
    ------
    ValueError
        For a dimension that ``x`` does not have, or a negative width; the other ranks
        raise ReplicaError. On every rank, if a periodic halo is wider than the field.
    CollectiveError
        On every rank, if ranks disagree on the arguments, on the dtype, or on lengths
        along other dimensions.
    """
    calls = _ReplicaCalls(inside, "halo", on_host=True)
    rule = {"periodic": periodic, "lines": calls.lines(along)}
    return calls.apply(
        x,
        lambda array: calls.fields.halo(array, dim, width, **rule),
        lambda array: calls.fields.halo_adjoint(array, dim, width, **rule),
    )


def transpose(
    x: torch.Tensor,
    split: int,
    whole: int,
    *,
    along: str | None = None,
    inside: Any = None,
) -> torch.Tensor:
    """Divide a field that is divided along ``split`` along ``whole`` instead.

    Collective over the ranks of the replica, and so is its backward.

    Parameters
    ----------
    x : torch.Tensor of any dtype
        This rank's part of the field: along ``split`` the rows that ``part`` gives this
        rank, and all along ``whole``. A tensor on a GPU is copied to the host and back.
    split, whole : int
        Two dimensions, at least 0. The order of the dimensions remains.
    along : str, optional
        As for `halo`.
    inside : Inside, optional
        As for `halo`.

    Returns
    -------
    torch.Tensor
        A new tensor: along ``whole`` the rows that ``part`` gives this rank, and all
        along ``split``.

    Raises
    ------
    ValueError
        For equal dimensions, or dimensions that ``x`` does not have; the other ranks
        raise ReplicaError. On every rank, if lengths along ``split`` are not those of
        ``part``.
    CollectiveError
        On every rank, if ranks disagree on the arguments, on the dtype, or on lengths
        along other dimensions.
    """
    calls = _ReplicaCalls(inside, "transpose", on_host=True)
    lines = calls.lines(along)
    return calls.apply(
        x,
        lambda array: calls.fields.transpose(array, split, whole, lines=lines),
        lambda array: calls.fields.transpose(array, whole, split, lines=lines),
    )


def sum(x: torch.Tensor, *, inside: Any = None) -> torch.Tensor:  # noqa: A001
    """Return the sum of the tensors of all ranks of the replica.

    Collective over the ranks of the replica, and so is its backward.

    Parameters
    ----------
    x : torch.Tensor of numbers
        The same shape and dtype on all ranks.
    inside : Inside, optional
        As for `halo`.

    Returns
    -------
    torch.Tensor
        A new tensor, with the same bits on all ranks. In backward, each rank receives
        the sum of all ranks' gradients.

    Raises
    ------
    CollectiveError
        On every rank, if shapes or dtypes differ.
    """
    calls = _ReplicaCalls(inside, "sum")
    return calls.apply(x, calls.summed, calls.summed)


def gather(x: torch.Tensor, dim: int, *, inside: Any = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks of the replica, in the order of positions.

    Collective over the ranks of the replica, and so is its backward.

    Parameters
    ----------
    x : torch.Tensor of any dtype
        The length along ``dim`` may differ between ranks.
    dim : int
        A dimension of ``x``, at least 0.
    inside : Inside, optional
        As for `halo`.

    Returns
    -------
    torch.Tensor
        A new tensor, equal on all ranks. In backward, each rank receives its part of
        the sum of all ranks' gradients.

    Raises
    ------
    ValueError
        For a dimension that ``x`` does not have; the other ranks raise ReplicaError.
    CollectiveError
        On every rank, if dtypes or lengths along other dimensions differ.
    """
    calls, lengths = _ReplicaCalls(inside, "gather"), list[int]()

    def gathered(array: Array) -> Array:
        check_axes([array], "gather", dim)
        length = np.full((1,) * array.ndim, array.shape[dim], np.int64)
        whole, every = calls.collectives.all_gather([array, length], dim, "gather")
        lengths[:] = every.reshape(-1).tolist()
        found: Array = whole
        return found

    def own(array: Array) -> Array:
        ends, position = np.cumsum(lengths), calls.inside.position
        rows = slice(ends[position] - lengths[position], ends[position])
        part: Array = calls.summed(array)[(slice(None),) * dim + (rows,)].copy()
        return part

    return calls.apply(x, gathered, own)


def broadcast(
    x: torch.Tensor, position: int = 0, *, inside: Any = None
) -> torch.Tensor:
    """Return the tensor of one rank on all ranks of the replica.

    Collective over the ranks of the replica, and so is its backward.

    Parameters
    ----------
    x : torch.Tensor of any dtype
        The same shape and dtype on all ranks.
    position : int
        The rank whose tensor is returned, by its position.
    inside : Inside, optional
        As for `halo`.

    Returns
    -------
    torch.Tensor
        A new tensor, equal on all ranks. In backward, the rank at ``position`` receives
        the sum of all ranks' gradients, and the other ranks receive zeros.

    Raises
    ------
    ValueError
        If there is no such position; the other ranks raise ReplicaError.
    CollectiveError
        On every rank, if positions, shapes or dtypes differ.
    """
    calls = _ReplicaCalls(inside, "broadcast")

    def sent(array: Array) -> Array:
        if not is_int(position) or not 0 <= position < calls.inside.size:
            raise ValueError(
                f"expected a position from 0 to {calls.inside.size - 1}, found "
                f"{position!r}; change it"
            )
        found: Array = calls.collectives.broadcast(array, position, "broadcast")
        return found

    def summed(array: Array) -> Array:
        total = calls.summed(array)
        if calls.inside.position != position:
            total = array_module(total).zeros_like(total)
        return total

    return calls.apply(x, sent, summed)
