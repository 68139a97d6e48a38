"""Sets the variables that torchrun would set, from MPI."""

from __future__ import annotations

import importlib
import os
from typing import Any
from urllib.parse import urlparse

from hpcstrat.integrations.frameworks import meeting_place
from hpcstrat.strategies import MultiWorkerMirroredStrategy

__all__ = ["init_env", "use_for_env"]

# The ports that were given, each with whether a group has met there.
_given: dict[str, bool] = {}


def init_env() -> None:
    """Set the environment variables that ``torchrun`` would set, from the ranks of MPI.

    Collective over all ranks of the job.

    ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``GROUP_RANK``,
    ``GROUP_WORLD_SIZE``, ``ROLE_RANK``, ``ROLE_WORLD_SIZE``, ``MASTER_ADDR`` (of rank
    0, where it listens) and ``MASTER_PORT`` (a free one). Variables that are set stay
    as they are. ``dist.init_process_group`` calls this, once
    `hpcstrat.integrations.torch` is imported and neither ``RANK`` nor ``WORLD_SIZE`` is
    set; call it before, where the program reads ``LOCAL_RANK`` and the like first. A
    default group that is made again after ``dist.destroy_process_group`` gets another
    port.
    """
    strategy = MultiWorkerMirroredStrategy()
    topology = strategy.topology
    address, port = meeting_place(strategy)
    rank, size = topology.replica_id, topology.num_replicas
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": topology.worker_comm.rank,
        "LOCAL_WORLD_SIZE": topology.worker_comm.size,
        "GROUP_RANK": topology.worker_id,
        "GROUP_WORLD_SIZE": topology.num_workers,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    strategy.close()
    for name, value in values.items():
        os.environ.setdefault(name, str(value))
    if os.environ["MASTER_PORT"] == str(port):
        _given[str(port)] = False


def use_for_env() -> None:
    """Let ``env://``, torch's default, call `init_env` where variables are missing."""
    # The package has a function of the module's name.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Any] = getattr(rendezvous, "_rendezvous_handlers", {})
    found = handlers.get("env")
    if found is None or found.__module__ == __name__:
        return

    def handler(url: str, *args: Any, **kwargs: Any) -> Any:
        environ = os.environ
        if not {"RANK", "WORLD_SIZE"} & environ.keys():
            init_env()
        elif _given.get(environ.get("MASTER_PORT", "")) and not urlparse(url).query:
            # Where rank 0 is late to destroy the last group, the store of that group
            # would count the ranks of this one, and rank 0 would wait for them.
            del environ["MASTER_PORT"]
            init_env()
        if environ.get("MASTER_PORT") in _given:
            _given[environ["MASTER_PORT"]] = True
        return found(url, *args, **kwargs)

    handlers["env"] = handler
