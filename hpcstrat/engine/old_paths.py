"""Import paths of version 0.1 for modules that have moved since."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["OldPaths"]

_IN_ENGINE = (
    "arrays",
    "context",
    "logs",
    "observe",
    "options",
    "reduction",
    "settings",
    "topology",
    "tree",
    "typing",
    "values",
)
_NEW = {name: f"engine.{name}" for name in _IN_ENGINE} | {
    "bench": "tools.bench",
    "chaos": "tools.chaos",
    "coordinator": "parameter_server.coordinator",
    "partitioners": "variables.partitioners",
    "preemption": "elastic.preemption",
}


class OldPaths:
    """An import finder for old module paths, which warns; see `importlib`."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return a spec that loads a moved module from its new path, or None."""
        package, _, rest = name.partition(".")
        first, *inner = rest.split(".")
        if package != "hpcstrat" or first not in _NEW:
            return None
        new = ".".join([package, _NEW[first], *inner])
        warnings.warn(
            f"the module {name} is {new} now; import that, or what the package "
            "hpcstrat itself has of it",
            DeprecationWarning,
            stacklevel=2,
        )
        return importlib.util.spec_from_loader(name, _Alias(new))


class _Alias(Loader):
    """A loader that returns the module of another path."""

    def __init__(self, new: str) -> None:
        self._new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._new)
        # The import system replaces ``module.__spec__`` next, so keep the original.
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
