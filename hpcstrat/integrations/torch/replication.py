"""Modules of PyTorch whose gradients are combined over the replicas, in place."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hpcstrat.engine.channel.channel import ClosedChannel
from hpcstrat.engine.options import ReduceOp
from hpcstrat.integrations.frameworks import (
    gradient_operation,
    require_sums_each_step,
)
from hpcstrat.integrations.torch.gradient_hooks import Replicated
from hpcstrat.integrations.torch.inner_gradients import (
    note_whole_loss,
    parse_splits,
    require_equal,
)
from hpcstrat.integrations.torch.logical_gradients import LogicalReplicated
from hpcstrat.integrations.torch.meshes import is_dtensor
from hpcstrat.integrations.torch.module_buffers import broadcast
from hpcstrat.integrations.torch.tensors import memory_of, torchs_stream
from hpcstrat.strategies import Strategy, get_strategy
from hpcstrat.variables.divided import Split

__all__ = [
    "global_mean",
    "inner",
    "no_sync",
    "replicate",
    "strategy_of",
]

_BUFFERS = ("first", "mean", None)


# Each replicated module's hooks and state. They are not an attribute of the module, so
# that a copied or saved module does not include its strategy.
_replicated: weakref.WeakKeyDictionary[torch.nn.Module, Replicated] = (
    weakref.WeakKeyDictionary()
)


def replicate(
    module: torch.nn.Module,
    strategy: Strategy,
    *,
    op: ReduceOp | str = "mean",
    buffers: str | None = "first",
    bucket_bytes: int = 4 << 20,
    split: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Set a module's weights to replica 0's, and combine gradients over replicas.

    Collective over the strategy's replicas, as is each ``backward()`` through the
    module from then on, except inside `no_sync`.

    The module is not wrapped: hooks on its parameters combine the gradients in
    ``.grad``, in place, with one reduction when the backward ends. Between workers,
    gradients in host memory are summed in buckets during the backward. When
    ``backward()`` returns, gradients can be clipped, and any optimizer can apply them.
    Gradients of several backwards before a step add up as in one process.

    A backward need not reach all parameters, but it must reach at least one on each
    replica. Parameters may be frozen and unfrozen later. After parameters were added or
    replaced call `replicate` again; without it the module's next forward raises
    ValueError. ``torch.autograd.grad`` returns this replica's gradients only. A
    parameter in two replicated modules is combined once. Step an optimizer after
    ``backward()``, and not in hooks.

    If replicas consist of several ranks, each of them has the module, and all compute
    one loss, the replica's, which must go through `global_mean`. Parameters and buffers
    are equal on the ranks of a replica, except those that ``split`` names, of which
    each rank has a part. Gradients of equal parameters are averaged over all ranks, and
    those of a part over the ranks with this part: both are the gradients of the global
    mean. ``torch.autograd.grad`` returns those of parts alone.

    Parameters
    ----------
    module : torch.nn.Module
        The module, with the same names, shapes and dtypes on every replica. Its
        parameters are in host memory, or on this replica's GPU.
    strategy : Strategy
        The strategy whose replicas train the module.
    op : ReduceOp or str
        ``"mean"`` or ``"sum"`` of the replicas' gradients. For the gradient of a mean
        over the global batch see `global_mean`.
    buffers : str or None
        Treatment, at the end of a backward, of buffers that a replica has changed, such
        as running means. ``"first"``: all replicas get replica 0's. ``"mean"``: buffers
        of floating types get the mean over replicas. None: buffers are not
        synchronized.
    bucket_bytes : int
        Size of a bucket, large enough that its transfer between workers takes some
        milliseconds. 0: one reduction at the end, as always with a single worker.
        Buckets use as much memory as the gradients. Replicas of several ranks make one
        reduction at the end.
    split : mapping of str to int, optional
        The parameters and buffers that the ranks of a replica divide, each with the
        divided axis, such as ``{"spectral.weights": 3}``. Names may have wildcards, as
        in ``fnmatch``. Instead of an axis, a dict from axes of the ``replica_shape`` to
        axes. The module has this rank's part, with the rows of
        ``strategy.inside.part``; the part of replica 0's rank at the same position is
        copied to all replicas.

    Returns
    -------
    torch.nn.Module
        The module itself.

    Raises
    ------
    ValueError
        For an unknown ``op`` or ``buffers``, a negative size, or if a replicated module
        with another ``op`` shares parameters; the other replicas raise ReplicaError.
        For a name in ``split`` that the module does not have, or a part of another
        shape than ``part`` says. In a backward that does not go through `global_mean`,
        with replicas of several ranks.
    NotImplementedError
        For a strategy whose replicas are not in sync.
    CollectiveError
        If the replicas' modules differ; raised on every replica. A later ``backward()``
        raises it if replicas make different calls, or have begun different numbers of
        backwards. So a backward that failed on one replica is never combined with the
        next backward of the others. Also if parameters or buffers that ``split`` does
        not name differ between the ranks of a replica, now or in a later backward.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> import hpcstrat.integrations.torch as hst
    >>> model = hst.replicate(torch.nn.Linear(2, 1), hs.get_strategy())
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> model.weight.grad
    tensor([[3., 3.]])
    """
    require_sums_each_step(strategy, "a module of PyTorch")
    begin = functools.partial(
        _replicate,
        module,
        strategy,
        op,
        buffers=buffers,
        bucket_bytes=bucket_bytes,
        split=split or {},
    )
    inner = strategy.inside.collectives
    strategy.collectives.call("replicate", inner.call, "replicate", begin)
    return module


