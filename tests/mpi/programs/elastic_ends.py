"""Leave `hs.elastic.run` in one of several ways: ``elastic_ends.py WAY``."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable

import hpcstrat as hs


class CommonError(Exception):
    """An error that all active ranks raise together."""


def _leave(way: str, rank: int) -> None:
    if way == "exit":
        sys.exit(3)
    if way == "caught":
        raise CommonError
    if way == "error" and rank == 0:
        raise ValueError("the cause")


def _make_train(way: str) -> Callable[..., str]:
    def train(strategy: hs.Strategy, memory: hs.elastic.Memory) -> str:
        if way == "groups_after_loss":
            groups = hs.SyncGroups(size=1, every=2)
            if groups.everyone.replica_id == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            groups.everyone.barrier()
        memory.track()
        memory.restore()
        memory.commit(1)
        strategy.barrier()
        if "after_loss" in way and strategy.num_replicas_in_sync == 3:
            if strategy.replica_id == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            strategy.barrier()
        _leave(way, strategy.replica_id)
        strategy.barrier()
        return "the result"

    return train


def _swallowing(train: Callable[..., str]) -> Callable[..., str]:
    def swallowing(strategy: hs.Strategy, memory: hs.elastic.Memory) -> str:
        try:
            return train(strategy, memory)
        except hs.RankLostError:
            return "no result"

    return swallowing


def main() -> None:
    """Run a training function that ends in the way of the first argument."""
    way = sys.argv[1]
    atexit.register(print, "an exit function ran", flush=True)
    train = _make_train(way)
    if way.startswith("swallows"):
        train = _swallowing(train)
    try:
        result = hs.elastic.run(train, spare_ranks=int("after_loss" not in way))
    except CommonError:
        result = "caught"
    print("result:", result, flush=True)


if __name__ == "__main__":
    main()
