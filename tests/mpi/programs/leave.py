"""Let one rank leave while the other ranks wait: ``leave.py WAY WAIT RANK``.

The program sets its own exception hook before it makes the strategy. The hook prints
``hook ...`` for each uncaught exception that reaches it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import hpcstrat as hs

# Time that the other ranks have to begin their wait.
_HEAD_START_SECONDS = 0.2

# The open strategies; the other ranks wait in a call of the last one.
_open: list[Any] = []


def _own_hook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    print(f"hook {kind.__name__}", flush=True)
    sys.__excepthook__(kind, error, trace)


def _raise() -> None:
    raise ValueError("the cause")


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def _kill(number: int) -> Callable[[], None]:
    def act() -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    return act


def _thread() -> None:
    thread = threading.Thread(target=_raise)
    thread.start()
    thread.join()


def _within_run() -> None:
    _open[-1].run(_raise)


def _bad_argument() -> None:
    _open[-1].reduce("sum", "no number", axis=None)


def _new_strategy() -> None:
    hs.MultiWorkerMirroredStrategy(replicas_per_worker=2)


def _finalize() -> None:
    from mpi4py import MPI

    MPI.Finalize()


def _error_after_finalize() -> None:
    _finalize()
    _raise()


def _error_with_later_hook() -> None:
    sys.excepthook = _own_hook
    _raise()


def _forked_child_ends() -> None:
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    time.sleep(1.5)


WAYS: dict[str, Callable[[], Any]] = {
    "error": _raise,
    "error_in_run": _within_run,
    "bad_argument": _bad_argument,
    "new_strategy": _new_strategy,
    "exit0": lambda: sys.exit(0),
    "exit3": lambda: sys.exit(3),
    "exit_text": lambda: sys.exit("a last word"),
    "interrupt": _interrupt,
    "return": lambda: None,
    "kill": _kill(signal.SIGKILL),
    "term": _kill(signal.SIGTERM),
    "os_exit": lambda: os._exit(0),
    "thread": _thread,
    "finalize": _finalize,
    "error_after_finalize": _error_after_finalize,
    "later_hook": _error_with_later_hook,
    "works_on": lambda: time.sleep(5),
    "forked_child": _forked_child_ends,
}


def _wait(place: str) -> None:
    """Wait in the given place for the rank that leaves."""
    strategy = _open[-1]
    if place == "run":
        context = hs.get_replica_context
        strategy.run(lambda: context().all_reduce("sum", 1.0))
    elif place == "mpi":
        strategy.topology.replica_comm.Barrier()
    elif place in ("reduce", "worker_each"):
        strategy.reduce("sum", 1.0, axis=None)
    elif place == "caught":
        try:
            strategy.reduce("sum", 1.0, axis=None)
        except hs.errors.CollectiveError as error:
            print("caught", error, flush=True)
    elif place != "exit":
        raise ValueError(place)


def main() -> None:
    """Make the strategy, then leave on one rank and wait on the others."""
    way, place, cause = sys.argv[1], sys.argv[2], int(sys.argv[3])
    options = sys.argv[4:]
    sys.excepthook = _own_hook
    each = 1 if place == "worker_each" else None
    strategy = hs.MultiWorkerMirroredStrategy(replicas_per_worker=each)
    _open.append(strategy)
    comm = strategy.topology.replica_comm
    rank = comm.rank
    if "second" in options:
        _open.append(hs.MultiWorkerMirroredStrategy(replicas_per_worker=1))
    if "part" in options:
        # The last rank is not part of the second strategy.
        part = comm.Split(int(rank == comm.size - 1), rank)
        second = hs.MultiWorkerMirroredStrategy(comm=part)
        if rank == comm.size - 1:
            place = "exit"
        else:
            _open.append(second)
    strategy.reduce("sum", 1.0, axis=None)
    if rank == cause or way.startswith("all_"):
        if not way.startswith("all_"):
            time.sleep(_HEAD_START_SECONDS)
        WAYS[way.removeprefix("all_")]()
        if way == "forked_child":
            _wait(place)
        print("the cause has ended", flush=True)
    else:
        _wait(place)


if __name__ == "__main__":
    main()
