"""The marker file of finished work.

The launcher's exit status does not show success: with ULFM, it was 0 even after the
loss of all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

__all__ = ["remove_marker", "write_marker"]


def remove_marker(path: str | os.PathLike[str] | None) -> None:
    """Remove an earlier run's marker file, if there is one; call this on one rank."""
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def write_marker(path: str | os.PathLike[str] | None, told: dict[str, Any]) -> None:
    """Write the marker file of finished work, and flush it to the disk.

    Call this on one rank. Without a path, do nothing. The file has ``told`` and a time.
    """
    if path is None:
        return
    whole = os.path.abspath(os.fspath(path))
    temporary = f"{whole}.{os.getpid()}"
    text = json.dumps({"finished_unix_seconds": time.time(), **told})
    with open(temporary, "w", encoding="ascii") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    # Rename the complete file, so that a watching program never reads half of it.
    os.replace(temporary, whole)
    folder = os.open(os.path.dirname(whole), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
