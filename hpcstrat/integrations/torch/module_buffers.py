"""Keeps buffers of replicated modules, such as running means, equal after backwards."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.tree import flatten
from hpcstrat.engine.typing import Array
from hpcstrat.integrations.torch.tensors import as_tensor, memory_of, torchs_stream
from hpcstrat.strategies import Strategy

__all__ = ["ModuleBuffers", "ReplicaBuffers", "broadcast"]

_Tensors = dict[str, torch.Tensor]
_UNEQUAL = (
    "compute statistics of divided values over all ranks of the replica, by "
    "hst.inside.sum, or pass buffers=None to replicate to keep each rank's own"
)


class _Owner:
    """A submodule's buffers, and their values when they were last synchronized."""

    def __init__(
        self, buffers: dict[str, Any], num_sets: int, divided: Collection[str] = ()
    ) -> None:
        self.buffers = buffers
        # Names of buffers that the ranks of a replica divide; these are left out.
        self.divided = divided
        # Empty at first: buffers that are registered later count as changed.
        self.common: _Tensors = {}
        # One copy of the buffers for each logical replica of this rank.
        self.sets: list[_Tensors] = [{} for _ in range(num_sets)]

    def tensors(self) -> _Tensors:
        """Return the buffers that have values, by name."""
        return {
            name: buffer
            for name, buffer in self.buffers.items()
            if buffer is not None and name not in self.divided
        }


class ModuleBuffers:
    """The buffers of a module, grouped by owner: the submodule that has them.

    ``mode`` is "first", "mean" or None, like the argument ``buffers`` of `replicate`.
    ``divided`` are names of buffers that the ranks of a replica divide.
    """

    num_sets = 0

    def __init__(
        self,
        module: torch.nn.Module,
        strategy: Strategy,
        mode: str | None,
        divided: Collection[str] = (),
    ) -> None:
        self.strategy = strategy
        ranks = strategy.num_replicas_in_sync * strategy.inside.size
        self.mode = mode if ranks > 1 else None
        owners = [
            _Owner(
                one._buffers,
                self.num_sets,
                {n for n in one._buffers if f"{path}.{n}".lstrip(".") in divided},
            )
            for path, one in module.named_modules()
        ]
        # Owners that have buffers now are synchronized one by one, all other owners
        # together: a forward may register buffers, and replicas may differ in modules
        # without any.
        self._groups = [[owner] for owner in owners if owner.tensors()]
        self._groups.append([owner for owner in owners if not owner.tensors()])
        self._remember(owners)

    def _owners(self) -> list[_Owner]:
        return [owner for group in self._groups for owner in group]

    def follow(self, module: torch.nn.Module) -> None:
        """Include submodules that were added to a module."""
        known = {id(owner.buffers) for owner in self._owners()}
        added = [m._buffers for m in module.modules() if id(m._buffers) not in known]
        self._groups[-1] += [_Owner(buffers, self.num_sets) for buffers in added]

    @torch.no_grad()
    def _remember(self, owners: list[_Owner]) -> None:
        """Copy buffers that are now equal on all replicas."""
        if self.mode is not None:
            for owner in owners:
                _copy(owner.tensors(), owner.common)

    def changed(self) -> list[bool]:
        """Return for each group of owners whether its buffers have changed.

        Values are compared, because torch counts no changes by NumPy or ``.data``.
        """
        if self.mode is None:
            return []
        return [any(map(self._has_changed, group)) for group in self._groups]

    def _has_changed(self, owner: _Owner) -> bool:
        return _differ(owner.tensors(), owner.common)

    @torchs_stream()
    def synchronize(self, groups: list[int]) -> None:
        """Make the buffers of some groups equal on all replicas; collective."""
        owners = [owner for number in groups for owner in self._groups[number]]
        buffers = [b for owner in owners for b in owner.tensors().values()]
        if self.mode == "mean":
            buffers = [b for b in buffers if b.is_floating_point()]
        arrays = _arrays(buffers)
        if groups and self.mode == "mean":
            collectives = self.strategy.collectives
            collectives.batch_reduce(ReduceOp.MEAN, arrays, "buffers", out=arrays)
        elif groups:
            self._require_equal(arrays)
            broadcast(self.strategy, arrays, "buffers")
        self._remember(owners)

    def _require_equal(self, arrays: list[Array]) -> None:
        """Raise CollectiveError if buffers differ between the ranks of a replica."""
        inside = self.strategy.inside
        inside.require_whole("buffers of a module", arrays, advice=_UNEQUAL)


