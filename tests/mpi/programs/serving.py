"""A coordinator ends in some way, or a worker does: ``serving.py WAY``."""

from __future__ import annotations

import os
import signal
import sys
import time

import hpcstrat as hs


def kill() -> None:
    """End the worker that runs this."""
    os.kill(os.getpid(), signal.SIGKILL)


def workers() -> None:
    """Let each worker run the program, the first one longer than the others."""
    strategy = hs.ParameterServerStrategyV1()
    with strategy.scope():
        variable = hs.Variable(0.0)
    variable.assign_add(1.0)
    if strategy.worker_index == 0:
        deadline = time.monotonic() + 10
        while variable.numpy() < len(strategy.roles.workers):
            assert time.monotonic() < deadline
        print("value", float(variable.numpy()), flush=True)


def main() -> None:
    """Schedule a function, and end."""
    way = sys.argv[1]
    if way == "workers":
        workers()
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
        # What is under way at the end is not waited for by the program.
        coordinator.schedule(time.sleep, (0.1,))
    if way == "worker":
        coordinator.schedule(kill)
        coordinator.join()


if __name__ == "__main__":
    main()
