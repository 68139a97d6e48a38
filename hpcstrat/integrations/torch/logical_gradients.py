"""Gradients of logical replicas, which share one module on each rank.

The logical replicas of a rank run in turn inside ``Strategy.run``. At the end of a
replica's backward its gradients are moved out of the parameters and added to the
gradients of earlier replicas, in a fixed order. Then the next replica runs. After the
last replica the sums are stored in ``.grad``. Buffers, such as running means, and
PyTorch's random generator are switched to the state of the replica that runs.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hpcstrat.engine.context import own_index, pop, push
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.integrations.torch.gradient_hooks import Replicated
from hpcstrat.integrations.torch.module_buffers import ReplicaBuffers
from hpcstrat.integrations.torch.module_hooks import adds_to
from hpcstrat.integrations.torch.tensors import (
    as_tensor,
    gradient_of,
    memory_of,
    rows_of,
)
from hpcstrat.randomness import RandomStreams
from hpcstrat.strategies import Strategy

__all__ = ["LogicalReplicated", "streams_of"]

_WHAT = "gradients"


class LogicalReplicated(Replicated):
    """The state of a module that the logical replicas of a rank share."""

    buffers: ReplicaBuffers
    buffers_class = ReplicaBuffers

    def __init__(
        self, module: torch.nn.Module, strategy: Strategy, op: ReduceOp, **options: Any
    ) -> None:
        super().__init__(module, strategy, op, **options)
        # Gradients that parameters had before the backward; new sums are added to them.
        self._before: dict[int, torch.Tensor] = {}
        # Partial sums of the dense gradients of this rank's replicas by parameter, with
        # 2-byte types as float32; and the sparse gradients of each replica.
        self._stack: list[dict[int, torch.Tensor]] = []
        self._sparse: list[dict[int, torch.Tensor]] = []
        _turns_of(strategy).modules.add(self)

    def prepare(self, index: int) -> None:
        """Save an earlier gradient, so that ``.grad`` gets only this replica's."""
        if own_index() is None and adds_to(self._parameters[index]):
            raise RuntimeError(
                "expected backward() in the function that strategy.run runs, with "
                "logical replicas, found it outside; compute the loss of each replica "
                "inside, and step the optimizer after run"
            )
        if index not in self._touched and adds_to(self._parameters[index]):
            self._set_aside(index)

    def _set_aside(self, index: int) -> None:
        parameter = self._parameters[index]
        if parameter.grad is not None:
            self._before[index] = parameter.grad
            parameter.grad = None

    def _own_share(self, index: int) -> torch.Tensor:
        """Return this rank's gradient of the replica that runs, or zeros."""
        if index not in self._touched:
            self._set_aside(index)
        gradient: torch.Tensor | None = self._parameters[index].grad
        return self._zeros(index) if gradient is None else gradient

    @torch.no_grad()
    def _combine(self) -> None:
        place, strategy = own_index() or 0, self.strategy
        if place == 0:
            self._stack, self._sparse = [], []
        dense: dict[int, torch.Tensor] = {}
        sparse: dict[int, torch.Tensor] = {}
        for index in self._touched:
            parameter = self._parameters[index]
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if gradient.is_sparse:
                sparse[index] = gradient
            else:
                dense[index] = _addable(gradient)
        self._touched.clear()
        self._stack.append(dense)
        self._sparse.append(sparse)
        # Add now, while the gradients are in a CPU cache, and to free their memory.
        for _ in range(strategy.replicas.merges[place]):
            upper = self._stack.pop()
            _add(self._stack[-1], upper)

        def act(given: list[None]) -> list[None]:
            # A collective call, so that an error is raised on the other ranks, too.
            strategy.collectives.call(_WHAT, self._combine_all)
            return given

        if strategy.meetings is not None:
            strategy.meetings.meet(_WHAT, act, None)
            return
        token = push(strategy.cross_context)
        try:
            act([None])
        finally:
            pop(token)

    @torch.no_grad()
    def _combine_all(self) -> None:
        """Sum the gradients of all replicas; called once on each rank."""
        sums, self._stack = self._stack, []
        rows, self._sparse = self._sparse, []
        count = len(self._parameters)
        changed = self._changed_buffers()
        marks = np.zeros(2 * count + len(changed), np.int32)
        marks[[index for one in sums for index in one]] = 1
        marks[[count + index for one in rows for index in one]] = 1
        marks[2 * count :] = changed
        # Gradients of divided parameters differ between the ranks of a replica.
        with self.strategy.inside.divided():
            told = self._combine_ranks(marks, sums, rows)
        self.buffers.synchronize(np.flatnonzero(told[2 * count :]).tolist())

    def _combine_ranks(
        self,
        marks: Array,
        sums: list[dict[int, torch.Tensor]],
        rows: list[dict[int, torch.Tensor]],
    ) -> Array:
        """Combine this rank's gradients, and return the sum of the table ``marks``."""
        count = len(self._parameters)
        # First sum parameters that had gradients in the last step, a list that is equal
        # on all ranks, and then parameters that are new in this step.
        *totals, told = self._summed(self._expected, sums, marks)
        dense, sparse = (
            np.flatnonzero(row).tolist() for row in told[: 2 * count].reshape(2, -1)
        )
        self._refuse_mixed(dense, sparse)
        found = dict(zip(self._expected, totals, strict=True))
        missing = sorted({*dense} - {*self._expected})
        if missing:
            found.update(zip(missing, self._summed(missing, sums), strict=True))
        for index in dense:
            self._give(index, as_tensor(found[index]))
        for index in sparse:
            self._add_rows(index, [own.get(index) for own in rows])
        for index, before in self._before.items():
            # No replica has reached this parameter: restore its earlier gradient.
            if self._parameters[index].grad is None:
                self._parameters[index].grad = before
        self._before.clear()
        self._expected = dense
        return told

    def _summed(
        self,
        indices: list[int],
        sums: list[dict[int, torch.Tensor]],
        marks: Array | None = None,
    ) -> list[Array]:
        """Return sums of dense gradients over all ranks, and the sum of ``marks``."""
        parts = [
            [memory_of(one[i] if i in one else self._zeros(i)) for i in indices]
            for one in sums
        ]
        if marks is not None:
            for number, arrays in enumerate(parts):
                arrays.append(np.zeros_like(marks) if number else marks)
        found: list[Array] = self.strategy.replicas.reduce_parts(
            self.op, parts, _WHAT, are_roots=True
        )
        return found

    def _zeros(self, index: int) -> torch.Tensor:
        return _addable(torch.zeros_like(self._parameters[index]))

    def _give(self, index: int, total: torch.Tensor) -> None:
        parameter = self._parameters[index]
        # If no replica of this rank reached the parameter, `.grad` has the earlier one.
        before = self._before.get(index, parameter.grad)
        total = total.to(parameter.dtype)
        parameter.grad = total if before is None else before + total

    def _add_rows(self, index: int, given: list[torch.Tensor | None]) -> None:
        """Combine the rows of one parameter's sparse gradients over all replicas."""
        parameter, name = self._parameters[index], self._names[index]
        parts = [rows_of(gradient, parameter, name) for gradient in given]
        rows = self.strategy.replicas.reduce_parts(self.op, parts, _WHAT)
        self._give(index, gradient_of(rows, parameter))


