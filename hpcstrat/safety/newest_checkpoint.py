"""The last line of a job that ends early: its newest checkpoint, and the folder.

Replica 0 stores the line in memory that the ranks of its host share. The first of these
ranks that ends by SIGTERM or an error prints it. At that time, no rank looks into the
folder, which may be slow, and none waits for another. Without the compiled module,
there is no such line.
"""

from __future__ import annotations

import mmap
import os
from types import ModuleType

from hpcstrat.engine.native import load_last_line
from hpcstrat.safety import uncaught
from hpcstrat.safety.presence import own_registry

__all__ = ["prepare", "tell"]


class _Printer:
    """The module that prints the line, and the process that has prepared it."""

    module: ModuleType | None = None
    process = 0


def prepare() -> None:
    """Print the newest checkpoint if this process ends early; later calls do nothing.

    Not collective, but each rank calls this.
    """
    if _Printer.process == os.getpid():
        return
    _Printer.process = os.getpid()
    _Printer.module = load_last_line()
    if _Printer.module is None:
        return
    registry = own_registry()
    shared = None if registry is None else registry.shared_memory()
    _Printer.module.prepare(mmap.mmap(-1, mmap.PAGESIZE) if shared is None else shared)
    uncaught.at_end(_Printer.module.print_line)


def tell(path: str) -> None:
    """Set the newest checkpoint of the job; call this on replica 0, in any thread."""
    if _Printer.module is not None and _Printer.process == os.getpid():
        folder, name = os.path.split(path)
        text = f"hpcstrat: the newest checkpoint is {name} in {folder}\n"
        _Printer.module.set_line(text.encode(errors="replace"))
