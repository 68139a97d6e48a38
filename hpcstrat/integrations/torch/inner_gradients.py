"""Gradients of modules that the ranks of a replica compute together.

Each rank has a copy of the module, and differentiates the same loss, the replica's. The
gradients of calls inside of a replica are those of the sum of all ranks' results, so
the gradient of this rank's copy of a parameter is that of M equal losses, with M ranks.
The gradient of a replicated parameter is therefore the mean of the gradients of all
ranks' copies, and that of a part of a divided parameter is an M-th of this rank's. This
holds only if all ranks begin their backward at the same value, which `global_mean` has
compared; a backward that does not go through `global_mean` is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.integrations.torch.tensors import (
    gradient_of,
    memory_of,
    rows_of,
    takes_hooks,
    torchs_stream,
)
from hpcstrat.strategies import Strategy
from hpcstrat.variables.divided import Split, parse_split

__all__ = ["InnerGradients", "note_whole_loss", "parse_splits", "require_equal"]

_WHAT = "gradients inside"
_UNEQUAL = (
    "initialize them equally on these ranks, by torch.manual_seed for example, or, if "
    "each rank has a part, name them in the argument split"
)
_DRIFTED = (
    "update replicated parameters equally on these ranks: a norm of gradients that "
    "includes divided ones, for example, must be summed by hst.inside.sum"
)

# For each strategy, a callback at the end of the running backward, if this has reached
# a loss of `global_mean`. Autograd deletes the callback when the backward ends.
_whole_losses: weakref.WeakKeyDictionary[Strategy, weakref.ref[Any]]
_whole_losses = weakref.WeakKeyDictionary()


def note_whole_loss(strategy: Strategy) -> None:
    """Note that the running backward goes through a loss of `global_mean`."""

    def end() -> None:
        pass

    _whole_losses[strategy] = weakref.ref(end)
    torch.autograd.Variable._execution_engine.queue_callback(end)


def parse_splits(
    tensors: Mapping[str, torch.Tensor], split: Mapping[str, Any], strategy: Strategy
) -> dict[str, Split]:
    """Return the divided axes of the parameters and buffers that ``split`` names.

    Collective over the ranks of the replica. Raises TypeError or ValueError on all of
    them if a pattern has no tensor, or a part another shape than ``part`` says.
    """
    if not isinstance(split, Mapping):
        raise TypeError(
            f"expected a dict from names to axes as split, found {split!r}; write "
            '{"spectral.weights": 3}, for example'
        )
    inside, found = strategy.inside, dict[str, Split]()
    for pattern, axes in split.items():
        names = [name for name in tensors if fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(
                f"expected a parameter or buffer of the module for {pattern!r} in "
                f"split, found only {', '.join(tensors)}; change the name"
            )
        for name in names:
            tensor = tensors[name]
            found[name] = parse_split(axes, inside.shape, tensor.ndim, name)
            _require_all_axes(found[name], inside.shape, name)
            inside.whole_shape(tensor.shape, found[name])
    return found


def _require_all_axes(split: Split, shape: Mapping[str, int], name: str) -> None:
    """Raise ValueError if several ranks of a replica have the same part.

    Their gradients would have to be summed over these ranks.
    """
    axes = {along for _, along in split}
    rest = [axis for axis in shape if axis not in axes and shape[axis] > 1]
    if rest and None not in axes:
        raise ValueError(
            f"expected a split of {name!r} along all axes of the replica, {shape}, "
            f"found none along {', '.join(rest)}; divide it among all ranks"
        )


def require_equal(strategy: Strategy, arrays: Mapping[str, Array], what: str) -> None:
    """Raise CollectiveError if the ranks of a replica have different values.

    Collective over the ranks of the replica.
    """
    inside = strategy.inside
    inside.require_whole(what, list(arrays.values()), list(arrays), advice=_UNEQUAL)


class InnerGradients:
    """Makes gradients of a module's parameters those of the replica.

    ``share`` returns this rank's gradient of a parameter, or zeros.
    """

    def __init__(
        self,
        strategy: Strategy,
        named: Sequence[tuple[str, torch.Tensor]],
        divided: Iterable[str],
        share: Callable[[int], torch.Tensor],
    ) -> None:
        self._strategy, self._share = strategy, share
        self._inside = strategy.inside
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._divided = {self._names.index(name) for name in divided}
        self._replicated = [i for i in range(len(named)) if i not in self._divided]

    def hooks(self) -> list[Any]:
        """Return the handles of hooks that scale gradients of divided parameters."""
        handles, count = [], self._inside.size
        for index in self._divided:
            parameter = self._parameters[index]
            with takes_hooks(parameter):
                handles.append(parameter.register_hook(lambda g: g / count))
        return handles

    def require_whole_loss(self) -> None:
        """Raise ValueError if the backward has not reached a loss of `global_mean`."""
        found = _whole_losses.get(self._strategy)
        if found is not None and found() is not None:
            return

        def refuse() -> None:
            raise ValueError(
                "expected a backward from hst.global_mean, which compares the loss on "
                f"the {self._inside.size} ranks of a replica, found another; give the "
                "sum of the replica's losses, summed by hst.inside.sum if each rank "
                "has a part, to hst.global_mean"
            )

        inner = self._inside.collectives
        self._strategy.collectives.call(_WHAT, inner.call, _WHAT, refuse)

    def any(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether it is set on a rank of the replica."""
        if not flags:
            return flags
        own = np.array(flags, np.int32)
        total = self._inside.collectives.batch_reduce(ReduceOp.SUM, own, _WHAT)
        return [bool(number) for number in total]

    def combine(self, touched: dict[int, int]) -> None:
        """Average gradients of replicated parameters over the ranks of the replica.

        Collective over the ranks of the replica. ``touched`` has the parameters that
        this rank's backward has reached, and their tensors' versions. Those that only
        backwards of other ranks have reached are added.
        """
        calls: Any = self._inside.collectives
        if not self._strategy.logical:
            # If a rank leaves out a backward, its next call inside differs.
            calls.channel.position.enter_backward()
        for index in calls.call(_WHAT, self._combine, touched):
            touched.setdefault(index, self._parameters[index]._version)

    @torch.no_grad()
    @torchs_stream()
    def _combine(self, touched: Iterable[int]) -> list[int]:
        inside, calls = self._inside, self._inside.collectives
        own = [memory_of(self._parameters[i]) for i in self._replicated]
        names = [self._names[i] for i in self._replicated]
        inside.require_whole("backward", own, names, advice=_DRIFTED)
        marks = np.zeros((2, len(self._parameters)), np.int32)
        for index in touched:
            gradient = self._parameters[index].grad
            marks[int(gradient is not None and gradient.is_sparse), index] = 1
        told = calls.batch_reduce(ReduceOp.SUM, marks, _WHAT)
        dense, sparse = (
            [i for i in np.flatnonzero(row).tolist() if i not in self._divided]
            for row in told
        )
        shares = [self._share(index) for index in dense]
        arrays = [memory_of(share) for share in shares]
        calls.batch_reduce(ReduceOp.MEAN, arrays, _WHAT, out=arrays)
        for index, share in zip(dense, shares, strict=True):
            self._parameters[index].grad = share
        for index in sparse:
            parameter = self._parameters[index]
            rows = rows_of(parameter.grad, parameter, self._names[index])
            rows = calls.batch_reduce(ReduceOp.MEAN, rows, _WHAT)
            parameter.grad = gradient_of(rows, parameter)
        return [int(index) for index in np.flatnonzero(told.any(axis=0))]
