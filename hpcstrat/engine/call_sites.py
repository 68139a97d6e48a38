"""Finds the program's line of a call: not in this library, nor in one that calls it.

Loads nothing: it serves from `import hpcstrat` on.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import FrameType

__all__ = ["call_site", "is_of_program", "pass_over"]

# Folders and files whose frames are no part of the program. Functions of this library
# that are context managers or decorated by them are called out of contextlib.
_passed_over: tuple[str, ...] = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.abspath(contextlib.__file__),
)


def pass_over(folder: str) -> None:
    """Skip frames of a library that calls this one when the program's line is named."""
    global _passed_over  # noqa: PLW0603 - read in every search
    _passed_over = *_passed_over, os.path.abspath(folder) + os.sep


def is_of_program(file: str) -> bool:
    """Whether a file is the program's, and not a library's that only calls for it."""
    return not file.startswith(_passed_over)


def call_site() -> str:
    """Return file and line of the innermost frame of the program.

    Such as ``train.py:41``; empty where there is no such frame.
    """
    # Not inspect.stack(), which reads source files.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_of_program(name):
            # Without the folder, which may be another on each host.
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