def _replicate(
    module: torch.nn.Module,
    strategy: Strategy,
    op: Any,
    *,
    buffers: str | None,
    bucket_bytes: int,
    split: Mapping[str, Any],
) -> None:
    op = gradient_operation(op)
    if buffers not in _BUFFERS:
        raise ValueError(
            f"expected 'first', 'mean' or None as buffers, found {buffers!r}; take one"
        )
    if bucket_bytes < 0:
        raise ValueError(
            f"expected bucket_bytes >= 0, found {bucket_bytes}; pass 0 for one "
            "reduction at the end"
        )
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in tensors.items():
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"expected parameters with values, found {name!r} of a lazy module, "
                "which has none before its first forward; call the module once with a "
                "batch, of the same shape on every replica, before replicate"
            )
        if is_dtensor(tensor):
            raise ValueError(
                f"expected tensors of this rank alone, found {name!r}, a DTensor, "
                "which PyTorch divides over a mesh; let FSDP2 combine its gradients "
                'over mesh["replica"] of hst.device_mesh, and leave out replicate'
            )
    sizes = f"buffers={buffers}, bucket_bytes={bucket_bytes}"
    what = f"replicate(op={op.name}, {sizes})"
    divided = parse_splits(tensors, split, strategy)
    with torchs_stream():
        arrays = {name: memory_of(tensor) for name, tensor in tensors.items()}
        whole = {name: a for name, a in arrays.items() if name not in divided}
        require_equal(strategy, whole, "replicate")
        with strategy.inside.divided():
            broadcast(strategy, arrays, what)
    if module in _replicated:
        _replicated.pop(module).remove()
    kind = LogicalReplicated if strategy.logical else Replicated
    _replicated[module] = kind(
        module,
        strategy,
        op,
        buffers=buffers,
        bucket_bytes=bucket_bytes,
        divided=divided,
    )


