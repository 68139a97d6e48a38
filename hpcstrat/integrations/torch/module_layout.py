"""The tree of a module: its parameters and the modules inside it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

__all__ = ["ModuleLayout", "differentiable_parameters"]


class ModuleLayout:
    """A record of a module's parameters and submodules, which detects replacements."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._seen = [(weakref.ref(one), _identities(one)) for one in module.modules()]

    def is_current(self) -> bool:
        """Return whether all modules still have the same parameters and submodules."""
        for found, identities in self._seen:
            one = found()
            if one is None or _identities(one) != identities:
                return False
        return True


def _identities(module: torch.nn.Module) -> tuple[int, ...]:
    parameters, modules = module._parameters, module._modules
    return (*map(id, parameters.values()), len(parameters), *map(id, modules.values()))


def differentiable_parameters(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return the parameters that can have gradients: floating and complex ones."""
    return [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() or parameter.is_complex()
    ]
