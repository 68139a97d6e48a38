"""Batch normalization over the global batch, in host memory and on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Replicas
from hpcstrat.integrations.torch.tensors import memory_of, torchs_stream
from hpcstrat.strategies import Strategy

__all__ = ["SyncBatchNorm", "normalize"]

_WHAT = "batch normalization"


class _Home:
    """Refers to the strategy of a layer and of its copies; omitted in saved files."""

    def __init__(self, strategy: Strategy | None = None) -> None:
        self.strategy = strategy

    def __deepcopy__(self, memo: dict[int, Any]) -> _Home:
        return self

    def __reduce__(self) -> Any:
        return _Home, ()


class SyncBatchNorm(_BatchNorm):
    """Batch normalization with the mean and variance of all replicas' rows.

    In training, the layer's forward and backward are collective over the strategy's
    replicas. In evaluation they are not, if the layer tracks running statistics.

    `convert` makes these layers. A layer has the weights, buffers and names of the
    layer that it replaces, so that each can load the state of the other. A replica's
    batch may have no rows.
    """

    _home = _Home()
    # True if the ranks of a replica have other values, parts of a field.
    _divided = False

    @classmethod
    def convert(
        cls, module: torch.nn.Module, strategy: Strategy, *, divided: bool = False
    ) -> torch.nn.Module:
        """Replace all layers of batch normalization by synchronized layers.

        Logically collective over the strategy's replicas. Call `convert` before
        `replicate`, and before an optimizer is made.

        Parameters
        ----------
        module : torch.nn.Module
            Its ``BatchNorm1d``, ``BatchNorm2d``, ``BatchNorm3d`` and
            ``torch.nn.SyncBatchNorm`` are replaced; weights and buffers are kept.
        strategy : Strategy
            The strategy whose replicas normalize together.
        divided : bool
            True: the ranks of a replica have parts of a field, and normalize by the
            mean and variance of the whole field. False: they have equal values.

        Returns
        -------
        torch.nn.Module
            The module; or the new layer, if the module is itself a layer to replace.

        Raises
        ------
        NotImplementedError
            For a divided field with logical replicas.

        Examples
        --------
        >>> import hpcstrat as hs
        >>> import hpcstrat.integrations.torch as hst
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> net = hst.SyncBatchNorm.convert(net, hs.get_strategy())
        >>> type(net[1]).__name__
        'SyncBatchNorm'
        """
        if divided and strategy.inside.size > 1 and strategy.logical:
            raise NotImplementedError(
                "expected one replica on each rank for the normalization of divided "
                "fields, found logical replicas; leave out logical_replicas"
            )
        home = _Home(strategy)
        if isinstance(module, _BatchNorm):
            return cls._instead(module, home, divided=divided)
        for owner in list(module.modules()):
            for name, child in list(owner.named_children()):
                if isinstance(child, _BatchNorm):
                    made = cls._instead(child, home, divided=divided)
                    setattr(owner, name, made)
        return module

    @classmethod
    def _instead(cls, layer: Any, home: _Home, *, divided: bool) -> Any:
        if isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin):
            raise ValueError(
                f"expected layers whose size is known, found {type(layer).__name__}; "
                "call the module once before convert"
            )
        names = ("num_features", "eps", "momentum", "affine", "track_running_stats")
        made: Any = cls(**{name: getattr(layer, name) for name in names})
        # Keep the old layer's tensors, because optimizers, and layers that share its
        # weights, refer to these tensors.
        made._parameters, made._buffers = layer._parameters, layer._buffers
        made.training, made._home, made._divided = layer.training, home, divided
        return made

    def _check_input_dim(self, values: Any) -> None:
        if values.dim() < 2 or values.shape[1] != self.num_features:
            raise ValueError(
                f"expected values of shape (rows, {self.num_features}, ...), found "
                f"{tuple(values.shape)}; reshape them"
            )

    def forward(self, values: Any) -> Any:
        """Normalize values of shape (rows, channels, ...)."""
        if not self.training and self.running_mean is not None:
            return super().forward(values)
        strategy = self._home.strategy
        if strategy is None:
            raise ValueError(
                "expected a SyncBatchNorm with a strategy, found one that was loaded "
                "from a file; call SyncBatchNorm.convert(module, strategy) again"
            )
        return normalize(self, values, strategy, divided=self._divided)


def normalize(
    layer: Any, values: Any, strategy: Strategy, *, divided: bool = False
) -> Any:
    """Normalize values by a layer of batch normalization, in training or without means.

    Collective over the strategy's replicas; over all its ranks if these have parts of
    ``divided`` fields.
    """
    ranks = strategy.all_ranks if divided else strategy
    if ranks is strategy:
        place = strategy.replica_id, strategy.num_replicas_in_sync
    else:
        place = ranks.rank, ranks.num_ranks
    output, mean, variance, count = ranks.collectives.call(
        _WHAT, _normalized, layer, values, (ranks, *place)
    )
    if layer.training and layer.running_mean is not None:
        _track(layer, mean, variance, count)
    return output


def _normalized(layer: Any, values: Any, who: tuple[Replicas, int, int]) -> Any:
    SyncBatchNorm._check_input_dim(layer, values)
    how = layer.eps, *who
    return _Normalize.apply(values, layer.weight, layer.bias, how)


@torch.no_grad()
def _track(layer: Any, mean: Any, variance: Any, count: Any) -> None:
    """Update running mean and variance, as torch does: with divisor n - 1."""
    number, momentum = float(count), layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1 / float(layer.num_batches_tracked)
    unbiased = variance * (number / max(number - 1, 1))
    pairs = (layer.running_mean, mean), (layer.running_var, unbiased)
    for running, latest in pairs:
        running.lerp_(latest.to(running.dtype), momentum)


@torchs_stream()
def _summed(ranks: Replicas, rows: torch.Tensor, what: str) -> torch.Tensor:
    array = memory_of(rows)
    ranks.collectives.batch_reduce(ReduceOp.SUM, array, what, out=array)
    return rows


def _totals(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of each channel, in float64."""
    dims = [i for i in range(values.dim()) if i != 1]
    return values.sum(dims, dtype=torch.float64)