@contextmanager
def no_sync(module: torch.nn.Module) -> Iterator[None]:
    """Keep each replica's own gradients in this block, to add up several backwards.

    Logically collective over the strategy's replicas: all must enter the block. The
    next backward outside of the block combines the accumulated gradients.

    Parameters
    ----------
    module : torch.nn.Module
        A module that was passed to `replicate`.

    Yields
    ------
    None
        Nothing.

    Raises
    ------
    ValueError
        If the module was not replicated.

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
    """Return the module inside of a wrapper of torch.compile, or the module itself."""
    inner: torch.nn.Module = getattr(module, "_orig_mod", module)
    return inner


def strategy_of(module: torch.nn.Module) -> Strategy:
    """Return the strategy that a module was replicated on, or else the current one."""
    replicated = _replicated.get(inner(module))
    return get_strategy() if replicated is None else replicated.strategy


def splits_of(module: torch.nn.Module) -> Mapping[str, Split]:
    """Return the divided parameters and buffers of a module that was replicated."""
    replicated = _replicated.get(module)
    return {} if replicated is None else replicated.divided


def _in_use(strategy: Strategy | None) -> tuple[Strategy, ReduceOp]:
    """Return the strategy for a mean, and the ``op`` of its replicated modules."""
    strategy = strategy or get_strategy()
    strategies, ops = _candidates(strategy)
    if len(strategies) > 1 or len(ops) > 1:
        # Free modules that the program no longer uses, which have been counted here.
        gc.collect()
        strategies, ops = _candidates(strategy)
    if len(strategies) > 1:
        raise ValueError(
            "expected modules that are replicated on one strategy, found "
            f"{strategies}; pass the strategy"
        )
    if len(ops) > 1:
        raise ValueError(
            "expected modules that are replicated with one op, found SUM and MEAN; "
            "scale the loss yourself"
        )
    return strategies[0], ops.pop() if ops else ReduceOp.MEAN


def _candidates(strategy: Strategy) -> tuple[list[Strategy], set[ReduceOp]]:
    """Return the strategies that `_in_use` can choose, and the first strategy's ops."""
    some, strategies = list(_replicated.values()), [strategy]
    if not strategy.distributes:
        found = {
            id(one.strategy): one.strategy
            for one in some
            if not isinstance(one.strategy.collectives.channel, ClosedChannel)
        }
        strategies = list(found.values()) or strategies
    return strategies, {one.op for one in some if one.strategy is strategies[0]}


class _GlobalMean(torch.autograd.Function):
    """Replaces a replica's loss sum by the global mean; backward scales gradients."""

    @staticmethod
    def forward(
        ctx: Any, loss_sum: Any, value: float, scale: float, compared: Strategy | None
    ) -> Any:
        ctx.scale, ctx.compared = scale, compared
        return torch.full_like(loss_sum, value)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if ctx.compared is not None:
            note_whole_loss(ctx.compared)
        return gradient * ctx.scale, None, None, None


def global_mean(
    loss_sum: torch.Tensor, count: Any, *, strategy: Strategy | None = None
) -> torch.Tensor:
    """Return the mean of a loss over the examples of all replicas.

    Collective over the strategy's replicas.

    Each replica's backward computes only its own part of the gradient. When the hooks
    of `replicate` have combined these parts, the result is the gradient that one
    process would compute from the global batch. A mean of the replicas' own means would
    be different if replicas have different numbers of examples.

    Parameters
    ----------
    loss_sum : torch.Tensor of one element
        The sum of the losses of this replica's examples, as ``reduction="sum"``
        returns; 0 if there are no examples.
    count : int, float or tensor of one element
        Number of these examples, or the sum of their weights.
    strategy : Strategy, optional
        Default: the current strategy; outside of scopes, the strategy of the replicated
        modules.

    Returns
    -------
    torch.Tensor of the shape and dtype of ``loss_sum``
        The same value on every replica.

    Raises
    ------
    ValueError
        On every replica, if the sum of all replicas' counts is not positive. On this
        replica, for a loss of several elements; the other replicas raise ReplicaError.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> import hpcstrat.integrations.torch as hst
    >>> losses = torch.tensor([1.0, 5.0])
    >>> hst.global_mean(losses.sum(), 2, strategy=hs.get_strategy())
    tensor(3.)
    """
    strategy, op = _in_use(strategy)
    begin = _totals, strategy, loss_sum, count
    total, number = strategy.collectives.call("global_mean", *begin)
    if not number > 0:
        raise ValueError(
            f"expected a positive count over all replicas, found {number:g}; leave out "
            "a step without examples"
        )
    size = strategy.num_replicas_in_sync if op is ReduceOp.MEAN else 1
    compared = strategy if strategy.inside.size > 1 else None
    apply: Callable[..., torch.Tensor] = _GlobalMean.apply
    return apply(loss_sum, total / number, size / number, compared)


def _totals(strategy: Strategy, loss_sum: Any, count: Any) -> tuple[float, float]:
    if loss_sum.numel() != 1:
        raise ValueError(
            "expected the sum of losses, a tensor of one element, found shape "
            f"{tuple(loss_sum.shape)}; pass reduction='sum', or call .sum()"
        )
    own = np.array([float(loss_sum.detach()), float(count)])
    total, number = strategy.collectives.batch_reduce(ReduceOp.SUM, own, "global_mean")
    return float(total), float(number)
