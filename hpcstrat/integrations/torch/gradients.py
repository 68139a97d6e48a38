"""Modules whose gradients are combined over the replicas where they lie.

Hooks note which parameters a backward has reached; when it ends, one reduction combines
all of them, in place. Which parameters these are may differ between replicas, and from
step to step, so a few numbers of that reduction say so: it carries what all replicas
agreed on the last time, and what is missing, if anything, follows in another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hpcstrat.arrays.indexed_slices import IndexedSlices
from hpcstrat.channel.closed import ClosedChannel
from hpcstrat.integrations.torch.tensors import as_tensor, memory_of
from hpcstrat.options import ReduceOp
from hpcstrat.strategies import Strategy, get_strategy
from hpcstrat.tree import flatten
from hpcstrat.typing import Array

__all__ = [
    "broadcast",
    "global_mean",
    "inner",
    "no_sync",
    "replicate",
    "strategy_of",
]

_WHAT = "gradients"
_BUFFERS = ("first", "mean", None)


class _Replicated:
    """What is known of a replicated module; its hooks hold it, not the module."""

    def __init__(
        self,
        module: torch.nn.Module,
        strategy: Strategy,
        op: ReduceOp,
        buffers: str | None,
    ) -> None:
        self.strategy = strategy
        self.op = op
        self._buffers = buffers
        self.syncs = True
        # Integers have no gradients.
        named = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.is_floating_point() or parameter.is_complex()
        ]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        # One for each module that has some: batch normalization counts its batches, and
        # writes running means without torch noting it.
        self._owners = [m._buffers for m in module.modules() if m._buffers]
        # What a backward has reached and no reduction has combined.
        self._touched: set[int] = set()
        # Equal on all replicas, since nothing has been added to them.
        self._combined: set[int] = set()
        # The dense ones of the last reduction, which all replicas know.
        self._expected: list[int] = []
        self._versions = self._buffer_versions()
        # Lives as long as the backward to whose end it belongs.
        self._end: weakref.ref[Any] | None = None
        self._handles = [module.register_forward_hook(_OutputHook(self))]
        for index, parameter in enumerate(self._parameters):
            self._hook(index, parameter)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, index: int, parameter: torch.Tensor) -> None:
        # The garbage collector sees attributes, but not what hooks of tensors hold.
        parameter._hpcstrat_replicated = self
        myself = weakref.ref(self)

        def touch(_: Any) -> None:
            if (own := myself()) is not None:
                own.touch(index)

        def make_share(_: Any) -> None:
            if (own := myself()) is not None:
                own.make_share(index)

        trained = parameter.requires_grad
        # Hooks stay on a parameter that is frozen, and serve one that is thawed.
        parameter.requires_grad_(True)
        self._handles.append(parameter.register_post_accumulate_grad_hook(touch))
        if self.op is ReduceOp.SUM:
            self._handles.append(parameter.register_hook(make_share))
        parameter.requires_grad_(trained)

    def __reduce__(self) -> Any:
        """Leave nothing of itself in files that have a parameter."""
        return type(None), ()

    def watch(self, output: Any) -> None:
        """Find the outermost backward; reentrant checkpoints begin others inside."""
        watches = self.syncs and torch.is_grad_enabled()
        # In compiled code, the hooks of the parameters find the end by themselves.
        if torch.compiler.is_compiling() or not watches:
            return
        for leaf in flatten(output)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._await_end)

    def touch(self, index: int) -> None:
        self._touched.add(index)
        self._combined.discard(index)
        self._await_end()

    def _await_end(self, _gradient: Any = None) -> None:
        """Combine the gradients when the backward under way ends."""
        # Of one that an error has ended nothing is left but a dead reference.
        if not self.syncs or (self._end is not None and self._end() is not None):
            return

        def end() -> None:
            self._end = None
            # None after torch.autograd.grad, which adds to no parameter.
            if self._touched and self.syncs:
                self.strategy.collectives.call(_WHAT, self._combine)

        self._end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def make_share(self, index: int) -> None:
        """Leave a sum to replica 0, before this replica adds to its gradient again."""
        gradient = self._parameters[index].grad
        if index in self._combined and gradient is not None:
            if self.strategy.replica_id:
                with torch.no_grad():
                    gradient.zero_()
            self._combined.discard(index)

    @torch.no_grad()
    def _combine(self) -> None:
        """Combine the gradients of all replicas; one reduction, as a rule."""
        count = len(self._parameters)
        marks = np.zeros(2 * count + len(self._owners), np.float32)
        for index in self._touched:
            marks[index + count * self._is_sparse(index)] = 1
        versions = self._buffer_versions()
        marks[2 * count :] = [
            old != new for old, new in zip(self._versions, versions, strict=True)
        ]
        expected = self._expected
        self._reduce(expected, marks)
        dense = np.flatnonzero(marks[:count]).tolist()
        sparse = np.flatnonzero(marks[count : 2 * count]).tolist()
        self._refuse_mixed(dense, sparse)
        if missing := sorted({*dense} - {*expected}):
            self._reduce(missing)
        for index in sparse:
            self._reduce_rows(index)
        self._touched.clear()
        self._combined.update(expected, dense, sparse)
        self._expected = dense
        self._synchronize(np.flatnonzero(marks[2 * count :]).tolist())

    def _reduce(self, indices: list[int], marks: Array | None = None) -> None:
        """Reduce dense gradients in place, and the marks; all that is agreed on."""
        tensors = [self._own_share(index) for index in indices]
        arrays = [memory_of(tensor) for tensor in tensors]
        if marks is not None:
            arrays.append(marks)
        collectives = self.strategy.collectives
        collectives.batch_reduce(self.op, arrays, _WHAT, out=arrays)
        for index, tensor in zip(indices, tensors, strict=True):
            parameter = self._parameters[index]
            used = marks is None or marks[index]
            if parameter.grad is None and used:
                parameter.grad = tensor

    def _own_share(self, index: int) -> torch.Tensor:
        """Return what this replica adds: its gradient, or zeros."""
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            return torch.zeros_like(parameter)
        if self.op is ReduceOp.SUM:
            # Nothing has been added to it here since it was a sum.
            self.make_share(index)
        return gradient

    def _is_sparse(self, index: int) -> bool:
        gradient = self._parameters[index].grad
        return gradient is not None and gradient.is_sparse

    def _refuse_mixed(self, dense: list[int], sparse: list[int]) -> None:
        """Refuse gradients of two kinds; all replicas know of it, and raise."""
        if both := sorted({*dense} & {*sparse}):
            raise ValueError(
                f"expected gradients of {self._names[both[0]]!r} of one kind on all "
                "replicas, found dense and sparse ones; pass sparse=False, or True, to "
                "the module that has it on all of them"
            )

    def _reduce_rows(self, index: int) -> None:
        """Reduce a gradient that has some rows only."""
        parameter, shape = self._parameters[index], self._parameters[index].shape
        gradient = parameter.grad
        if gradient is None:
            gradient = _sparse(
                torch.zeros((1, 0), dtype=torch.int64, device=parameter.device),
                parameter.new_zeros((0, *shape[1:])),
                shape,
            )
        elif self.op is ReduceOp.SUM:
            self.make_share(index)
        if gradient.sparse_dim() != 1:
            raise ValueError(
                f"expected a sparse gradient of {self._names[index]!r} with one index "
                f"for each row, found {gradient.sparse_dim()} indices for each value; "
                "make it dense"
            )
        gradient = gradient.coalesce()
        rows = IndexedSlices(
            memory_of(gradient.values()), memory_of(gradient.indices()[0]), tuple(shape)
        )
        rows = self.strategy.collectives.batch_reduce(self.op, rows, _WHAT)
        parameter.grad = _sparse(
            as_tensor(rows.indices).to(parameter.device)[None],
            as_tensor(rows.values).to(parameter.device),
            shape,
        ).coalesce()

    def _buffer_versions(self) -> list[Any]:
        if self._buffers is None:
            return [()] * len(self._owners)
        return [
            tuple((id(b), b._version) for b in owner.values() if b is not None)
            for owner in self._owners
        ]

    def _synchronize(self, changed: list[int]) -> None:
        """Make buffers equal that some replica has changed, such as running means."""
        owners = [self._owners[index] for index in changed]
        buffers = [b for owner in owners for b in owner.values() if b is not None]
        if self._buffers == "mean":
            buffers = [b for b in buffers if b.is_floating_point()]
        if not buffers:
            return
        arrays = [memory_of(buffer) for buffer in buffers]
        collectives = self.strategy.collectives
        if self._buffers == "mean":
            collectives.batch_reduce(ReduceOp.MEAN, arrays, "buffers", out=arrays)
        else:
            broadcast(self.strategy, arrays, "buffers")
        self._versions = self._buffer_versions()


class _OutputHook:
    """The hook of a module's output; copies of the module are not replicated."""

    def __init__(self, replicated: _Replicated | None) -> None:
        self._replicated = replicated

    def __call__(self, _module: Any, _inputs: Any, output: Any) -> None:
        if self._replicated is not None:
            self._replicated.watch(output)

    def __reduce__(self) -> Any:
        """Forget what belongs to one module in copies, and in files."""
        return _OutputHook, (None,)


