"""Generations of a run, and the claims in its shared folder.

Each start of the program is a generation, numbered from 1. The watcher that creates the
file ``gen-N`` leads generation N: the file system lets only one of them create it. A
claim is never removed, so that a node that was cut off or stopped sees that the run
went on without it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Generation", "create", "is_minority", "newest", "read"]


@dataclass(frozen=True)
class Generation:
    """One start of the program.

    ``members`` are the nodes of all watchers that took part, ``nodes`` those that run
    ranks. ``failures`` counts the generations in a row that ended without progress, and
    ``blamed`` the generations that ended by the end of a rank of a node. ``job`` names
    the scheduler's job, and its restart.
    """

    number: int
    leader: str
    members: tuple[str, ...]
    nodes: tuple[str, ...]
    failures: int = 0
    blamed: Mapping[str, int] = field(default_factory=dict)
    job: str = ""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Generation:
        """Return the generation of which a file, or another watcher, has told."""
        lists = {name: tuple(told[name]) for name in ("members", "nodes")}
        return cls(**{**told, **lists})


def newest(folder: Path) -> int:
    """Return the number of the newest claim; 0 without any."""
    names = [name[4:] for name in os.listdir(folder) if name.startswith("gen-")]
    return max([int(name) for name in names if name.isdecimal()], default=0)


def create(folder: Path, generation: Generation) -> bool:
    """Claim a generation; return False if another watcher has claimed it."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    try:
        file = os.open(folder / f"gen-{generation.number}", flags, 0o600)
    except FileExistsError:
        return False
    try:
        os.write(file, json.dumps(asdict(generation)).encode())
        os.fsync(file)
    finally:
        os.close(file)
    return True


def read(folder: Path, number: int) -> Generation | None:
    """Return a claimed generation, or None if its claim is not yet written."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return Generation.of(json.loads((folder / f"gen-{number}").read_bytes()))
    return None


def is_minority(
    living: Collection[str], members: Collection[str], lost: Mapping[str, str]
) -> bool:
    """Return whether this part of the nodes must let another part claim first.

    The network may have divided the nodes into parts that do not hear each other. Nodes
    whose connection was closed are not counted, because their kernel has said that the
    watcher has ended.
    """
    silent = [name for name in members if lost.get(name) == "silent"]
    return len(living) <= len(silent)