def _addable(gradient: torch.Tensor) -> torch.Tensor:
    """Return a dense gradient that may be overwritten; 2-byte types become float32."""
    if gradient.requires_grad:
        # A backward with create_graph may still need the unchanged gradient.
        gradient = gradient.detach().clone()
    if gradient.dtype in (torch.float16, torch.bfloat16):
        gradient = gradient.float()
    return gradient


def _add(sums: dict[int, torch.Tensor], others: dict[int, torch.Tensor]) -> None:
    """Add ``others`` to ``sums`` by parameter; a missing gradient counts as zeros."""
    both = [index for index in sums if index in others]
    if both:
        torch._foreach_add_([sums[i] for i in both], [others[i] for i in both])
    # Adding zero turns -0.0 into 0.0, as a sum with a zero gradient would.
    for index in sums.keys() - others.keys():
        sums[index].add_(0)
    for index in others.keys() - sums.keys():
        sums[index] = others[index].add_(0)


class _TorchReplicaState:
    """Switches torch's random state, modes and buffers to the replica that runs."""

    def __init__(self, strategy: Strategy) -> None:
        self.modules: weakref.WeakSet[LogicalReplicated] = weakref.WeakSet()
        # These streams draw a seed for each replica in each run; checkpoints save them.
        seed = strategy.broadcast_object(torch.initial_seed()) % (1 << 63)
        self.streams = strategy.random("hpcstrat.torch", seed=seed)
        count = len(strategy.local_replicas)
        self._states: list[Any] = [None] * count
        self._seeds: list[int] = []
        # Generator states of the callers of `run`; one run may be inside of another.
        self._outside: list[Any] = []
        self._modes: tuple[Any, ...] = ()

    def start(self) -> None:
        """Draw seeds, and save the caller's state, at the start of a run."""
        self._outside.append(torch.get_rng_state())
        enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        autocast = [(name, enabled(name), dtype(name)) for name in ("cpu", "cuda")]
        self._modes = torch.is_grad_enabled(), autocast
        # Drawing all seeds here is faster than drawing in each replica's thread.
        self._seeds = [
            int(self.streams.generator_of(index).integers(1 << 63))
            for index in range(len(self._states))
        ]
        for module in self.modules:
            module.buffers.use(0)
            module.buffers.reset()

    def begin(self, index: int) -> None:
        """Set a replica's seed and buffers, and the caller's modes, before it runs."""
        torch.set_grad_enabled(self._modes[0])
        for device, enabled, dtype in self._modes[1]:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        # `torch.manual_seed` would be slower, because it tries all kinds of devices.
        seed = self._seeds[index]
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
        for module in self.modules:
            module.buffers.use(index)

    def pause(self, index: int) -> None:
        """Save this replica's generator state before other replicas run."""
        self._states[index] = torch.get_rng_state()

    def resume(self, index: int) -> None:
        """Restore this replica's generator state and buffers before it runs again."""
        torch.set_rng_state(self._states[index])
        for module in self.modules:
            module.buffers.use(index)

    def end(self) -> None:
        """Restore the caller's random state at the end of a run."""
        torch.set_rng_state(self._outside.pop())
        for module in self.modules:
            module.buffers.use(0)


