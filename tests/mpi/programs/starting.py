"""Make one rank fail at or before the first strategy: ``starting.py HOW WHEN RANK``.

WHEN is ``first`` (before the library starts MPI), ``mpi`` (after the program has
started MPI) or ``second`` (when one strategy exists already, and the next one has only
some of the ranks).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import hpcstrat as hs


def evaluate(seconds: float) -> None:
    """Sleep, like a rank that evaluates a model for a long time."""
    time.sleep(seconds)


def _raise() -> None:
    raise ValueError("the cause")


HOW: Mapping[str, Callable[[], Any]] = {
    "sleeps": lambda: evaluate(3600),
    "raises": _raise,
    "returns": lambda: sys.exit(0),
    "exits": lambda: sys.exit(3),
    "os_exit": lambda: os._exit(0),
    "comes": lambda: evaluate(4),
}
WRONG: Mapping[str, Mapping[str, Any]] = {
    "on_error": {"on_error": "rais"},
    "settings": {"settings": {"warn_seconds": 3}},
    "resolver": {"cluster_resolver": type("Comm", (), {"Get_size": len})()},
    "per_worker": {"replicas_per_worker": 0},
    "comm": {"comm": 5},
    "options": {"communication_options": 7},
    # An option that is valid, but differs from the option of the other ranks.
    "other": {"on_error": "raise"},
}


def _try(kind: Any, options: Mapping[str, Any]) -> None:
    """Print the error of a failed creation; the next creation works on all ranks."""
    try:
        kind(**options)
    except (ValueError, TypeError, AttributeError, hs.CollectiveError) as error:
        who = "all" if isinstance(error, hs.CollectiveError) else "own"
        if isinstance(error, hs.ReplicaError):
            who = "replica"
        print(f"{who}: {error}\n", end="", flush=True)


def _two_orders() -> None:
    """Make strategies of pairs of ranks, in another order on each rank."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    pairs = [(0, 1), (1, 2), (0, 2)]
    comms = {
        p: world.Create_group(world.group.Incl(p)) for p in pairs if world.rank in p
    }
    order = [p for p in (pairs[world.rank :] + pairs[: world.rank]) if p in comms]
    for pair in order:
        hs.MultiWorkerMirroredStrategy(comm=comms[pair])


def main() -> None:
    """Fail on one rank; make a strategy on the other ranks."""
    how, when, late = sys.argv[1], sys.argv[2], int(sys.argv[3])
    comm: Any = None
    if when != "first":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Dup()
    if how == "orders":
        _two_orders()
        return
    if when == "second":
        hs.MultiWorkerMirroredStrategy(replicas_per_worker=1)
        comm = comm.Split(int(comm.rank == comm.size - 1))
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    if how in WRONG:
        options = {} if comm is None else {"comm": comm}
        _try(
            hs.MultiWorkerMirroredStrategy,
            {**options, **(WRONG[how] if rank == late else {})},
        )
    elif how == "devices":
        names = [f"CPU:{i}" for i in range(2)]
        _try(hs.MirroredStrategy, {"devices": ["none"] if rank == late else names})
    elif rank == late:
        print("late", flush=True)
        HOW[how]()
    strategy = hs.MultiWorkerMirroredStrategy(comm=comm)
    print("made", strategy.reduce("sum", 1.0, axis=None), flush=True)


if __name__ == "__main__":
    main()
