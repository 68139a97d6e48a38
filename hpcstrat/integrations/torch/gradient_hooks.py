"""Hooks that combine the gradients of a replicated module.

The hooks record which parameters a backward has reached. When the backward ends, one
reduction combines gradients in place. All replicas must pass the same parameters to it,
but may have reached different ones. So the reduction combines the parameters that any
replica reached in the last step, which all replicas have on record, and it also sums a
table of the parameters that each replica has reached now. If this table shows new
parameters, a second reduction combines their gradients.

Between workers, parameters that all replicas reached in the last step are reduced in
buckets during the backward, see `hpcstrat.integrations.torch.buckets`. The sums are
written to the gradients only when the backward ends, because autograd may let a
gradient share its memory with a value that the rest of the backward needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hpcstrat.engine.channel.call_state import Position
from hpcstrat.engine.channel.channel import ClosedChannel
from hpcstrat.engine.channel.pending_calls import PendingCall
from hpcstrat.engine.context import own_index
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.tree import flatten
from hpcstrat.engine.typing import Array
from hpcstrat.integrations.torch.buckets import Bucket, Buckets, plan_buckets
from hpcstrat.integrations.torch.forward_counts import ForwardCounts, tensors_of
from hpcstrat.integrations.torch.inner_gradients import InnerGradients
from hpcstrat.integrations.torch.module_buffers import ModuleBuffers
from hpcstrat.integrations.torch.module_hooks import (
    InputHook,
    OutputHook,
    adds_to,
    input_array,
    refuse_compiled_autograd,
)
from hpcstrat.integrations.torch.module_layout import (
    ModuleLayout,
    differentiable_parameters,
)
from hpcstrat.integrations.torch.tensors import (
    as_tensor,
    gradient_of,
    memory_of,
    rows_of,
    takes_hooks,
    torchs_stream,
)
from hpcstrat.strategies import Strategy
from hpcstrat.variables.divided import Split

__all__ = ["Replicated"]

_WHAT = "gradients"
# The attribute of a parameter that refers to the `Replicated` that combines it.
_OWNER = "_hpcstrat_replicated"
# Rows of the table that each replica sends, with a column for each parameter: whether
# its gradient is dense; whether it is sparse; whether a backward has added to it after
# its bucket was reduced; its place in the order of replica 0's backward.
_DENSE, _SPARSE, _AGAIN, _ORDER = range(4)


class Replicated:
    """Hooks and state of a replicated module; its parameters refer to this object."""

    buffers_class = ModuleBuffers

    def __init__(
        self,
        module: torch.nn.Module,
        strategy: Strategy,
        op: ReduceOp,
        *,
        buffers: str | None,
        bucket_bytes: int,
        divided: Mapping[str, Split] | None = None,
    ) -> None:
        self.strategy = strategy
        self.op = op
        # How the ranks of a replica divide parameters and buffers.
        self.divided: Mapping[str, Split] = divided or {}
        self.buffers = self.buffers_class(module, strategy, buffers, self.divided)
        self.syncs = True
        # Counts backwards if there is one replica, and so no channel that counts them.
        self._alone = Position()
        self._forwards = ForwardCounts()
        # Leave out parameters whose gradients another replicated module combines.
        named = [
            (name, parameter)
            for name, parameter in differentiable_parameters(module)
            if not _is_combined_by_another(name, parameter, strategy, op)
        ]
        self._layout = ModuleLayout(module)
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        # From here on, parameters are indices into `_parameters`. Keys of `_touched`
        # are the parameters that a backward has reached and no reduction has combined
        # yet, in the backward's order; values are their tensors' versions at that time.
        self._touched: dict[int, int] = {}
        # Parameters whose gradients are combined, and so equal on all replicas.
        self._combined: set[int] = set()
        # Parameters that had a dense gradient on any replica in the last reduction.
        self._expected: list[int] = []
        # If a replica has several ranks, these combine their gradients at the end.
        self._inner: InnerGradients | None = None
        overlaps = strategy.collectives.overlaps and not strategy.logical
        if strategy.inside.size > 1:
            overlaps = False
            parts = [name for name in self._names if name in self.divided]
            self._inner = InnerGradients(strategy, named, parts, self._own_share)
        self._bucket_bytes = bucket_bytes if overlaps else 0
        # Parameters with dense gradients on all replicas in the last backward, and
        # their buckets without the last one, which could not start before the end.
        self._planned_for: list[int] = []
        self._plan: list[Bucket] = []
        # Buckets of the current backward, the parameters whose gradients already have
        # their sums from these buckets, and the arrays for the sums.
        self._buckets: Buckets | None = None
        self._taken: set[int] = set()
        self._sums: dict[int, Array] = {}
        # The callback at the end of the running backward; autograd then deletes it.
        self._end: weakref.ref[Any] | None = None
        self._handles: list[Any] = [
            module.register_forward_pre_hook(InputHook(self), prepend=True),
            module.register_forward_hook(OutputHook(self), with_kwargs=True),
        ]
        for index, parameter in enumerate(self._parameters):
            self._hook(index, parameter)
        if self._inner is not None:
            self._handles += self._inner.hooks()
        _every.add(self)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            if getattr(parameter, _OWNER, None) is self:
                delattr(parameter, _OWNER)

    def _hook(self, index: int, parameter: torch.Tensor) -> None:
        # The parameter owns this object. Hooks refer to it weakly: Python's garbage
        # collector does not see references from hooks, and would never free the object.
        setattr(parameter, _OWNER, self)
        myself = weakref.ref(self)

        def touch(_: Any) -> None:
            if (own := myself()) is not None:
                own.touch(index)

        def prepare(_: Any) -> None:
            if (own := myself()) is not None:
                own.prepare(index)

        with takes_hooks(parameter):
            self._handles.append(parameter.register_post_accumulate_grad_hook(touch))
            if self.op is ReduceOp.SUM or self._bucket_bytes or self.strategy.logical:
                self._handles.append(parameter.register_hook(prepare))

    def __reduce__(self) -> Any:
        """Pickle as an empty set, which torch.load accepts and needs no hpcstrat."""
        return set, ()

    def _counts_forwards(self) -> bool:
        """Return whether forwards are counted now.

        Not in a backward, where checkpoints of activations repeat forwards. Steps of
        logical replicas are counted by ``run``.
        """
        counts = self.syncs and torch.is_grad_enabled() and not self.strategy.logical
        return counts and not self._is_under_way()

    def enter(self, module: torch.nn.Module) -> None:
        """Count a forward that begins, and may have a backward."""
        if torch.compiler.is_compiling():
            return
        refuse_compiled_autograd()
        if self._counts_forwards():
            self._forwards.begin(module.training, self._position())

    def watch(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Register hooks on the output of a forward, to detect the start of a backward.

        Also compares the inputs of the first forwards between ranks. The output's hooks
        run in the outermost backward, before any reentrant
        checkpoint begins an inner backward. Raises ValueError if the module has new
        parameters whose gradients would not be combined.
        """
        watches = self.syncs and torch.is_grad_enabled()
        # In compiled code, `touch` registers the callback for the backward's end.
        if torch.compiler.is_compiling() or not watches:
            return
        # Logical replicas of a rank share the module: only the first checks its layout.
        if not own_index() and not self._layout.is_current():
            # A collective call, so that an error is raised on the other replicas, too.
            self.strategy.collectives.call(_WHAT, self._require_known, module)
        compared = self.strategy.module_inputs
        if compared is not None and not compared.done and module.training:
            compared.see(flatten(inputs)[0], input_array)
        seen = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        use = None
        if self._counts_forwards():
            if not seen:
                self._forwards.withdraw(module.training)
            use = self._forwards.use(module.training)

        def reach(_: Any) -> None:
            if use is not None:
                use()
            self._await_end()

        for tensor in seen:
            tensor.register_hook(reach)

    def _require_known(self, module: torch.nn.Module) -> None:
        for name, parameter in differentiable_parameters(module):
            if parameter.requires_grad and _owner_of(parameter) is None:
                raise ValueError(
                    "expected the parameters that replicate has seen, found another "
                    f"{name!r} in the module, which would train on this replica alone; "
                    "call replicate again after a change of modules or parameters, or "
                    "use no_sync if that is intended"
                )
        self._layout = ModuleLayout(module)
        self.buffers.follow(module)

    def prepare(self, index: int) -> None:
        """Prepare a parameter's gradient just before a backward adds to it."""
        buckets = self._buckets if self._is_under_way() else None
        taken = buckets is None or index in self._taken
        if buckets is not None and not taken and buckets.was_started(index):
            # This backward has reached the parameter before, in another reentrant
            # checkpoint, and its bucket is reduced: add the new gradient to that sum.
            self._parameters[index].grad = as_tensor(self._sums.pop(index))
            self._taken.add(index)
            self._touched.pop(index, None)
            self._combined.add(index)
        # Rare: `.grad` still has the combined sum of an earlier backward.
        sums = self.op is ReduceOp.SUM and index in self._combined
        if sums and adds_to(self._parameters[index]):
            self._make_share(index)

    def touch(self, index: int) -> None:
        """Record that a backward has added to a parameter's gradient."""
        self._touched.setdefault(index, self._parameters[index]._version)
        self._combined.discard(index)
        # Only the first parameter of a backward needs this call: check here for speed.
        end = self._end
        if end is None or end() is None:
            self._await_end()
        if self._inner is not None:
            self._inner.require_whole_loss()
        if self._buckets is not None:
            self._buckets.ready(index)

    def _await_end(self) -> None:
        """Register a callback that combines the gradients when this backward ends."""
        if self._is_under_way():
            return
        refuse_compiled_autograd()
        # Do not wait for the buckets of an earlier backward that ended with an error.
        self._buckets = None
        self._taken.clear()
        # The program may have set gradients to None since a backward that failed.
        for index in [i for i in self._touched if self._parameters[i].grad is None]:
            del self._touched[index]
        if not self.syncs:
            return
        # Logical replicas synchronize in a fixed order: backwards are not counted.
        first = not self.strategy.logical and not self._is_beside_another()
        trained = [p for p in self._parameters if p.requires_grad]
        if first and any(map(adds_to, trained)):
            # Headers contain this count. If a rank fails in a backward and continues
            # with the next one, its count differs, and all ranks raise an error instead
            # of summing gradients of two steps. Of several modules only one counts.
            self._position().enter_backward()
        if self._plan and first:
            self._buckets = Buckets(self._plan, self._start)

        def end() -> None:
            self._end = None
            # After torch.autograd.grad no parameter was reached: combine nothing.
            if self._touched and self.syncs:
                if not self.strategy.logical:
                    position = self._position()
                    position.enter_backward(self._forwards.take_unused(position))
                self._combine_all_ranks()
            self._buckets = None

        self._end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _position(self) -> Position:
        channel = self.strategy.collectives.channel
        return self._alone if channel is None else channel.position

    def _is_under_way(self) -> bool:
        """Return whether a backward is running whose end this object awaits."""
        # A backward that ended with an error leaves only a dead weak reference.
        return self._end is not None and self._end() is not None

    def _is_beside_another(self) -> bool:
        """Return whether another module is already handling this backward.

        Only the first module starts its buckets during the backward. Ranks reach
        parameters in different orders, so with two modules a bucket of one module could
        be summed with a bucket of the other module.
        """
        channel = self.strategy.collectives.channel
        return any(
            one is not self
            and one._is_under_way()
            and one.strategy.collectives.channel is channel
            for one in _every
        )

    def _make_share(self, index: int) -> None:
        """Zero a combined sum, except on replica 0: the next sum must count it once."""
        gradient = self._parameters[index].grad
        if index in self._combined and gradient is not None:
            if self.strategy.replica_id:
                with torch.no_grad():
                    gradient.zero_()
            self._combined.discard(index)

    def _combine_all_ranks(self) -> None:
        """Combine gradients inside of replicas that have several ranks, then of all."""

        def combine() -> None:
            if self._inner is not None:
                self._inner.combine(self._touched)
            self._combine()

        self.strategy.collectives.call(_WHAT, combine)

    @torch.no_grad()
    def _combine(self) -> None:
        """Combine the gradients of all replicas, usually with one reduction."""
        for index, version in self._touched.items():
            if self._parameters[index]._version != version:
                self._touched.clear()
                raise ValueError(
                    f"expected parameters that keep their values until backward() has "
                    f"combined the gradients, found {self._names[index]!r} changed "
                    "during it; step the optimizer after backward(), and not in hooks"
                )
        changed = self._changed_buffers()
        marks = np.concatenate([self._marks().ravel(), np.array(changed, np.int32)])
        # Gradients of divided parameters differ between the ranks of a replica.
        with self.strategy.inside.divided():
            told = self._combined_with(marks)
        changed_anywhere = np.flatnonzero(told[len(told) - len(changed) :])
        self.buffers.synchronize(changed_anywhere.tolist())

    def _changed_buffers(self) -> list[bool]:
        """Return for each group of buffers whether the replica has changed it."""
        changed = self.buffers.changed()
        return changed if self._inner is None else self._inner.any(changed)

    def _combined_with(self, marks: Array) -> Array:
        """Combine gradients, and return the sum of the table ``marks``."""
        if self._buckets is None:
            told = self._reduce(self._expected, marks)()
        else:
            told = self._finish(self._buckets, marks)
        size = 4 * len(self._parameters)
        rows = told[:size].reshape(4, -1)
        dense, sparse, again = (np.flatnonzero(row).tolist() for row in rows[:3])
        self._refuse_mixed(dense, sparse)
        if self._buckets is not None:
            for index in dense:
                self._take_sums(self._buckets, index)
        if missing := sorted({*dense} - {*self._expected} | {*again}):
            self._reduce(missing)()
        for index in sparse:
            self._reduce_rows(index)
        self._touched.clear()
        self._combined.update(self._expected, dense, sparse)
        self._expected = dense
        self._replan(rows)
        return told

    def _marks(self) -> Array:
        """Return this replica's table of the parameters that its backward reached."""
        marks = np.zeros((4, len(self._parameters)), np.int32)
        touched = list(self._touched)
        sparse = [index for index in touched if self._is_sparse(index)]
        marks[_DENSE, touched] = 1
        marks[_DENSE, sparse] = 0
        marks[_SPARSE, sparse] = 1
        if self._bucket_bytes:
            taken = list(self._taken)
            marks[_DENSE, taken] = 1
            marks[_AGAIN, [i for i in taken if i in self._touched]] = 1
            if self.strategy.writes:
                marks[_ORDER, touched] = range(1, len(touched) + 1)
        return marks

    def _finish(self, buckets: Buckets, marks: Array) -> Array:
        """Start the last reductions; copy sums to gradients; return summed marks."""
        buckets.start_rest()
        rest = [index for index in self._expected if index not in buckets]
        last = self._reduce(rest, marks, waits=False)
        for bucket in buckets.ended():
            for index in bucket:
                gradient = self._parameters[index].grad
                # If there is no gradient here, only the table, which the last reduction
                # sums, shows whether another replica has one.
                if gradient is not None and not gradient.is_sparse:
                    self._take_sums(buckets, index)
                    buckets.drive()
        return last()

    def _take_sums(self, buckets: Buckets, index: int) -> None:
        """Write a parameter's sum from a bucket into its gradient, if not yet done."""
        if index not in buckets or index in self._taken:
            return
        parameter = self._parameters[index]
        if parameter.grad is None:
            parameter.grad = as_tensor(self._sums.pop(index))
        else:
            parameter.grad.copy_(as_tensor(self._sums[index]))
        self._taken.add(index)
        self._combined.add(index)

    def _replan(self, rows: Array) -> None:
        """Plan the next backward's buckets, of parameters that all replicas reached."""
        if not self._bucket_bytes:
            return
        by_all = 1 if self.op is ReduceOp.MEAN else self.strategy.num_replicas_in_sync
        found = np.flatnonzero(rows[_DENSE] == by_all).tolist()
        if found == self._planned_for:
            return
        self._planned_for, self._plan = found, []
        self._sums.clear()
        if all(self._parameters[index].device.type == "cpu" for index in found):
            nbytes = [p.numel() * p.element_size() for p in self._parameters]
            order = sorted(found, key=rows[_ORDER].tolist().__getitem__)
            self._plan = plan_buckets(order, nbytes, self._bucket_bytes)[:-1]

    def _start(self, bucket: Bucket) -> PendingCall:
        """Start the reduction of a bucket, during the backward or at its end."""
        return self.strategy.collectives.call(_WHAT, self._begin, bucket)

    @torch.no_grad()
    def _begin(self, bucket: Bucket) -> PendingCall:
        arrays = [memory_of(self._own_share(index)) for index in bucket]
        for index, array in zip(bucket, arrays, strict=True):
            kept = self._sums.get(index)
            # The program may have changed the parameter's type or shape after a step.
            if kept is None or (kept.shape, kept.dtype) != (array.shape, array.dtype):
                self._sums[index] = np.empty(array.shape, array.dtype)
        outs = [self._sums[index] for index in bucket]
        start = self.strategy.collectives.start_in_call
        # Ranks compare this name. It contains the bucket's number, so that they never
        # sum different buckets after an error on one replica.
        what = f"{_WHAT}, bucket {self._plan.index(bucket)}"
        return start(self.op, arrays, what, out=outs, in_pass=True)

    @torchs_stream()
    def _reduce(
        self, indices: list[int], marks: Array | None = None, *, waits: bool = True
    ) -> Callable[[], Array]:
        """Reduce the parameters' dense gradients in place, and the table ``marks``.

        ``indices`` must be the same on all replicas. Returns a function that returns
        the combined table; with ``waits=False``, that function waits for the reduction.
        """
        tensors = [self._own_share(index) for index in indices]
        arrays = [memory_of(tensor) for tensor in tensors]
        outs, told = list(arrays), np.empty(0)
        if marks is not None:
            # The table is summed exactly, even if gradients are sent in 2-byte types.
            kind = np.float64 if self.op is ReduceOp.MEAN else np.int32
            told = np.empty(marks.shape, kind)
            arrays, outs = [*arrays, marks], [*outs, told]
        collectives, started = self.strategy.collectives, None
        if waits:
            collectives.batch_reduce(self.op, arrays, _WHAT, out=outs)
        else:
            started = collectives.start_reduce(
                self.op, arrays, _WHAT, out=outs, in_pass=True
            )

        @torchs_stream()
        def end() -> Array:
            if started is not None:
                started.wait()
            for index, tensor in zip(indices, tensors, strict=True):
                parameter = self._parameters[index]
                if parameter.grad is None and (marks is None or told[index]):
                    parameter.grad = tensor
            return told

        return end

    def _own_share(self, index: int) -> torch.Tensor:
        """Return this replica's term of a parameter's sum: its gradient, or zeros."""
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            return torch.zeros_like(parameter)
        if self.op is ReduceOp.SUM:
            self._make_share(index)
        return gradient

    def _is_sparse(self, index: int) -> bool:
        gradient = self._parameters[index].grad
        return gradient is not None and gradient.is_sparse

    def _refuse_mixed(self, dense: list[int], sparse: list[int]) -> None:
        """Raise ValueError if a gradient is dense on one replica, sparse on another."""
        if both := sorted({*dense} & {*sparse}):
            raise ValueError(
                f"expected gradients of {self._names[both[0]]!r} of one kind on all "
                "replicas, found dense and sparse ones; pass the same sparse= to its "
                "module on all replicas"
            )

    @torchs_stream()
    def _reduce_rows(self, index: int) -> None:
        """Combine the sparse gradients of a parameter over all replicas."""
        parameter = self._parameters[index]
        if self.op is ReduceOp.SUM:
            self._make_share(index)
        rows = rows_of(parameter.grad, parameter, self._names[index])
        rows = self.strategy.collectives.batch_reduce(self.op, rows, _WHAT)
        parameter.grad = gradient_of(rows, parameter)


def _owner_of(parameter: Any) -> Replicated | None:
    """Return the object that combines a parameter's gradients, or None."""
    # A parameter that was loaded from a file has an empty set as this attribute.
    owner = getattr(parameter, _OWNER, None)
    return owner if isinstance(owner, Replicated) else None


def _is_combined_by_another(
    name: str, parameter: Any, strategy: Strategy, op: ReduceOp
) -> bool:
    """Return whether another replicated module combines this parameter's gradients.

    Raises ValueError if the other module has another strategy or another operation.
    """
    owner = _owner_of(parameter)
    if owner is None or isinstance(owner.strategy.collectives.channel, ClosedChannel):
        return False
    if owner.strategy is not strategy or owner.op is not op:
        raise ValueError(
            f"expected op={owner.op.name} and the strategy of the replicated module "
            f"that has {name!r}, too, found {op.name} on {strategy!r}; give both the "
            "same"
        )
    return True


_every: weakref.WeakSet[Replicated] = weakref.WeakSet()