# For each optimizer: the gradients that are hidden from its current step.
_hidden: weakref.WeakKeyDictionary[Any, list[tuple[Any, Any]]]
_hidden = weakref.WeakKeyDictionary()


def _before_step(optimizer: Any, *_: Any) -> None:
    """Hide the gradients from an optimizer's step, except on a rank's first replica.

    The replicas of a rank share parameters, so only the first replica's step may change
    them.
    """
    if own_index():
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        _hidden[optimizer] = [(parameter, parameter.grad) for parameter in owned]
        for parameter in owned:
            parameter.grad = None


def _after_step(optimizer: Any, *_: Any) -> None:
    for parameter, gradient in _hidden.pop(optimizer, ()):
        parameter.grad = gradient


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)

_every: weakref.WeakKeyDictionary[Any, _TorchReplicaState] = weakref.WeakKeyDictionary()


def _turns_of(strategy: Strategy) -> _TorchReplicaState:
    """Return the `_TorchReplicaState` of a strategy; make it at the first call."""
    found = _every.get(strategy)
    if found is None:
        found = _every[strategy] = _TorchReplicaState(strategy)
        strategy.replicas.listeners.append(found)
    return found


def streams_of(strategy: Strategy) -> RandomStreams | None:
    """Return the random streams that seed PyTorch in each run, for checkpoints."""
    found = _every.get(strategy)
    return None if found is None else found.streams
