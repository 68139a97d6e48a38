"""Hooks of a replicated module's forward, and functions that they use."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.typing import Array
from hpcstrat.integrations.torch.host_tensors import HostTensors

__all__ = [
    "InputHook",
    "OutputHook",
    "adds_to",
    "input_array",
    "refuse_compiled_autograd",
]


def adds_to(parameter: torch.Tensor) -> bool:
    """Return whether the running backward adds to a parameter's gradient.

    ``torch.autograd.grad`` calls the same hooks, but adds to no gradient.
    """
    # Before torch 2.5, this call fails where gradients are off, as in a backward.
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # torch raises this error inside of `torch.autograd.grad`.
        return False


def refuse_compiled_autograd() -> None:
    """Raise NotImplementedError if torch's compiled autograd runs the backward.

    Its graph of a backward has no hook at the end, and no way to ask, in the hook of a
    parameter, whether the backward adds to the parameter's gradient.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is None:
        return
    config = sys.modules["torch._dynamo.config"]
    if compiled.compiled_autograd_enabled or config.compiled_autograd:
        raise NotImplementedError(
            "expected a backward that torch's autograd engine runs, found compiled "
            "autograd; leave torch._dynamo.config.compiled_autograd at False, and "
            "compile the module alone"
        )


def input_array(leaf: Any) -> Array | None:
    """Return a tensor's values in host memory; None if they cannot be read now."""
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
        return None
    if torch.jit.is_tracing() or leaf.device.type not in ("cpu", "cuda"):
        return None
    # A copy to the host would end the recording of a CUDA graph with an error.
    if leaf.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    return HostTensors().read(leaf)


class _Hook:
    """A hook of a replicated module, which its copies and saved files do not have.

    In a saved file, a function of Python's standard library that does nothing takes its
    place, so that a saved module can be loaded without hpcstrat.
    """

    def __init__(self, replicated: Any) -> None:
        self._replicated = replicated

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a hook without the replicated module."""
        return type(self)(None)

    def __reduce__(self) -> Any:
        # This method takes any arguments and returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")


class InputHook(_Hook):
    """Hook before a module's forward; in a copy of the module it does nothing."""

    def __call__(self, module: Any, _inputs: Any) -> None:
        if self._replicated is not None:
            self._replicated.enter(module)


class OutputHook(_Hook):
    """Hook after a module's forward; in a copy of the module it only logs a warning."""

    _said = False

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self._replicated is not None:
            self._replicated.watch(module, (args, kwargs), output)
        elif not self._said and module.training and torch.is_grad_enabled():
            self._said = True
            get_logger("integrations.torch").warning(
                "a copy of a replicated %s trains on this replica alone; give it to "
                "replicate, too, or compute with it under torch.no_grad()",
                type(module).__name__,
            )
