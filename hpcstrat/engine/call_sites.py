"""Search for the line of the program from which a call was made.

Frames of this library, and of libraries that call it, are skipped. The module imports
nothing of hpcstrat, so that it can be used from the start of `import hpcstrat`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import FrameType

__all__ = ["call_site", "is_of_program", "pass_over"]

# Folders and files whose frames are not the program's. contextlib is among them,
# because it calls this library's context managers, and functions that they decorate.
_passed_over: tuple[str, ...] = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.abspath(contextlib.__file__),
)


def pass_over(folder: str) -> None:
    """Skip frames of files in ``folder``, which is a library that calls hpcstrat."""
    global _passed_over  # noqa: PLW0603 - read in every search
    _passed_over = *_passed_over, os.path.abspath(folder) + os.sep


def is_of_program(file: str) -> bool:
    """Return whether a file is the program's, and not of a library that is skipped."""
    return not file.startswith(_passed_over)


def call_site() -> str:
    """Return file and line of the innermost frame of the program.

    The text is, for example, ``train.py:41``; it is "" if no frame is the program's.
    """
    # Do not use inspect.stack(), which reads source files.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_of_program(name):
            # Leave out the folder, which may differ between hosts.
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
