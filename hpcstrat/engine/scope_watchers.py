"""Modules that watch another library in the scopes of strategies.

Such a module belongs to an integration, in a layer above the strategies. The package
registers the module's name; a scope imports the module only if the program has already
imported the library.
"""

from __future__ import annotations

import importlib
import sys
import warnings

__all__ = ["register", "watch_loaded_libraries"]

# Names of modules, by the name of the library that each watches.
_modules: dict[str, str] = {}


def register(library: str, module: str) -> None:
    """Let scopes call ``watch()`` of a module once the program has a library."""
    _modules[library] = module


def watch_loaded_libraries() -> None:
    """Call ``watch()`` of the modules whose libraries the program has imported.

    A scope calls this function at its start and at its end, while the scope's strategy
    is the current one.
    """
    for library in [name for name in _modules if name in sys.modules]:
        # Each module is called once.
        module = _modules.pop(library)
        try:
            watcher = importlib.import_module(module)
        except ImportError as error:
            # The program may have the library for other reasons.
            warnings.warn(
                f"hpcstrat does not see {library} in scopes: {error}", stacklevel=4
            )
            continue
        watcher.watch()
