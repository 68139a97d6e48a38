"""The environment that a node's watcher sets, the number of the run, and its socket.

A watcher starts the ranks again on the nodes that are left. Each start is a generation,
claimed by a file ``gen-<N>`` in a shared folder. Without watchers nothing is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

from hpcstrat.errors import CheckpointError

__all__ = [
    "WatcherSettings",
    "require_newest_generation",
    "tell_watcher",
    "watched_nodes",
    "watcher",
]

_NAMES = ("FOLDER", "RUN", "GENERATION", "MEMORY", "SOCKET", "NODE", "JOB")
# A watcher that does not answer must not delay each save.
_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class WatcherSettings:
    """The watcher's settings; empty, and generation 0, without a watcher.

    ``folder`` is shared by all nodes and has the claims of generations. ``run`` is the
    number of the run. ``memory`` is this node's own folder in memory. ``socket`` is
    the path of the watcher's socket. ``node`` is the watcher's name of this node, and
    ``job`` that of the watchers' job.
    """

    folder: str = ""
    run: str = ""
    generation: int = 0
    memory: str = ""
    socket: str = ""
    node: str = ""
    job: str = ""


def watcher() -> WatcherSettings:
    """Return the settings of this node's watcher, from the environment."""
    folder, run, generation, *others = (
        os.environ.get(f"HPCSTRAT_WATCH_{name}", "") for name in _NAMES
    )
    number = int(generation) if generation.isdecimal() else 0
    return WatcherSettings(folder, run, number, *others)


def watched_nodes() -> set[str]:
    """Return the nodes of this generation's watchers; none if its claim is missing."""
    found = watcher()
    path = os.path.join(found.folder, f"gen-{found.generation}")
    with contextlib.suppress(OSError, ValueError, KeyError), open(path, "rb") as file:
        return set(json.load(file)["members"])
    return set()


def require_newest_generation(doing: str) -> None:
    """Raise CheckpointError if a newer generation of the run was started.

    The ranks of this process may have been frozen, or cut off, when the watchers
    started the run again. Their checkpoints must not mix with those of the new ranks.
    """
    found = watcher()
    if not (found.folder and found.generation):
        return
    newer = found.generation
    while os.path.exists(os.path.join(found.folder, f"gen-{newer + 1}")):
        newer += 1
    if newer > found.generation:
        raise CheckpointError(
            f"expected generation {found.generation} of the run to be the newest in "
            f"{doing}, found generation {newer} in {found.folder}; end this process, "
            "because the run was started again without it"
        )


def tell_watcher(kind: str, **fields: Any) -> bool:
    """Send a message to the watcher's socket; return whether it was sent."""
    path = watcher().socket
    if not path:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(_SECONDS)
            line.connect(path)
            line.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")
    except OSError:
        return False
    return True
