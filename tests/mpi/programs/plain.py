"""Programs that use MPI beside the library: ``plain.py CASE``."""

from __future__ import annotations

import sys
import time
from typing import Any


def _mpi_before() -> None:
    from mpi4py import MPI

    import hpcstrat as hs

    assert MPI.Is_initialized()
    strategy = hs.MultiWorkerMirroredStrategy()
    size = MPI.COMM_WORLD.size
    assert strategy.num_replicas_in_sync == size
    assert strategy.reduce("sum", 1, axis=None) == size
    assert MPI.COMM_WORLD.allreduce(1) == size


def _finalize_after() -> None:
    from mpi4py import MPI

    import hpcstrat as hs

    strategy = hs.MultiWorkerMirroredStrategy()
    strategy.reduce("sum", 1, axis=None)
    strategy.close()
    MPI.Finalize()
    print("finalized", flush=True)


def _finalize_while_open() -> None:
    from mpi4py import MPI

    import hpcstrat as hs

    hs.MultiWorkerMirroredStrategy().reduce("sum", 1, axis=None)
    hs.MultiWorkerMirroredStrategy(replicas_per_worker=1)
    MPI.Finalize()
    print("finalized", flush=True)


def _strategy_after_finalize() -> None:
    from mpi4py import MPI

    import hpcstrat as hs

    MPI.Finalize()
    try:
        hs.MultiWorkerMirroredStrategy()
    except hs.errors.TopologyError as error:
        print(error, flush=True)


def _guilty(catches: bool) -> None:
    import hpcstrat as hs

    strategy = hs.MultiWorkerMirroredStrategy()
    value = "no number" if strategy.replica_id == 1 else 1.0
    try:
        strategy.reduce("sum", value, axis=None)
    except hs.ReplicaError:
        raise
    except ValueError:
        if not catches:
            raise
        time.sleep(60)


def _all_raise() -> None:
    import hpcstrat as hs

    hs.MultiWorkerMirroredStrategy().barrier()
    raise ValueError("the cause")


def _all_differ() -> None:
    import hpcstrat as hs

    strategy = hs.MultiWorkerMirroredStrategy()
    strategy.reduce("sum", [1.0] * (1 + strategy.replica_id), axis=None)


def _error_after_finalize() -> None:
    _finalize_while_open()
    raise ValueError("the cause")


def _strategy() -> Any:
    import hpcstrat as hs

    return hs.MirroredStrategy()


def _strategy_twice() -> None:
    import hpcstrat as hs

    for _ in range(2):
        try:
            hs.MirroredStrategy()
        except hs.errors.TopologyError as error:
            print(error, flush=True)
        else:
            print("a strategy", flush=True)


def _mpi_before_strategy() -> None:
    from mpi4py import MPI

    assert MPI.Is_initialized()
    _strategy()


def _closed_strategies() -> None:
    import hpcstrat as hs

    with hs.MultiWorkerMirroredStrategy() as strategy:
        strategy.reduce("sum", 1, axis=None)
    second = hs.MultiWorkerMirroredStrategy(replicas_per_worker=1)
    second.close()
    print("closed", flush=True)


CASES = {
    "mpi_before": _mpi_before,
    "finalize_after": _finalize_after,
    "finalize_while_open": _finalize_while_open,
    "strategy_after_finalize": _strategy_after_finalize,
    "error_after_finalize": _error_after_finalize,
    "strategy": _strategy,
    "strategy_twice": _strategy_twice,
    "mpi_before_strategy": _mpi_before_strategy,
    "closed_strategies": _closed_strategies,
    "guilty": lambda: _guilty(False),
    "guilty_goes_on": lambda: _guilty(True),
    "all_raise": _all_raise,
    "all_differ": _all_differ,
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