class ReplicaBuffers(ModuleBuffers):
    """Copies of a module's buffers, one per local replica; one of them is in use."""

    def __init__(
        self,
        module: torch.nn.Module,
        strategy: Strategy,
        mode: str | None,
        divided: Collection[str] = (),
    ) -> None:
        self.num_sets = len(strategy.local_replicas)
        self._in_use = 0
        super().__init__(module, strategy, mode, divided)
        for index in range(self.num_sets):
            self._keep(index)

    def use(self, index: int) -> None:
        """Save the buffers of the replica that ran, and load those of ``index``."""
        if index != self._in_use:
            self._keep(self._in_use)
            self._in_use = index
            self._load()

    @torch.no_grad()
    def _keep(self, index: int) -> None:
        for owner in self._owners():
            _copy(owner.tensors(), owner.sets[index])

    @torch.no_grad()
    def _load(self) -> None:
        for owner in self._owners():
            # A buffer that another replica has registered keeps that replica's value.
            for name, own in owner.sets[self._in_use].items():
                buffer = owner.buffers.get(name)
                if buffer is not None and _are_alike(buffer, own):
                    buffer.copy_(own)
                else:
                    owner.buffers[name] = own.clone()

    def reset(self) -> None:
        """Set all replicas' copies to the module's buffers: a restore changes these."""
        if self.mode is not None:
            for index in range(self.num_sets):
                self._keep(index)
            self._remember(self._owners())

    def changed(self) -> list[bool]:
        """Return for each group whether a replica has changed its buffers."""
        self._keep(self._in_use)
        return super().changed()

    def _has_changed(self, owner: _Owner) -> bool:
        return any(_differ(each, owner.common) for each in owner.sets)

    @torch.no_grad()
    def synchronize(self, groups: list[int]) -> None:
        """Make the buffers of some groups equal on all replicas; collective."""
        if not groups:
            return
        owners = [owner for number in groups for owner in self._groups[number]]
        self._keep(self._in_use)
        for owner in owners:
            # A replica that ran before a buffer was registered has no value of it.
            for name, buffer in owner.tensors().items():
                for each in owner.sets:
                    each.setdefault(name, buffer.clone())
        sets = [
            [buffer for owner in owners for _, buffer in sorted(owner.sets[i].items())]
            for i in range(self.num_sets)
        ]
        if self.mode == "mean":
            # Buffers of integers, such as counters, keep each replica's own value.
            sets = [[b for b in each if b.is_floating_point()] for each in sets]
        arrays = [_arrays(each) for each in sets]
        if self.mode == "mean":
            reduce_parts = self.strategy.replicas.reduce_parts
            found = reduce_parts(ReduceOp.MEAN, arrays, "buffers")
        else:
            self._require_equal(arrays[0])
            found = self.strategy.collectives.broadcast(arrays[0], 0, "buffers")
        for buffers in filter(None, sets):
            for buffer, value in zip(buffers, found, strict=True):
                buffer.copy_(as_tensor(value))
        self._load()


def _arrays(buffers: list[torch.Tensor]) -> list[Array]:
    """Return buffers as arrays; an array of zeros if there are none.

    Another replica may have registered a buffer, and must not wait for this one.
    """
    return [memory_of(buffer) for buffer in buffers] or [np.zeros(1)]


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, type and device."""
    kinds = [(t.shape, t.dtype, t.device) for t in (one, other)]
    return kinds[0] == kinds[1]


def _copy(tensors: _Tensors, kept: _Tensors) -> None:
    """Copy tensors by name, into earlier copies of the same shape and type."""
    for name in kept.keys() - tensors.keys():
        del kept[name]
    for name, tensor in tensors.items():
        if name in kept and _are_alike(tensor, kept[name]):
            kept[name].copy_(tensor)
        else:
            kept[name] = tensor.detach().clone()


def _differ(tensors: _Tensors, others: _Tensors) -> bool:
    return tensors.keys() != others.keys() or not all(
        _are_alike(tensor, others[name]) and torch.equal(tensor, others[name])
        for name, tensor in tensors.items()
    )


def broadcast(strategy: Strategy, arrays: Any, what: str) -> None:
    """Write replica 0's values into arrays; collective over the strategy's replicas."""
    received = strategy.collectives.broadcast(arrays, 0, what)
    for own, value in zip(flatten(arrays)[0], flatten(received)[0], strict=True):
        own[...] = value
