"""Ways in which a coordinator or a worker can end: ``serving.py WAY``."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from typing import Any

import numpy as np

import hpcstrat as hs
from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.topology import starting
from hpcstrat.engine.topology.topology import start_mpi


def kill(*_: Any, **named: Any) -> None:
    """Kill the process that calls this function."""
    os.kill(os.getpid(), signal.SIGKILL)


def workers() -> None:
    """Let each worker run the program, and end at its own time, in its own way."""
    settings = hs.Settings(limit_seconds=2)
    strategy = hs.ParameterServerStrategyV1(settings=settings)
    with strategy.scope():
        variable = hs.Variable(0.0)
    variable.assign_add(1.0)
    if strategy.worker_index == 0:
        deadline = time.monotonic() + 10
        while variable.numpy() < len(strategy.roles.workers):
            assert time.monotonic() < deadline
        print("value", float(variable.numpy()), flush=True)
        strategy.close()
        return
    # Sleep longer than the time for which a rank waits for other ranks in a call.
    time.sleep(3)
    try:
        with strategy.scope():
            hs.Variable(0.0)
    except ValueError as error:
        print(error, flush=True)
    variable.assign_add(1.0)
    print("at last", float(variable.numpy()), flush=True)


def fewer() -> None:
    """Let the last worker make fewer variables than the first."""
    strategy = hs.ParameterServerStrategyV1()
    with strategy.scope():
        hs.Variable(0.0, name="both")
        if strategy.worker_index == 0:
            hs.Variable(0.0, name="second")


def late(begun: Any, table: Any) -> None:
    """Update and read a variable after the coordinator's program has ended."""
    begun.assign_add(1.0)
    time.sleep(0.3)
    table.assign_add(np.ones(table.shape), read_value=False)
    print("late", float(table.numpy()[-1]), flush=True)


def lost() -> None:
    """Lose the server, close the strategy, and end without MPI_Finalize."""

    def not_told(comm: Any) -> list[int]:
        print("asked MPI", flush=True)
        return []

    # Act like an MPI library that reports the loss only after the ranks have ended.
    vars(starting)["lost_ranks"] = not_told
    strategy = hs.ParameterServerStrategy(on_lost_rank="raise")
    coordinator = hs.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        pid = hs.Variable(hs.Rows((1,), np.int64, process))
    os.kill(int(pid.numpy()[0]), signal.SIGKILL)
    try:
        while True:
            coordinator.schedule(pid.numpy).fetch()
    except hs.UnavailableError:
        strategy.close()
    print("closed", flush=True)
    os._exit(0)


def creation() -> None:
    """Kill a rank at the given place in the creation of the strategy."""
    place, rank = sys.argv[2], int(sys.argv[3])
    start_mpi()
    if launch_from_environment().rank == rank:
        module, _, name = place.rpartition(".")
        if not module:
            kill()
        setattr(importlib.import_module(module), name, kill)
    strategy = hs.ParameterServerStrategy(spare_ranks=1, on_lost_rank="raise")
    coordinator = hs.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variable = hs.Variable(0.0)
    for _ in range(10):
        coordinator.schedule(variable.assign_add, (1.0,))
    coordinator.join()
    roles = strategy.roles
    print(f"{variable.numpy()} with {len(roles.workers)} and {len(roles.spares)} spare")


def process(start: int, stop: int) -> Any:
    """Return an array whose rows all contain this process number."""
    return np.full(stop - start, os.getpid())


def main() -> None:
    """Schedule a function, and end in the given way."""
    way = sys.argv[1]
    if way in ("workers", "fewer", "lost", "creation"):
        globals()[way]()
        return
    strategy = hs.ParameterServerStrategy()
    coordinator = hs.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variable = hs.Variable(1.0)
    coordinator.schedule(variable.assign_add, (1.0,)).fetch()
    print("value", float(variable.numpy()), flush=True)
    if way == "exit":
        sys.exit(3)
    if way == "raise":
        raise ValueError("the cause")
    if way == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    if way == "busy":
        # The program ends without waiting for the functions that still run.
        with strategy.scope():
            table = hs.Variable(np.zeros(20_000))
        coordinator.schedule(late, (variable, table))
        while variable.numpy() < 3:
            coordinator.done()
    if way == "worker":
        coordinator.schedule(kill)
        coordinator.join()


if __name__ == "__main__":
    main()
