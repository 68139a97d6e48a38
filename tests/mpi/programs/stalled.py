"""Make one rank late for a call, or absent: ``stalled.py HOW WHERE RANK [SIZE]``.

The late rank prints ``late``, and is then late in the way HOW; the other ranks wait in
the place WHERE. With ``piece`` the rank joins the call, and is late in the midst of it.
The environment sets after how many seconds the other ranks complain. SIZE is the number
of replicas per worker.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import hpcstrat as hs
from hpcstrat.engine.channel.interruptible import InterruptibleComm
from tests.mpi.programs.midst import large, lay_trap

_open: list[Any] = []


def evaluate(seconds: float) -> None:
    """Sleep, like a rank that evaluates a model for a long time."""
    time.sleep(seconds)


def _sleep() -> None:
    evaluate(3600)


def count_for_ever() -> None:
    """Loop in Python code for ever."""
    number = 0
    while True:
        number += 1


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _cut_off() -> None:
    """Disable the network interface of this host."""
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


def hold_the_interpreter() -> None:
    """Block in C code that holds the interpreter lock, where no Python handler runs."""
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def sum_in_c() -> None:
    """Compute in C code that holds the interpreter lock."""
    sum(range(10**15))


def _let_the_interpreter_go() -> None:
    ctypes.CDLL(None).sleep(3600)


def _come_after(seconds: float) -> Callable[[], None]:
    return lambda: evaluate(seconds)


def _slow(seconds: float, said: float) -> Callable[[], None]:
    def act() -> None:
        with _open[-1].expect_slow(1), _open[-1].expect_slow(said):
            evaluate(seconds)

    return act


def _slow_in_c(seconds: int, said: float) -> Callable[[], None]:
    def act() -> None:
        with _open[-1].expect_slow(said):
            ctypes.PyDLL(None).sleep(seconds)

    return act


def _slow_then_stuck() -> None:
    with _open[-1].expect_slow(60):
        evaluate(2)
    _sleep()


def _mpi() -> None:
    """Wait in MPI itself for the other ranks, which wait for this rank."""
    _open[-1].topology.replica_comm.Barrier()


HOW: dict[str, Callable[[], None]] = {
    "at_once": lambda: None,
    "sleep": _sleep,
    "loop": count_for_ever,
    "stop": _stop,
    "cut": _cut_off,
    "holds": hold_the_interpreter,
    "sums": sum_in_c,
    "lets_go": _let_the_interpreter_go,
    "comes": _come_after(4),
    "slow": _slow(5, 60),
    "slow_in_c": _slow_in_c(7, 60),
    "too_slow": _slow(3600, 3),
    "slow_then_stuck": _slow_then_stuck,
    "mpi": _mpi,
}


def _wait(where: str) -> None:
    strategy = _open[-1]
    if where == "reduce":
        strategy.reduce("sum", np.ones(3, np.float32), axis=None)
    elif where == "piece":
        strategy.reduce("sum", large(), axis=None)
    elif where == "broadcast":
        strategy.broadcast_object("x" * 10)
    elif where == "timeout":
        options = hs.CommunicationOptions(timeout_seconds=2)
        strategy.run(
            lambda: hs.get_replica_context().all_reduce("sum", 1.0, options=options)
        )
    elif where == "gather":
        # Each piece is fast, but all pieces together take longer than any limit.
        move: Any = InterruptibleComm.Allgatherv
        InterruptibleComm.Allgatherv = lambda *args: (time.sleep(0.1), move(*args))[1]
        strategy.gather([np.ones(2) for _ in range(60)], axis=0)
    elif where == "inside":
        # All ranks have announced the call, but one rank does not move its data.
        channel = strategy.collectives.channel
        with channel.moving(channel.last_call):
            strategy.topology.replica_comm.Barrier()
    elif where != "exit":
        raise ValueError(where)


def main() -> None:
    """Make the strategy, then be late on one rank and wait on the others."""
    how, where, late = sys.argv[1], sys.argv[2], int(sys.argv[3])
    per_worker = int(sys.argv[4]) if len(sys.argv) > 4 else None
    strategy = hs.MultiWorkerMirroredStrategy(replicas_per_worker=per_worker)
    _open.append(strategy)
    rank = strategy.replica_id
    for _ in range(3):
        strategy.reduce("sum", 1.0, axis=None)
    strategy.barrier()
    if rank == late:
        print("late", flush=True)
        if where == "piece":
            lay_trap(HOW[how])
        else:
            HOW[how]()
            print("came", flush=True)
    _wait(where)
    print("done", flush=True)


if __name__ == "__main__":
    main()
