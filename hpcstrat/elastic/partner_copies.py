"""Copies of what one replica alone has, kept by a replica of another worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.typing import Array

__all__ = ["exchange", "partners_of"]

_TAG = 17


def partners_of(workers: Sequence[int]) -> list[int]:
    """Return which replica keeps the copy of each.

    Not collective.

    Parameters
    ----------
    workers : sequence of int
        The worker of each replica.

    Returns
    -------
    list of int
        The one at the same position of the next worker; of the same worker the next
        replica, where there is one worker only.
    """
    count = len(workers)
    if len(set(workers)) == 1:
        return [(replica + 1) % count for replica in range(count)]
    members: dict[int, list[int]] = {}
    for replica, worker in enumerate(workers):
        members.setdefault(worker, []).append(replica)
    order = sorted(members)
    following = dict(zip(order, order[1:] + order[:1], strict=True))
    partners = []
    for replica, worker in enumerate(workers):
        others = members[following[worker]]
        partners.append(others[members[worker].index(replica) % len(others)])
    return partners


def exchange(strategy: Any, part: Array, partners: Sequence[int]) -> dict[int, Array]:
    """Send a part to this replica's partner, and receive those of others.

    Collective over the strategy's replicas.

    Parameters
    ----------
    strategy : Strategy
        Of at least two replicas.
    part : ndarray of uint8 of shape (n,)
        Of the same length on every replica.
    partners : sequence of int
        From `partners_of`.

    Returns
    -------
    dict of int to ndarray
        The parts that this replica keeps, by replica.
    """
    own = strategy.replica_id
    sources = [r for r, partner in enumerate(partners) if partner == own]
    received = {source: np.empty_like(part) for source in sources}
    collectives = strategy.collectives
    what = f"partner copies of {part.size} bytes"
    collectives.barrier(what)
    with collectives.moving(what) as comm:
        comm.exchange({partners[own]: part}, received, _TAG)
    return received
