"""Optimizers whose steps use the combined gradients of all ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hpcstrat.integrations.horovod.torch.basics import (
    global_process_set,
    require_all_ranks,
)
from hpcstrat.integrations.horovod.torch.compression import Compression
from hpcstrat.integrations.horovod.torch.horovod_calls import (
    Operation,
    allreduce,
    allreduce_async_,
    require_known,
    sparse_allreduce_async,
    synchronize,
)
from hpcstrat.integrations.torch.tensors import takes_hooks

__all__ = ["DistributedOptimizer"]


class _DistributedOptimizer:
    """The methods that a distributed optimizer adds to the optimizer's own class."""

    # An attribute that the optimizer's own class defines.
    param_groups: list[dict[str, Any]]

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: dict[str, torch.Tensor] | None,
        **options: Any,
    ) -> None:
        """Copy the attributes of an optimizer, and add hooks to its parameters."""
        # Do not copy the attribute `step`, because a scheduler may have replaced it
        # with a function that calls the old optimizer.
        vars(self).update({k: v for k, v in vars(optimizer).items() if k != "step"})
        self.backward_passes_per_step = options["passes"]
        self._compression = options["compression"]
        self._op, self._predivide = options["op"], options["predivide"]
        self._sparse_as_dense = options["sparse_as_dense"]
        self._parameter_names: dict[torch.Tensor, str] = {}
        # Number of backward passes that have added to each parameter's gradient.
        self._passes: dict[torch.Tensor, int] = {}
        # For each parameter, the function that waits for its combined gradient.
        self._finishes: dict[torch.Tensor, Callable[[], None]] = {}
        self._synchronized, self._synchronizes = False, True
        self._hook(None if named is None else {p: name for name, p in named.items()})

    def _hook(self, names: dict[torch.Tensor, str] | None = None) -> None:
        """Add hooks to the parameters that have none yet."""
        # Hooks refer to this object weakly, because the garbage collector does not see
        # references from torch's hooks and would never free the object.
        myself = weakref.ref(self)

        def reach(parameter: torch.Tensor) -> None:
            if (own := myself()) is not None:
                own._reach(parameter)

        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter in self._parameter_names:
                    continue
                unnamed = f"allreduce.noname.{number}.{place}"
                self._parameter_names[parameter] = (
                    unnamed if names is None else names[parameter]
                )
                if parameter.is_floating_point() or parameter.is_complex():
                    with takes_hooks(parameter):
                        parameter.register_post_accumulate_grad_hook(reach)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group of parameters, which must be the same on all ranks."""
        super().add_param_group(group)  # type: ignore[misc]
        self._hook()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before a gradient is reduced."""
        self.backward_passes_per_step = passes
        self._passes.clear()

    def _reach(self, parameter: torch.Tensor) -> None:
        """Count a parameter's backward pass; after the last, submit its gradient."""
        if parameter in self._finishes:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times "
                "before call to step(). Increase backward_passes_per_step to "
                "accumulate gradients locally."
            )
        passes = self._passes[parameter] = self._passes.get(parameter, 0) + 1
        if passes == self.backward_passes_per_step:
            self._submit(parameter)

    def _submit(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            # Another rank may have used this parameter, and waits for this rank's part.
            parameter.grad = torch.zeros_like(parameter)
        gradient, name = parameter.grad, self._parameter_names[parameter]
        sparse = gradient.is_sparse
        if sparse and not self._sparse_as_dense:
            total = sparse_allreduce_async(gradient, name, self._op)

            def finish() -> None:
                parameter.grad = total()

        else:
            dense = gradient.to_dense() if sparse else gradient
            wire, context = self._compression.compress(dense)
            handle = allreduce_async_(
                wire,
                name=name,
                op=self._op,
                prescale_factor=1 / self._predivide,
                postscale_factor=self._predivide,
            )

            def finish() -> None:
                reduced = self._compression.decompress(synchronize(handle), context)
                if sparse:
                    parameter.grad = reduced.to_sparse(gradient.sparse_dim())
                elif reduced is not gradient:
                    gradient.copy_(reduced)

        self._finishes[parameter] = finish

    def synchronize(self) -> None:
        """Wait for the combined gradients of all ranks; collective over the ranks."""
        for parameter in self._parameter_names:
            # This rank's loss does not use the parameter: submit its gradient as zeros.
            if parameter.requires_grad and parameter not in self._finishes:
                self._submit(parameter)
        try:
            # All gradients are submitted now, so the first wait reduces them together.
            for finish in self._finishes.values():
                finish()
        finally:
            self._finishes.clear()
            self._passes.clear()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` use the gradients as they are, without another `synchronize`."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Any = None) -> Any:
        """Wait for the combined gradients, then make a step; collective over ranks.

        The gradients of a closure are combined whenever the optimizer calls it, and so
        is its loss, because an optimizer such as LBFGS decides by the loss how often it
        calls the closure, and all ranks must decide alike.
        """
        if closure is not None:
            if not self._synchronizes:
                raise ValueError(
                    "expected step() without a closure inside of skip_synchronize(), "
                    "found a closure, whose gradients must be combined; call "
                    "step(closure) outside of skip_synchronize()"
                )
            closure = self._combined(closure)
        elif self._synchronizes:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() "
                    "context after optimizer.synchronize(). This can cause training "
                    "slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use "
                    "optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        try:
            return super().step(closure)  # type: ignore[misc]
        finally:
            self._synchronized = False

    def _combined(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that combines the gradients and the loss of a closure."""

        def combined() -> Any:
            loss = closure()
            self.synchronize()
            if loss is None:
                return None
            is_tensor = isinstance(loss, torch.Tensor)
            own = loss.detach() if is_tensor else torch.tensor(float(loss)).double()
            op = Operation.Sum if self._op is Operation.Sum else Operation.Average
            total = allreduce(own, name="loss of a closure", op=op)
            return total if is_tensor else total.item()

        return combined

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Reset the gradients to zero or None."""
        if self._finishes:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it "
                "can cause a race condition."
            )
        super().zero_grad(*args, **options)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **options: Any) -> None:
        """Load a state, and reset the counts of backward passes."""
        self._finishes.clear()
        self._passes.clear()
        self._synchronized, self._synchronizes = False, True
        super().load_state_dict(*args, **options)  # type: ignore[misc]


def _checked_names(optimizer: torch.optim.Optimizer, named: Any) -> Any:
    """Return ``named`` as a dict; ValueError if a parameter has no name in it."""
    named = list(named)
    if not all(isinstance(each, tuple) for each in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), "
            "usually produced by model.named_parameters()."
        )
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            + ", ".join(twice)
        )
    known = {id(parameter) for _, parameter in named}
    groups = optimizer.param_groups
    if unnamed := [
        f"{number}.{place}"
        for number, group in enumerate(groups)
        for place, parameter in enumerate(group["params"])
        if id(parameter) not in known
    ]:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not "
            f"named. Group and place of each: {', '.join(unnamed)}"
        )
    return dict(named)


def DistributedOptimizer(  # noqa: N802, PLR0917 - Horovod's name and order
    optimizer: torch.optim.Optimizer,
    named_parameters: Any = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Operation = Operation.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,  # noqa: ARG001
    groups: Any = None,  # noqa: ARG001
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Return an optimizer whose steps use the combined gradients of all ranks.

    Not collective; its ``step`` and ``synchronize`` are collective over all ranks.

    All gradients are reduced together, when a step waits for them. A rank that does not
    use a parameter contributes zeros as its gradient. Parameters that require no
    gradients at a step are not reduced.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        An optimizer; the new optimizer shares its parameters, options and state.
    named_parameters : iterable of tuple of str and tensor, optional
        Names for all parameters of the optimizer, the same on all ranks; default: their
        positions. Names are required if two optimizers are used at the same time.
    compression : object
        ``hvd.Compression.none`` or ``fp16``, or a class with the same two methods.
    backward_passes_per_step : int
        Number of backward passes that add to a gradient before it is reduced.
    op : operation
        ``hvd.Average``, ``hvd.Sum``, ``hvd.Min``, ``hvd.Max`` or ``hvd.Product``.
    gradient_predivide_factor : float
        Gradients are divided by this number before the sum, and multiplied by it after
        the sum.
    num_groups, groups : object, optional
        Not used: all gradients are reduced together.
    sparse_as_dense : bool
        Whether sparse gradients are reduced as dense ones. If not, the sparse gradients
        of all ranks are gathered; a parameter's gradient must then be sparse on all
        ranks or on none.
    process_set : object, optional
        Must be the global process set; any other raises NotImplementedError.

    Returns
    -------
    torch.optim.Optimizer
        An instance of a subclass of the optimizer's own class, with the methods
        ``synchronize``, ``skip_synchronize`` and ``set_backward_passes_per_step``.
    """
    require_all_ranks(process_set)
    require_known(op)
    if gradient_predivide_factor != 1.0 and op is not Operation.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    named = named_parameters
    if named is not None:
        named = _checked_names(optimizer, named)
    kind = type(optimizer)
    # Schedulers require an Optimizer, so make a subclass of the optimizer's own class,
    # with the same name as in Horovod.
    distributed: Any = type(kind.__name__, (_DistributedOptimizer, kind), {})
    return distributed(
        optimizer,
        named,
        passes=backward_passes_per_step,
        compression=compression,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
    )
