"""Keeps buffers of replicated modules, such as running means, equal after backwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.tree import flatten
from hpcstrat.integrations.torch.tensors import as_tensor, memory_of, torchs_stream
from hpcstrat.strategies import Strategy

__all__ = ["ModuleBuffers", "ReplicaBuffers", "broadcast"]


class ModuleBuffers:
    """The buffers of a module, grouped by owner: the submodule that has them.

    ``mode`` is "first", "mean" or None, like the argument ``buffers`` of `replicate`.
    """

    def __init__(
        self, module: torch.nn.Module, strategy: Strategy, mode: str | None
    ) -> None:
        self.strategy = strategy
        self.mode = mode
        # Compare all buffers of an owner together: when batch normalization updates its
        # running mean, torch changes the version of its batch count only.
        self._owners = [m._buffers for m in module.modules() if m._buffers]
        self._versions = self._current_versions()

    def _current_versions(self) -> list[Any]:
        return [tuple((id(b), b._version) for b in _tensors(o)) for o in self._owners]

    def changed(self) -> list[bool]:
        """Return for each owner whether its buffers changed since `synchronize`."""
        if self.mode is None:
            return []
        pairs = zip(self._versions, self._current_versions(), strict=True)
        return [old != new for old, new in pairs]

    @torchs_stream()
    def synchronize(self, owners: list[int]) -> None:
        """Make the buffers of some owners equal on all replicas; collective."""
        buffers = [b for index in owners for b in _tensors(self._owners[index])]
        if self.mode == "mean":
            buffers = [b for b in buffers if b.is_floating_point()]
        if not buffers:
            return
        arrays = [memory_of(buffer) for buffer in buffers]
        if self.mode == "mean":
            collectives = self.strategy.collectives
            collectives.batch_reduce(ReduceOp.MEAN, arrays, "buffers", out=arrays)
        else:
            broadcast(self.strategy, arrays, "buffers")
        self._versions = self._current_versions()


class ReplicaBuffers(ModuleBuffers):
    """Copies of a module's buffers, one per local replica; one of them is in use."""

    def __init__(
        self, module: torch.nn.Module, strategy: Strategy, mode: str | None
    ) -> None:
        super().__init__(module, strategy, mode)
        self._sets = [self._copies() for _ in strategy.local_replicas]
        # Values of the buffers when they were last equal on all replicas.
        self._common = self._copies()
        self._in_use = 0

    def _copies(self) -> list[list[torch.Tensor]]:
        return [[b.detach().clone() for b in _tensors(o)] for o in self._owners]

    def use(self, index: int) -> None:
        """Save the buffers of the replica that ran, and load those of ``index``."""
        if index != self._in_use:
            self._keep(self._in_use)
            self._in_use = index
            self._load()

    def _pairs(self, index: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs: a buffer of the module, and a replica's copy of this buffer."""
        for owner, kept in zip(self._owners, self._sets[index], strict=True):
            yield from zip(_tensors(owner), kept, strict=True)

    @torch.no_grad()
    def _keep(self, index: int) -> None:
        for buffer, own in self._pairs(index):
            own.copy_(buffer)

    @torch.no_grad()
    def _load(self) -> None:
        for buffer, own in self._pairs(self._in_use):
            buffer.copy_(own)

    def reset(self) -> None:
        """Set all replicas' copies to the module's buffers: a restore changes these."""
        if self.mode is not None:
            for index in range(len(self._sets)):
                self._keep(index)
            self._common = self._copies()

    def changed(self) -> list[bool]:
        """Return for each owner whether a replica has changed the owner's buffers."""
        if self.mode is None:
            return []
        self._keep(self._in_use)
        return [
            any(
                not torch.equal(own, common)
                for each in self._sets
                for own, common in zip(each[number], self._common[number], strict=True)
            )
            for number in range(len(self._owners))
        ]

    def synchronize(self, owners: list[int]) -> None:
        """Make the buffers of some owners equal on all replicas; collective."""
        if not owners:
            return
        self._keep(self._in_use)
        sets = [[b for index in owners for b in each[index]] for each in self._sets]
        if self.mode == "mean":
            # Buffers of integers, such as counters, keep each replica's own value.
            sets = [[b for b in each if b.is_floating_point()] for each in sets]
            parts = [[memory_of(buffer) for buffer in each] for each in sets]
            found = self.strategy.replicas.reduce_parts(ReduceOp.MEAN, parts, "buffers")
        else:
            own = [memory_of(buffer) for buffer in sets[0]]
            found = self.strategy.collectives.broadcast(own, 0, "buffers")
        for each in sets:
            for buffer, value in zip(each, found, strict=True):
                buffer.copy_(as_tensor(value))
        self._load()


def _tensors(owner: Any) -> list[torch.Tensor]:
    return [buffer for buffer in owner.values() if buffer is not None]


def broadcast(strategy: Strategy, arrays: Any, what: str) -> None:
    """Write replica 0's values into arrays; collective over the strategy's replicas."""
    received = strategy.collectives.broadcast(arrays, 0, what)
    for own, value in zip(flatten(arrays)[0], flatten(received)[0], strict=True):
        own[...] = value
