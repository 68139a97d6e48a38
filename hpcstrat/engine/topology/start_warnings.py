"""Warnings about slow core bindings and a small /dev/shm, once per host and process."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.topology.bindings import CoreMasks, crowded_ranks

__all__ = ["warn_of_bindings", "warn_of_memory"]

_said: set[str] = set()


def warn_of_bindings(rank: int, masks: Sequence[CoreMasks]) -> None:
    """Warn, on the first rank of a host, if the host's ranks share too few cores.

    ``masks`` has one element for each rank of the host.
    """
    if rank or "bindings" in _said:
        return
    for crowded in crowded_ranks(masks):
        _said.add("bindings")
        numbers = ", ".join(map(str, crowded.ranks))
        words = f"{len(crowded.ranks)} of its ranks ({numbers} of the host)"
        get_logger("start").warning("%s", crowded.text(platform.node(), words))


def warn_of_memory(comm: Any, asked_bytes: int, found_bytes: int) -> None:
    """Warn, on the first rank of a worker, if its /dev/shm is too small.

    ``asked_bytes`` and ``found_bytes`` are sizes for each rank of ``comm``.
    """
    if comm.rank or "memory" in _said or found_bytes >= asked_bytes:
        return
    _said.add("memory")
    get_logger("start").warning(
        "expected room for %d KiB in /dev/shm of host %s, found %d KiB, so sums inside "
        "this host are computed in smaller pieces; give the container more "
        "(--shm-size, --ipc=host), or tell the site",
        asked_bytes * comm.size >> 10,
        platform.node(),
        found_bytes * comm.size >> 10,
    )