# By what `no_sync` and `state` are given; a module does not carry its strategy along
# when it is copied or saved.
_replicated: weakref.WeakKeyDictionary[torch.nn.Module, _Replicated] = (
    weakref.WeakKeyDictionary()
)


def _sparse(indices: Any, values: Any, shape: Any) -> torch.Tensor:
    # Without a word on checks, torch warns that there are none.
    made: torch.Tensor = torch.sparse_coo_tensor(
        indices, values, shape, check_invariants=False
    )
    return made


def broadcast(strategy: Strategy, arrays: Any, what: str) -> None:
    """Write replica 0's values into arrays; collective over the strategy's replicas."""
    received = strategy.collectives.broadcast(arrays, 0, what)
    for own, value in zip(flatten(arrays)[0], flatten(received)[0], strict=True):
        own[...] = value


def replicate(
    module: torch.nn.Module,
    strategy: Strategy,
    *,
    op: ReduceOp | str = "mean",
    buffers: str | None = "first",
) -> torch.nn.Module:
    """Make a module begin with replica 0's weights, and combine its gradients.

    Collective over the strategy's replicas, as is each ``backward()`` through the
    module from then on, except inside `no_sync`.

    The module stays what it is: hooks on its parameters combine what a backward has
    added to ``.grad``, in that memory, by one reduction when the backward ends.
    Gradients are there when ``backward()`` returns: they can be clipped, and any
    optimizer applies them. Several backwards before a step add up as in one process.
    Parameters that a backward does not reach, on some replicas or on all, are no error;
    each replica's backward must reach one. Parameters may be frozen and thawed later;
    for parameters that are added later call this again. ``torch.autograd.grad`` gives
    this replica's gradients alone.

    Parameters
    ----------
    module : torch.nn.Module
        The same on every replica: names, shapes, dtypes. Parameters in host memory, or
        on this replica's GPU.
    strategy : Strategy
        Whose replicas.
    op : ReduceOp or str
        ``"mean"`` or ``"sum"`` of the replicas' gradients. For the gradient of a mean
        over the global batch see `global_mean`.
    buffers : str or None
        What becomes of buffers that a replica has changed, such as running means, at
        the end of a backward: all take replica 0's with ``"first"``, those of floating
        types their mean with ``"mean"``; with None they are left as they are.

    Returns
    -------
    torch.nn.Module
        The module itself.

    Raises
    ------
    ValueError
        For an unknown ``op`` or ``buffers``; the other replicas raise ReplicaError.
    CollectiveError
        If the replicas' modules differ. On every replica. Later, ``backward()`` raises
        it where replicas do different things.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> import hpcstrat.integrations.torch as hst
    >>> model = hst.replicate(torch.nn.Linear(2, 1), hs.get_strategy())
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> model.weight.grad
    tensor([[3., 3.]])
    """
    strategy.collectives.call("replicate", _replicate, module, strategy, op, buffers)
    return module


