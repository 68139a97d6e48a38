"""The hang file: a record of late ranks and errors, with the states of ranks.

A job without late ranks or errors writes no file. A rank that detects an event appends
a line of JSON to the file. ``hpcstrat hang`` explains these lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import threading
import time
from collections.abc import Callable
from typing import Any

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.cluster_resolver.launch import run_name
from hpcstrat.engine.logs import rank_on_host

__all__ = ["add_event", "keep_in", "path_of"]

# Limit of the wait, so that a dead file server cannot delay the end of the job.
_SECONDS = 2.0
_PREFIX, _SUFFIX = "hpcstrat-hang-", ".jsonl"
_MOST_FILES = 10


class _Kept:
    """The folder of the file, and the function that returns the states of ranks."""

    folder = ""
    states: Callable[[], list[dict[str, Any]]] | None = None


def path_of(folder: str) -> str:
    """Return the path of this job's hang file in a folder."""
    # Without a job name, use the host and the launcher's process (the parent process).
    name = run_name() or f"{platform.node()}-{os.getppid()}"
    words = re.sub(r"[^\w.]+", "-", name)
    return os.path.join(os.path.abspath(folder), f"{_PREFIX}{words}{_SUFFIX}")


def keep_in(folder: str, states: Callable[[], list[dict[str, Any]]]) -> None:
    """Write the events of this rank to this job's hang file in ``folder`` from now on.

    Each event includes the result of ``states()``. An empty ``folder`` means no file.
    """
    _Kept.folder, _Kept.states = folder, states


def add_event(event: str, **content: Any) -> None:
    """Add an event of this rank to the hang file; never raise or wait for long."""
    if not _Kept.folder:
        return
    writer = threading.Thread(target=_add, args=(event, content), daemon=True)
    writer.start()
    writer.join(_SECONDS)


def _add(event: str, content: dict[str, Any]) -> None:
    try:
        if "ranks" not in content and _Kept.states is not None:
            content["ranks"] = _Kept.states()
        launch = launch_from_environment()
        about = {
            "event": event,
            "time": round(time.time(), 3),
            "rank": launch.rank,
            "size": launch.size,
            "place": rank_on_host(),
        }
        line = json.dumps(about | content, default=str).encode() + b"\n"
        path = path_of(_Kept.folder)
        made = _append(path, line)
        if made or event == "late":
            # One rank makes the file, and so tells of it.
            command = f"hpcstrat hang {shlex.quote(path)}"
            os.write(2, f"hpcstrat: `{command}` explains what happened\n".encode())
        if made:
            _remove_old(os.path.dirname(path))
    except Exception:
        # An error in writing this file must not hide the original error of the job.
        return


def _append(path: str, line: bytes) -> bool:
    """Append a line to a file; return whether the file had to be made."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    try:
        file, made = os.open(path, flags), False
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            file, made = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644), True
        except FileExistsError:
            # Another rank has just made the file.
            file, made = os.open(path, flags), False
    try:
        # Write a line by one call, so that lines of several ranks do not mix.
        os.write(file, line)
    finally:
        os.close(file)
    return made


def _remove_old(folder: str) -> None:
    """Remove all hang files of a folder except of the newest."""
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX):
                files.append((entry.stat().st_mtime_ns, entry.path))
    for _, path in sorted(files)[:-_MOST_FILES]:
        # Another job may remove the same file.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
