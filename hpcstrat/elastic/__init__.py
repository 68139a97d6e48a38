"""Training that continues after the loss of a rank, by a spare rank or without it.

`hpcstrat.elastic.run` needs ``mpirun --with-ft ulfm`` of Open MPI 5.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcstrat.elastic.memory import Memory as Memory
    from hpcstrat.elastic.running import run as run
    from hpcstrat.elastic.watching.reports import report_progress as report_progress

__all__ = ["Memory", "report_progress", "run"]

# ``hpcstrat watch`` is in this package, and must not load NumPy.
_MODULES = {"Memory": "memory", "report_progress": "watching.reports", "run": "running"}


def __getattr__(name: str) -> Any:
    """Load and return a public name, when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'hpcstrat.elastic' has no attribute {name!r}")
    module = importlib.import_module(f"hpcstrat.elastic.{_MODULES[name]}")
    globals()[name] = value = getattr(module, name)
    return value