def _replicate(
    module: torch.nn.Module, strategy: Strategy, op: Any, buffers: str | None
) -> None:
    op = ReduceOp.parse(op)
    if buffers not in _BUFFERS:
        raise ValueError(
            f"expected 'first', 'mean' or None as buffers, found {buffers!r}; take one"
        )
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    what = f"replicate(op={op.name}, buffers={buffers})"
    broadcast(strategy, {k: memory_of(t) for k, t in tensors.items()}, what)
    if module in _replicated:
        _replicated.pop(module).remove()
    _replicated[module] = _Replicated(module, strategy, op, buffers)


@contextmanager
def no_sync(module: torch.nn.Module) -> Iterator[None]:
    """Leave gradients as each replica has them, to add up several backwards.

    Logically collective over the strategy's replicas: all must do it. The next backward
    outside of it combines all that has been added up.

    Parameters
    ----------
    module : torch.nn.Module
        From `replicate`.

    Yields
    ------
    None
        Nothing.

    Raises
    ------
    ValueError
        If it was not replicated.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> import hpcstrat.integrations.torch as hst
    >>> model = hst.replicate(torch.nn.Linear(2, 1), hs.get_strategy())
    >>> with hst.no_sync(model):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> model(torch.ones(1, 2)).sum().backward()  # combines both
    """
    replicated = _replicated.get(inner(module))
    if replicated is None:
        raise ValueError(
            f"expected a module that was replicated, found {type(module).__name__}; "
            "pass the one that was given to replicate"
        )
    before, replicated.syncs = replicated.syncs, False
    try:
        yield
    finally:
        replicated.syncs = before