def _spread(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return vector.to(like.dtype).view([1, -1] + [1] * (like.dim() - 2))


class _Normalize(torch.autograd.Function):
    """Normalizes values by the mean and variance of all replicas' rows."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Any,
        weight: Any,
        bias: Any,
        how: tuple[float, Replicas, int, int],
    ) -> Any:
        # ``own`` of ``number`` sets of values, which are normalized together, is here.
        eps, ranks, own, number = how
        # Values of 2-byte types are normalized in float32, as in torch.
        wide = values.float() if values.dtype.itemsize == 2 else values
        channels = values.shape[1]
        count = wide.numel() // channels
        # Subtract each replica's own mean before squaring: if the variance is small
        # beside the mean, a sum of plain squares would lose the variance's digits
        # (Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115).
        mean = _totals(wide) / max(count, 1)
        squares = _totals((wide - _spread(mean, wide)).square())
        rows = wide.new_zeros((number, 1 + 2 * channels), dtype=torch.float64)
        rows[own, 0] = count
        rows[own, 1 : 1 + channels] = mean
        rows[own, 1 + channels :] = squares
        # Each replica fills only its own row, so the sum gathers all rows.
        rows = _summed(ranks, rows, _WHAT)
        counts, means = rows[:, :1], rows[:, 1 : 1 + channels]
        total = counts.sum().clamp(min=1)
        mean = (counts * means).sum(0) / total
        between = (counts * (means - mean).square()).sum(0)
        variance = (rows[:, 1 + channels :].sum(0) + between) / total
        scale = torch.rsqrt(variance + eps)
        normal = (wide - _spread(mean, wide)) * _spread(scale, wide)
        output = normal if weight is None else normal * _spread(weight, wide)
        if bias is not None:
            output = output + _spread(bias, wide)
        ctx.save_for_backward(normal, scale, total, weight)
        ctx.ranks = ranks
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(values.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        normal, scale, total, weight = ctx.saved_tensors
        wide = gradient.to(normal.dtype)
        own = torch.stack([_totals(wide), _totals(wide * normal)])
        # Gradients of bias and weight for this replica's rows; the hooks of `replicate`
        # combine them over replicas.
        shift, slope = (part.clone() for part in own)
        summed = _summed(ctx.ranks, own, f"{_WHAT} backward") / total
        inner = wide - _spread(summed[0], wide) - normal * _spread(summed[1], wide)
        factor = scale if weight is None else scale * weight
        values = (inner * _spread(factor, wide)).to(gradient.dtype)
        if weight is None:
            return values, None, None, None
        return values, slope.to(weight.dtype), shift.to(weight.dtype), None
