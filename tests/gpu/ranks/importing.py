"""An importer that replaces modules such as ``numpy`` in the rank tests."""

from __future__ import annotations

import builtins
import importlib.abc
import sys
from collections.abc import Callable, Collection, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["Importer"]

_PACKAGE = "tests.mpi.ranks."


class _Loader(importlib.abc.Loader):
    """A loader that gives each module its own builtins, with another ``__import__``."""

    def __init__(self, loader: Any, importer: Importer) -> None:
        self._loader = loader
        self._importer = importer

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module with the original loader."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Execute a module, whose imports and functions find the replacements."""
        instead = self._importer.instead

        def find(name: str, *args: Any, **kwargs: Any) -> ModuleType:
            if name in instead:
                return instead[name]
            return builtins.__import__(name, *args, **kwargs)

        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": find}
        self._loader.exec_module(module)
        self._importer.done(module)


class Importer(importlib.abc.MetaPathFinder):
    """Finds the rank tests and their helpers, whose imports get ``instead`` of modules.

    ``done`` is called with each of these modules after its import.
    """

    def __init__(
        self,
        helpers: Collection[str],
        instead: Mapping[str, ModuleType],
        done: Callable[[ModuleType], None],
    ) -> None:
        self._helpers = helpers
        self.instead = instead
        self.done = done

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the other finders, with another loader."""
        last = name.rpartition(".")[2]
        wanted = last.startswith("check_") or last in self._helpers
        if not name.startswith(_PACKAGE) or not wanted:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = _Loader(spec.loader, self)
                return spec
        return None