def inner(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that torch.compile has wrapped."""
    inner: torch.nn.Module = getattr(module, "_orig_mod", module)
    return inner


def strategy_of(module: torch.nn.Module) -> Strategy:
    """Return the strategy that a module was replicated on; else the current one."""
    replicated = _replicated.get(inner(module))
    return get_strategy() if replicated is None else replicated.strategy


def _in_use(strategy: Strategy | None) -> tuple[Strategy, ReduceOp]:
    """Return the strategy and the operation of the modules there are."""
    strategy = strategy or get_strategy()
    some = list(_replicated.values())
    if not strategy.distributes:
        some = [
            one
            for one in some
            if not isinstance(one.strategy.collectives.channel, ClosedChannel)
        ]
        strategies = {id(one.strategy): one.strategy for one in some}
        if len(strategies) > 1:
            raise ValueError(
                "expected modules that are replicated on one strategy, found "
                f"{list(strategies.values())}; pass the strategy"
            )
        strategy = next(iter(strategies.values()), strategy)
    ops = {one.op for one in some if one.strategy is strategy}
    if len(ops) > 1:
        raise ValueError(
            "expected modules that are replicated with one op, found SUM and MEAN; "
            "scale the loss yourself"
        )
    return strategy, ops.pop() if ops else ReduceOp.MEAN


class _GlobalMean(torch.autograd.Function):
    """A value of all replicas, with the gradient of this one's part of it."""

    @staticmethod
    def forward(ctx: Any, loss_sum: Any, value: float, scale: float) -> Any:
        ctx.scale = scale
        return torch.full_like(loss_sum, value)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.scale, None, None


def global_mean(
    loss_sum: torch.Tensor, count: Any, *, strategy: Strategy | None = None
) -> torch.Tensor:
    """Return the mean of a loss over the examples of all replicas.

    Collective over the strategy's replicas.

    Its gradient, combined by the hooks of `replicate`, is that of the mean over the
    global batch, as one process would have found it, however many of the examples are
    on each replica. The mean of the replicas' own means is another number where these
    have different counts.

    Parameters
    ----------
    loss_sum : torch.Tensor of one element
        The sum of the losses of this replica's examples, as of ``reduction="sum"``; of
        none it is 0.
    count : int, float or tensor of one element
        How many examples these are, or the sum of their weights.
    strategy : Strategy, optional
        Default: the current one; outside of scopes, that of the replicated modules.

    Returns
    -------
    torch.Tensor of the shape and dtype of ``loss_sum``
        The same value on every replica.

    Raises
    ------
    ValueError
        If all counts together are not positive, on every replica; and for a loss of
        several elements: the other replicas raise ReplicaError.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> import hpcstrat.integrations.torch as hst
    >>> losses = torch.tensor([1.0, 5.0])
    >>> hst.global_mean(losses.sum(), 2, strategy=hs.get_strategy())
    tensor(3.)
    """
    strategy, op = _in_use(strategy)
    total, number = strategy.collectives.call(
        "global_mean", _totals, strategy, loss_sum, count
    )
    if not number > 0:
        raise ValueError(
            f"expected a positive count over all replicas, found {number:g}; leave out "
            "a step without examples"
        )
    size = strategy.num_replicas_in_sync if op is ReduceOp.MEAN else 1
    apply: Callable[..., torch.Tensor] = _GlobalMean.apply
    return apply(loss_sum, total / number, size / number)


def _totals(strategy: Strategy, loss_sum: Any, count: Any) -> tuple[float, float]:
    if loss_sum.numel() != 1:
        raise ValueError(
            "expected the sum of losses, a tensor of one element, found shape "
            f"{tuple(loss_sum.shape)}; pass reduction='sum', or call .sum()"
        )
    own = np.array([float(loss_sum.detach()), float(count)])
    total, number = strategy.collectives.batch_reduce(ReduceOp.SUM, own, "global_mean")
    return float(total), float(number)
