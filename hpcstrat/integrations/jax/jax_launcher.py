"""Runs a program as several processes of JAX over MPI, for ``hpcstrat jax``.

Usage: ``python -m hpcstrat.integrations.jax.jax_launcher RANKS KIND PROGRAM [ARGS]``.
``RANKS`` is the number of ranks of a replica that are the processes of one
``jax.distributed``, or 0 for all ranks of the job; ``KIND`` is ``script`` or
``module``.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import jax

from hpcstrat.integrations.frameworks import meeting_place, run_program
from hpcstrat.strategies import MultiWorkerMirroredStrategy

__all__ = ["initialize"]

_COLLECTIVES = "jax_cpu_collectives_implementation"
_GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def initialize(ranks_per_replica: int = 0) -> None:
    """Initialize ``jax.distributed`` with the ranks of MPI.

    Collective over all ranks of the job. With ``ranks_per_replica``, the ranks of each
    replica are the processes of a ``jax.distributed`` of their own. Later calls of
    ``jax.distributed.initialize`` do nothing, or raise ValueError if their arguments
    differ.
    """
    if getattr(jax.config, _COLLECTIVES, None) in (None, "none"):
        # Older versions of JAX need this option to sum between CPUs of processes.
        jax.config.update(_COLLECTIVES, "gloo")
    strategy = MultiWorkerMirroredStrategy()
    topology = strategy.topology
    calls, num_workers, divided = strategy.collectives, topology.num_workers, None
    if ranks_per_replica:
        divided = MultiWorkerMirroredStrategy(ranks_per_replica=ranks_per_replica)
        calls = divided.inside.collectives
    address, port = meeting_place(calls, num_workers)
    own = {
        "num_processes": calls.size,
        "process_id": calls.rank,
        "local_device_ids": _own_gpu(topology.worker_comm.rank, os.environ),
    }
    if divided is not None:
        divided.close()
    strategy.close()
    jax.distributed.initialize(coordinator_address=f"{address}:{port}", **own)
    jax.distributed.initialize = functools.partial(_again, own)


def _own_gpu(local_rank: int, environment: Any) -> list[int] | None:
    """Return the number of a rank's own GPU among the GPUs that are visible to it."""
    seen = [environment[name] for name in _GPUS if environment.get(name)]
    # Some launchers make only the rank's own GPU visible, which then has number 0.
    if seen and len(seen[0].split(",")) == 1:
        return [0]
    return [local_rank]


def _again(own: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Stand in for ``jax.distributed.initialize``; ValueError if arguments differ."""
    names = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
    asked = {**dict(zip(names, args, strict=False)), **kwargs}
    for name, value in own.items():
        given = asked.get(name)
        given = [given] if name == "local_device_ids" and type(given) is int else given
        if given is not None and given != value:
            raise ValueError(
                f"expected jax.distributed.initialize with {name}={value}, as hpcstrat "
                f"jax has set it up, found {given}; call it without arguments"
            )


def _main() -> None:
    ranks, kind, program, *words = sys.argv[1:]
    initialize(int(ranks))
    run_program(kind, program, words)


if __name__ == "__main__":
    _main()
